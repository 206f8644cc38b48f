"""The LCEL chain of the LangChain tutorials, with ChatBlend as its model."""

from pathlib import Path

from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvrag import ChatBlend, KVWarmVectorStore, SentenceTransformerEmbeddings

MODEL = "reader"  # the bundled model; or for example "Qwen/Qwen2.5-1.5B-Instruct"
PATHS = sorted((Path(__file__).parent / "corpus").glob("*.txt"))

# "off": no automatic full prefill, which is faster for prompts this short
llm = ChatBlend(model=MODEL, store="kv", max_tokens=32, temperature=0, controller="off")
vectors = KVWarmVectorStore(InMemoryVectorStore(SentenceTransformerEmbeddings()), llm)
vectors.add_texts([path.read_text() for path in PATHS], ids=[path.name for path in PATHS])  # also encodes them

prompt = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
context = vectors.as_retriever() | (lambda documents: "\n\n".join(document.page_content for document in documents))
chain = {"context": context, "question": RunnablePassthrough()} | prompt | llm | StrOutputParser()

with get_usage_metadata_callback() as usage:
    for question in ("Which company has its offices in Danvik?", "What does Holra play?"):
        print(question, end="", flush=True)
        for piece in chain.stream(question):
            print(piece, end="", flush=True)
        print()

(counted,) = usage.usage_metadata.values()
print(f"{counted['input_token_details']['cache_read']} of {counted['input_tokens']} prompt tokens reused")
