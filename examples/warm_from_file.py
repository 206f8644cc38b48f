"""Warm the documents of LangChain's InMemoryVectorStore, saved in a file, and answer from them."""

from pathlib import Path

from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvrag import ChatBlend, KVWarmVectorStore, SentenceTransformerEmbeddings

MODEL = "reader"  # the bundled model; or for example "Qwen/Qwen2.5-1.5B-Instruct"

# your vectors; a new file is filled with a few articles
embeddings = SentenceTransformerEmbeddings()
if not Path("vectors.json").exists():
    paths = sorted((Path(__file__).parent / "corpus").glob("*.txt"))
    InMemoryVectorStore.from_texts(
        [path.read_text() for path in paths], embeddings, ids=[path.name for path in paths]
    ).dump("vectors.json")
stored = InMemoryVectorStore.load("vectors.json", embeddings)

# "off": no automatic full prefill, which is faster for a prompt this short
llm = ChatBlend(model=MODEL, store="kv", max_tokens=32, temperature=0, controller="off")
vectors = KVWarmVectorStore(stored, llm)  # encodes documents added from now on, and drops deleted ones
report = vectors.warm_existing()
print(f"{report.chunks} documents: {report.new} encoded now, {report.reused} before")

question = "Which company has its offices in Danvik?"
retrieved = vectors.similarity_search(question, k=3)
answer = llm.invoke("\n\n".join([*(document.page_content for document in retrieved), f"Question: {question}"]))
usage = answer.usage_metadata
print(question, answer.text.strip())
print(f"{usage['input_token_details']['cache_read']} of {usage['input_tokens']} prompt tokens reused")
