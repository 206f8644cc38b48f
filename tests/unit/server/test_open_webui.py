"""The requests of Open WebUI 0.12.4, written down from its code (nothing of it is run here).

`routers/openai.py` sends chats, `routers/tasks.py` titles and follow-up questions.
Fields of its own (metadata, features, session_id, chat_id, id, background_tasks, tool_ids, files, variables) are
removed before (`main.py`, `utils/middleware.py`), so none of them reaches the server.
"""

from __future__ import annotations

import json
import runpy
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from blending import CHUNKS
from serving import NAME, Served, make_corpus, serving

from kvrag import BlendEngine
from kvrag.server.settings import ApiKey

ROOT = Path(__file__).parents[3]
PAGE = "http://localhost:3000"
HEADERS = {
    "X-OpenWebUI-User-Name": "Mira%20Brel",
    "X-OpenWebUI-User-Id": "f3b4",
    "X-OpenWebUI-User-Email": "mira@example.com",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "6f1a",
}
QUESTION = "Who likes curry?"
SOURCES = "".join(
    f'<source id="{number}" name="notes.txt" resource-type="collection" resource-id="c1">{text}</source>\n'
    for number, text in enumerate(CHUNKS[:3], 1)
)
RAG = f"### Task:\nRespond to the user query using the provided context.\n\n<context>\n{SOURCES.strip()}\n</context>\n"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search_web",
        "description": "Search the public web.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
CALL = {"id": "c1", "type": "function", "index": 0, "function": {"name": "search_web", "arguments": '{"query": "a"}'}}
CHAT: dict[str, Any] = {
    "stream": True,
    "model": NAME,
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{RAG}\n{QUESTION}"}],
    "stream_options": {"include_usage": True},
    "max_tokens": 4,
    "controller": "off",  # as a custom parameter of the model
}
PARAMETERS = {  # of a chat's settings
    "temperature": 0.0,
    "top_p": 0.9,
    "top_k": 40,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "reasoning_effort": "medium",
    "seed": 1,
    "stop": ["###"],
    "logit_bias": {"5": -1},
}
AFTER_A_CALL = {
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_details": [{"text": "a"}]},
        {"role": "tool", "tool_call_id": "c1", "content": CHUNKS[0]},
    ],
}
TITLE = {
    "model": NAME,
    "messages": [{"role": "user", "content": "### Task:\nGenerate a concise title."}],
    "stream": False,
    "max_tokens": 4,
}


@pytest.fixture
def served(engine: BlendEngine, tmp_path: Path) -> Iterator[Served]:
    corpus = make_corpus(engine, tmp_path)
    with serving(engine, corpus, key="secret", api_keys=(ApiKey("secret"),), origins=(PAGE,)) as served:
        served.http.headers.update(HEADERS)
        yield served
    corpus.index.close()


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_the_list_of_models(served: Served) -> None:
    listed = served.http.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]][:2] == [NAME, f"{NAME}-rag"]


@pytest.mark.parametrize("more", [{}, PARAMETERS, AFTER_A_CALL], ids=["plain", "parameters", "after a call"])
def test_a_chat(served: Served, more: dict[str, Any]) -> None:
    said = served.http.post("/v1/chat/completions", json=CHAT | more)
    assert said.status_code == 200, said.text
    *pieces, last = events(said.text)
    assert "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert last["usage"]["completion_tokens"] == 4


def test_a_title_and_an_error(served: Served) -> None:
    assert served.http.post("/v1/chat/completions", json=TITLE).json()["choices"][0]["message"]["content"]
    wrong = served.http.post("/v1/chat/completions", json=TITLE | {"mirostat": 0.1})
    assert (wrong.status_code, wrong.json()["error"]["message"]) == (400, "mirostat: Extra inputs are not permitted")


