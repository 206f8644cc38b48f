"""Warm the documents of a Chroma collection, and answer from them."""

from pathlib import Path

from langchain_chroma import Chroma
from langchain_kvrag import ChatBlend, KVWarmVectorStore, SentenceTransformerEmbeddings

MODEL = "reader"  # the bundled model; or for example "Qwen/Qwen2.5-1.5B-Instruct"

# your collection; a few articles are added to a new one
chroma = Chroma("articles", SentenceTransformerEmbeddings(), persist_directory="chroma")
if not chroma.get(limit=1)["ids"]:
    paths = sorted((Path(__file__).parent / "corpus").glob("*.txt"))
    # metadata is required: langchain-chroma 1.1 cannot get documents without it by id
    sources = [{"source": path.name} for path in paths]
    chroma.add_texts([path.read_text() for path in paths], sources, ids=[path.name for path in paths])

# "off": no automatic full prefill, which is faster for a prompt this short
llm = ChatBlend(model=MODEL, store="kv", max_tokens=32, temperature=0, controller="off")
vectors = KVWarmVectorStore(chroma, llm)  # encodes documents added from now on, and drops deleted ones
report = vectors.warm_existing(chroma.get(include=[])["ids"])
print(f"{report.chunks} documents: {report.new} encoded now, {report.reused} before")

question = "Which company has its offices in Danvik?"
retrieved = vectors.similarity_search(question, k=3)
answer = llm.invoke("\n\n".join([*(document.page_content for document in retrieved), f"Question: {question}"]))
usage = answer.usage_metadata
print(question, answer.text.strip())
print(f"{usage['input_token_details']['cache_read']} of {usage['input_tokens']} prompt tokens reused")
