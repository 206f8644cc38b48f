"""Warm the documents of a Qdrant collection, and answer from them."""

import uuid
from pathlib import Path

from langchain_kvrag import ChatBlend, KVWarmVectorStore, SentenceTransformerEmbeddings
from langchain_qdrant import QdrantVectorStore
from qdrant_client import QdrantClient
from qdrant_client.models import Distance, VectorParams

MODEL = "reader"  # the bundled model; or for example "Qwen/Qwen2.5-1.5B-Instruct"

# your collection; a few articles are added to a new one
client = QdrantClient(path="qdrant")  # or url="http://..."
is_new = not client.collection_exists("articles")
if is_new:
    client.create_collection("articles", vectors_config=VectorParams(size=384, distance=Distance.COSINE))
qdrant = QdrantVectorStore(client, "articles", SentenceTransformerEmbeddings())
if is_new:
    paths = sorted((Path(__file__).parent / "corpus").glob("*.txt"))
    ids = [str(uuid.uuid5(uuid.NAMESPACE_URL, path.name)) for path in paths]
    qdrant.add_texts([path.read_text() for path in paths], ids=ids)

# "off": no automatic full prefill, which is faster for a prompt this short
llm = ChatBlend(model=MODEL, store="kv", max_tokens=32, temperature=0, controller="off")
vectors = KVWarmVectorStore(qdrant, llm)  # encodes documents added from now on, and drops deleted ones
page = None
while True:
    points, page = client.scroll("articles", limit=1000, offset=page, with_payload=False)
    report = vectors.warm_existing([point.id for point in points])
    print(f"{report.chunks} documents: {report.new} encoded now, {report.reused} before")
    if page is None:
        break

question = "Which company has its offices in Danvik?"
retrieved = vectors.similarity_search(question, k=3)
answer = llm.invoke("\n\n".join([*(document.page_content for document in retrieved), f"Question: {question}"]))
usage = answer.usage_metadata
print(question, answer.text.strip())
print(f"{usage['input_token_details']['cache_read']} of {usage['input_tokens']} prompt tokens reused")
client.close()