def test_cached_tokens_are_those_of_chunks_and_of_the_conversation(served: Served, engine: BlendEngine) -> None:
    engine.warm(CHUNKS[:2])

    def ask(messages: list[Any], **more: Any) -> tuple[str, dict[str, Any], int]:
        body = TITLE | {"messages": messages, "controller": "off"} | more
        said = served.http.post("/v1/chat/completions", json=body).json()
        return said["choices"][0]["message"]["content"], said["kvrag"], said["usage"]["prompt_tokens_details"]

    text, report, details = ask(CHAT["messages"], chunks=[CHUNKS[2]])
    runs = sum(run["stop"] - run["start"] for run in report["runs"])
    assert report["created_tokens"] > 0  # the third chunk was encoded for this answer
    assert report["recomputed_tokens"] > 0  # part of the runs
    assert details["cached_tokens"] < runs - report["created_tokens"]
    assert details == {"cached_tokens": report["reused_tokens"], "cache_write_tokens": report["created_tokens"]}
    turns = [*CHAT["messages"], {"role": "assistant", "content": text}, {"role": "user", "content": CHUNKS[0]}]
    _, report, details = ask(turns)
    runs = sum(run["stop"] - run["start"] for run in report["runs"])
    assert runs > 0 < report["conversation_tokens"]
    assert report["conversation_tokens"] <= details["cached_tokens"] < report["conversation_tokens"] + runs


def test_a_connection_of_the_type_responses(served: Served) -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "A?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Mira."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Who else?"}]},
    ]
    body = {"model": NAME, "stream": True, "input": items, "instructions": "Be brief.", "max_output_tokens": 4}
    tool = {"type": "function", **TOOL["function"], "strict": False}
    said = served.http.post("/v1/responses", json=body | {"tools": [tool], "temperature": 0.0})
    assert said.status_code == 200, said.text
    assert "event: response.output_text.delta" in said.text


def test_a_direct_connection_of_the_browser(served: Served) -> None:
    preflight = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    allowed = served.http.options("/v1/chat/completions", headers=preflight | {"Authorization": ""})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
    said = served.http.post("/v1/chat/completions", json=CHAT, headers={"Origin": PAGE})
    assert (said.status_code, said.headers["access-control-allow-origin"]) == (200, PAGE)
    assert events(said.text)


def test_the_example_warms_a_knowledge_base(
    served: Served, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a server that answers as Open WebUI's `routers/knowledge.py` and `routers/retrieval.py` do."""
    rows = [({"file_id": "f1", "name": "a.txt", "start_index": 9 * (2 - n)}, CHUNKS[n]) for n in range(3)]
    rows.append(({"file_id": "f2", "name": "b.pdf", "page": 1, "start_index": 0}, CHUNKS[3]))

    class OpenWebUI(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first = int(self.path.removeprefix("/api/v1/knowledge/?page=")) * 30 - 30
            bases = [{"id": f"k{number}", "name": f"Base {number}"} for number in range(40)]
            self.reply({"items": bases[first : first + 30], "total": len(bases)})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/api/v1/retrieval/query/doc"
            assert (body["collection_name"], body["hybrid"]) == ("k35", False)
            if not (listed := rows[: body["k"]]):
                return self.reply(None)
            self.reply({"documents": [[text for _, text in listed]], "metadatas": [[about for about, _ in listed]]})

        def reply(self, content: Any) -> None:
            assert self.headers["Authorization"] == "Bearer sk-1"
            sent = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), OpenWebUI)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("OPEN_WEBUI_KEY", "sk-1")
    monkeypatch.setenv("KVRAG_API_KEY", "secret")

    def run(*names: str) -> str:
        monkeypatch.setattr(sys, "argv", ["warm", f"http://127.0.0.1:{server.server_port}", served.url, *names])
        runpy.run_path(str(ROOT / "examples" / "open_webui_warm.py"))
        return capsys.readouterr().out

    try:
        assert "2 files, 4 chunks encoded now, 0 before, 0 deleted files dropped" in run("Base 35")
        assert engine.documents() == ["open-webui/k35/f1", "open-webui/k35/f2"]
        rows.pop()
        assert "1 files, 0 chunks encoded now, 3 before, 1 deleted files dropped" in run("Base 35")
        assert engine.documents() == ["open-webui/k35/f1"]
        rows.clear()
        assert "0 files, 0 chunks encoded now, 0 before, 1 deleted files dropped" in run("Base 35")
        rows.append(({"file_id": "f1", "name": "a.txt"}, CHUNKS[1]))
        run("Base 35")
        for names in ((), ("Base",)):
            with pytest.raises(SystemExit, match="choose among these knowledge bases: Base 0, Base 1, "):
                run(*names)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    body = CHAT | {"stream": False, "stream_options": None, "temperature": 0.0}
    report = served.http.post("/v1/chat/completions", json=body).json()["kvrag"]
    assert report["prompt_tokens"] - report["fresh_tokens"] > 20
