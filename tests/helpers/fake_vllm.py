"""A server with vLLM's interface and the connector's contract, which answers every prompt with its last word, twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "fake/model"
REPORT = {
    "prompt_tokens": 0,
    "reused_tokens": 7,
    "recomputed_tokens": 1,
    "fresh_tokens": 2,
    "runs": [{"start": 0, "stop": 7, "key": "k", "offset": 0}],
    "policy": "query",
    "ratio": 0.15,
    "match_s": 0.1,
    "load_s": 0.1,
    "stitch_s": 0.0,
    "select_s": 0.0,
    "blend_s": 0.0,
    "ttft_s": 0.5,
    "bytes_loaded": 1,
    "tier": "ram",
    "exact": False,
    "notes": [],
    "newer": 1,
}


class Refusal(Exception):
    """An error response."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status, self.body = status, {"error": {"message": message, "code": status, "param": None, **more}}


@dataclass
class FakeVllm:
    """State of the server and its requests; words are its tokens.

    Attributes:
        requests: Bodies of all requests for answers.
        tokenized: Number of requests to /tokenize.
        documents: Texts by namespace and document.
        calls: Tool calls of the next answers, as vLLM would send them.
        thought: Thought before the next answers to chats, under the name that this version of vLLM has for it.
        fail: Statuses of the next responses; 0 = as usual.
        endless: Responses to requests for answers do not end, streamed ones after their first event.
        left: Set when a client has closed the connection of such a response.
    """

    url: str = ""
    window: int = 5000
    owned_by: str = "vllm"
    has_connector: bool = True
    has_template: bool = True
    key: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    documents: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    thought: dict[str, str] = field(default_factory=dict)
    fail: list[int] = field(default_factory=list)
    tokenized: int = 0
    error: str = ""
    finish: str = "stop"
    ignored: list[str] = field(default_factory=list)
    cut: bool = False
    endless: bool = False
    left: threading.Event = field(default_factory=threading.Event)

    def asked(self, mode: str) -> list[dict[str, Any]]:
        """Requests to the connector in this mode."""
        found = [(body.get("kv_transfer_params") or {}).get("kvrag", {}) for body in self.requests]
        return [params for params in found if params.get("mode") == mode]

    def models(self) -> dict[str, Any]:
        entry = {"id": MODEL, "object": "model", "owned_by": self.owned_by, "max_model_len": self.window}
        return {"object": "list", "data": [entry]}

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["model"] == MODEL
        self.tokenized += 1
        tokens = list(range(len(self._text(body).split()) + bool(body.get("add_special_tokens", True))))
        return {"count": len(tokens), "max_model_len": self.window, "tokens": tokens}

    def _text(self, body: dict[str, Any]) -> str:
        if "messages" not in body:
            return str(body["prompt"])
        if not self.has_template:
            raise Refusal(400, "default chat template is no longer allowed")
        return "\n".join(str(message["content"]) for message in body["messages"])

    def answer(self, body: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
        """The text, the usage, and the connector's response."""
        self.requests.append(body)
        if body["model"] != MODEL:
            raise Refusal(404, f"The model `{body['model']}` does not exist.")
        text = self._text(body)
        words = len(body["prompt"]) if isinstance(body.get("prompt"), list) else len(text.split()) + 1
        if words + body["max_tokens"] > self.window:
            raise Refusal(400, f"This model's maximum context length is {self.window} tokens. You requested {words}.")
        params = (body.get("kv_transfer_params") or {}).get("kvrag")
        said = self._connector(params, body, words) if params is not None and self.has_connector else None
        last = (text.split() or ["nothing"])[-1]
        count = min(2, body["max_tokens"])
        usage: dict[str, Any] = {"prompt_tokens": words, "completion_tokens": count, "total_tokens": words + count}
        if self.thought:
            usage["completion_tokens_details"] = {"reasoning_tokens": 1}
        return " ".join([last] * count), usage, said

    def _connector(self, params: dict[str, Any], body: dict[str, Any], words: int) -> dict[str, Any]:
        mode, namespace = params.get("mode", "blend"), params.get("namespace", "")
        if self.error:
            return {"error": self.error}
        if mode == "blend":
            report = {**REPORT, "prompt_tokens": words}
            if self.ignored:
                report["ignored"] = self.ignored
            if tag := params.get("tag"):
                self.reports[tag] = report
            return report
        if mode == "report":
            return self.reports.pop(params["tag"], None) or {"error": "no such answer"}
        if mode == "documents":
            known = (name for space, name in self.documents if space == namespace)
            return {"documents": sorted(name for name in known if name.startswith(params["prefix"]))}
        if mode == "forget":
            return {"forgotten": len(self.documents.pop((namespace, params["document"]), []))}
        assert mode == "warm"
        assert params["texts"]
        joined = "\n\n".join(params["texts"]) or " "
        assert body["prompt"] == (joined if len(joined.split()) < self.window else [0] * (self.window - 1))
        assert body["max_tokens"] == 1
        names = params["document"]
        names = [names] * len(params["texts"]) if isinstance(names, str) else names
        for name in {*names}:
            self.documents.pop((namespace, name), None)
        for name, text in zip(names, params["texts"], strict=True):
            self.documents.setdefault((namespace, name), []).append(text)
        number = len(params["texts"])
        report = {"chunks": number, "tokens": words, "bytes": 10, "new": number, "reused": 0, "skipped": 0}
        return {**report, "seconds": 0.1, "warnings": ["one"]}


def _handler(fake: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._respond(lambda _: {"/v1/models": fake.models(), "/version": {"version": "0.20"}}.get(self.path))

        def do_POST(self) -> None:
            ways = {"/tokenize": fake.tokenize, "/v1/completions": self._complete, "/v1/chat/completions": self._chat}
            self._respond(ways.get(self.path, lambda _: None))

        def _respond(self, way: Any) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            status, content = 200, None
            try:
                if fake.key and self.headers["Authorization"] != f"Bearer {fake.key}":
                    raise Refusal(401, "Unauthorized")
                if fake.fail and (refused := fake.fail.pop(0)):
                    raise Refusal(refused, "as told")
                content = way(body)
                if content is None and not self.wfile.closed and not getattr(self, "streamed", False):
                    raise Refusal(404, "Not Found")
            except Refusal as error:
                status, content = error.status, error.body
            if getattr(self, "streamed", False):
                return
            sent = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def _complete(self, body: dict[str, Any]) -> Any:
            text, usage, said = fake.answer(body)
            if body.get("stream"):
                return self._stream([{"text": word} for word in _words(text)], usage)
            return self._whole({"text": text}, usage, said)

        def _chat(self, body: dict[str, Any]) -> Any:
            text, usage, said = fake.answer(body)
            if fake.calls and body.get("stream"):
                parts = [{"delta": {"tool_calls": [part]}} for call in _numbered(fake.calls) for part in _split(call)]
                return self._stream(parts, usage)
            if fake.calls:
                return self._whole({"message": {"content": None, "tool_calls": fake.calls}}, usage, said)
            if body.get("stream"):
                thoughts = [{name: word} for name, thought in fake.thought.items() for word in _words(thought)]
                parts = [*thoughts, *({"content": word} for word in _words(text))]
                return self._stream([{"delta": part} for part in parts], usage)
            return self._whole({"message": {"role": "assistant", "content": text, **fake.thought}}, usage, said)

        def _wait(self) -> None:
            if fake.endless:
                assert self.rfile.read(1) == b""
                self.close_connection = True
                fake.left.set()

        def _whole(self, choice: dict[str, Any], usage: Any, said: Any) -> dict[str, Any]:
            self._wait()
            choices = [{"index": 0, "finish_reason": fake.finish, **choice}]
            return {"id": "a", "choices": choices, "usage": usage, "kv_transfer_params": said and {"kvrag": said}}

        def _stream(self, parts: list[dict[str, Any]], usage: dict[str, Any]) -> None:
            self.streamed = True
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            events: list[Any] = [{"choices": [{"index": 0, "finish_reason": None, **part}]} for part in parts]
            if not fake.cut:
                empty = {"delta": {}} if "delta" in (parts or [{}])[0] else {"text": ""}
                events.append({"choices": [{"index": 0, "finish_reason": fake.finish, **empty}]})
                events.append({"choices": [], "usage": usage})
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self._wait()
                if fake.endless:
                    return
            if not fake.cut:
                self.wfile.write(b"data: [DONE]\n\n")

    return Handler


def _words(text: str) -> list[str]:
    first, *rest = text.split(" ")
    return [first, *(f" {word}" for word in rest)]


def _numbered(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"index": number, **call} for number, call in enumerate(calls)]


def _split(call: dict[str, Any]) -> list[dict[str, Any]]:
    """As vLLM streams a call: the name first, then its arguments in pieces."""
    arguments = call["function"]["arguments"]
    first = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
    pieces = [arguments[start : start + 3] for start in range(0, len(arguments), 3)]
    return [first, *({"index": call["index"], "function": {"arguments": piece}} for piece in pieces)]


@contextmanager
def fake_vllm(**settings: Any) -> Iterator[FakeVllm]:
    """The server, until the context ends."""
    fake = FakeVllm(**settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
