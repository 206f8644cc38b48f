"""Warm a knowledge base of Open WebUI: `kvrag serve` then reuses its chunks when Open WebUI puts them into a prompt.

    export OPEN_WEBUI_KEY=sk-...      # Open WebUI: Settings > Account > API keys
    export KVRAG_API_KEY=secret       # if the server has one
    python examples/open_webui_warm.py http://localhost:3000 http://localhost:8000 "Handbook"

Without a name, it lists the knowledge bases. Run it again after a change: chunks that the server has are not encoded
again, and those of deleted files are dropped. Written for Open WebUI 0.12. The model `NAME` of the server answers with
these chunks; `NAME-rag` retrieves from its own corpus instead.
"""

import os
import sys
from collections import defaultdict

import httpx

from kvrag import RemoteEngine

MOST = 10_000  # chunks of a knowledge base; some vector stores return no more
webui, server, *wanted = sys.argv[1:]
http = httpx.Client(
    base_url=f"{webui.rstrip('/')}/api/v1",
    headers={"Authorization": f"Bearer {os.environ['OPEN_WEBUI_KEY']}"},
    timeout=300,
)

# the knowledge bases that the key's owner may read, page by page
bases: list[dict] = []
while page := http.get("/knowledge/", params={"page": len(bases) // 30 + 1}).raise_for_status().json()["items"]:
    bases += page
    if len(page) < 30:
        break
chosen = [base for base in bases if base["name"] in wanted]
if len(chosen) < len(set(wanted)) or not wanted:
    sys.exit(f"choose among these knowledge bases: {', '.join(base['name'] for base in bases) or 'none'}")

engine = RemoteEngine(server)
for base in chosen:
    # all chunks as Open WebUI has split them: those of a search whose limit is never reached
    search = {"collection_name": base["id"], "query": base["name"], "k": MOST, "hybrid": False}
    found = http.post("/retrieval/query/doc", json=search).raise_for_status().json()  # None if it is empty
    chunks = list(zip(found["metadatas"][0], found["documents"][0], strict=True)) if found else []
    if len(chunks) == MOST:
        sys.exit(f"{base['name']} has {MOST} chunks or more: divide it")
    files = defaultdict(list)
    for about, text in sorted(chunks, key=lambda row: (row[0].get("page", 0), row[0].get("start_index", 0))):
        files[f"open-webui/{base['id']}/{about['file_id']}"].append(text)
    texts = [text for file in files.values() for text in file]
    report = engine.warm(texts, document=[name for name, file in files.items() for _ in file])
    gone = set(engine.documents(f"open-webui/{base['id']}/")) - files.keys()
    for name in gone:
        engine.forget(name)
    print(f"{base['name']}: {len(files)} files, {report.new} chunks encoded now, {report.reused} before,", end=" ")
    print(f"{len(gone)} deleted files dropped")
