"""RemoteEngine: requests, responses and errors, with a server that follows vLLM's interface and the connector's."""

from __future__ import annotations

import asyncio
import copy
import pickle
import random
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from blending import CHUNKS, messages
from fake_vllm import MODEL, REPORT, FakeVllm, fake_vllm
from serving import NAME, serving, until

from kvrag import (
    BlendEngine,
    BlendReport,
    ContextWindowError,
    Delta,
    Grammar,
    InvalidCall,
    KvragError,
    PromptError,
    RemoteEngine,
    ServerError,
    SettingError,
    WarmReport,
)
from kvrag.client.servers import KvragServe, whole_documents
from kvrag.config import NamedText
from kvrag.types import join

OBJECT = {"type": "object"}
USER: list[dict[str, Any]] = [{"role": "user", "content": "Who plays the harp"}]


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    with fake_vllm() as fake:
        yield fake


@pytest.fixture
def remote(fake: FakeVllm) -> RemoteEngine:
    return RemoteEngine(fake.url, MODEL, max_retries=0)


# ---------------------------------------------------------------- answers of vLLM


@pytest.mark.parametrize("prompt", ["Who plays the harp", USER])
async def test_answers_of_vllm(fake: FakeVllm, remote: RemoteEngine, prompt: Any) -> None:
    expected = BlendReport.from_dict({**REPORT, "prompt_tokens": 5})
    whole = remote.generate(prompt)
    assert (whole.text, whole.finish_reason, whole.num_tokens, whole.report) == ("harp harp", "stop", 2, expected)
    assert await remote.agenerate(prompt) == whole
    for deltas in (list(remote.stream(prompt)), [delta async for delta in remote.astream(prompt)]):
        assert [delta.text for delta in deltas] == ["harp", " harp", ""]
        assert (deltas[-1].finish_reason, deltas[-1].num_tokens) == ("stop", 2)
        assert deltas[-1].report == expected
    assert not fake.reports  # every piece was requested


def test_the_answers_of_a_batch_are_requested_at_the_same_time(
    remote: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, deltas = threading.Barrier(3, timeout=60), RemoteEngine._deltas

    async def waiting(*args: Any, **options: Any) -> AsyncIterator[Delta]:
        together.wait()
        async for delta in deltas(*args, **options):
            yield delta

    prompts = ["Who plays", "Who plays the harp", "Who"]
    alone = [remote.generate(prompt, seed=1) for prompt in prompts]
    monkeypatch.setattr(RemoteEngine, "_deltas", waiting)
    assert remote.generate_batch(prompts, seed=1) == alone
    assert remote.generate_batch([]) == []
    with pytest.raises(SettingError, match="seed"):
        remote.generate_batch(prompts, seed=-1)


def test_settings_of_an_answer(fake: FakeVllm, remote: RemoteEngine) -> None:
    remote.generate(
        USER,
        max_new_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        repetition_penalty=1.5,
        seed=(1 << 64) - 1,
        stop=["a", "b"],
        ratio=0.0,
        policy="hkvd",
        controller="off",
        namespace="tenant",
        template={"enable_thinking": False},
    )
    body = fake.requests[-1]
    assert body.pop("kv_transfer_params") == {
        "kvrag": {"mode": "blend", "ratio": 0.0, "policy": "hkvd", "controller": "off", "namespace": "tenant"}
    }
    assert body == {
        "model": MODEL,
        "messages": USER,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "repetition_penalty": 1.5,
        "seed": -1,
        "stop": ["a", "b"],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    remote.generate("text")
    body = fake.requests[-1]
    assert body.pop("kv_transfer_params") == {"kvrag": {"mode": "blend"}}
    assert body == {"model": MODEL, "prompt": "text", "max_tokens": 256}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts(fake: FakeVllm, remote: RemoteEngine, stream: bool, name: str) -> None:
    fake.thought = {name: "Mira does"}
    answer = join(remote.stream(USER)) if stream else remote.generate(USER)
    assert (answer.text, answer.reasoning) == ("harp harp", "Mira does")
    assert (answer.num_tokens, answer.reasoning_tokens) == (2, 1)


def test_thinking_is_switched_by_the_template(fake: FakeVllm, remote: RemoteEngine) -> None:
    for reasoning in (False, True):
        remote.generate(USER, reasoning=reasoning)
        assert fake.requests[-1]["chat_template_kwargs"] == {"enable_thinking": reasoning, "thinking": reasoning}
    remote.generate(USER, reasoning=True, template={"thinking": False})
    assert fake.requests[-1]["chat_template_kwargs"] == {"enable_thinking": True, "thinking": False}
    remote.generate(USER)
    assert "chat_template_kwargs" not in fake.requests[-1]
    remote.generate("text", reasoning=False)  # without a template
    with pytest.raises(SettingError, match="reasoning must be True, False or None, got 'low'"):
        remote.generate(USER, reasoning="low")


@pytest.mark.parametrize(
    ("grammar", "sent"),
    [
        (
            Grammar(json_schema=OBJECT),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": OBJECT},
                }
            },
        ),
        (Grammar(regex="a+"), {"structured_outputs": {"regex": "a+"}}),
        (Grammar(lark="start: /a/"), {"structured_outputs": {"grammar": "start: /a/"}}),
    ],
)
@pytest.mark.parametrize("prompt", ["text", USER])
def test_grammars(fake: FakeVllm, remote: RemoteEngine, grammar: Grammar, sent: dict[str, Any], prompt: Any) -> None:
    remote.generate(prompt, grammar=grammar)
    assert sent.items() <= fake.requests[-1].items()


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(fake: FakeVllm, remote: RemoteEngine, stream: bool) -> None:
    fake.calls = [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"far": true}'}},
        {"id": "c2", "type": "function", "function": {"name": "rest", "arguments": ""}},
        {"id": "c3", "type": "function", "function": {"name": "rest", "arguments": '{"broken'}},
    ]
    fake.finish = "tool_calls"
    tools = [{"type": "function", "function": {"name": "look"}}]
    if stream:
        deltas = list(remote.stream(USER, tools=tools, tool_choice="look"))
        calls, text = [call for delta in deltas for call in delta.tool_calls], "".join(d.text for d in deltas)
        invalid, finish = [call for delta in deltas for call in delta.invalid_calls], deltas[-1].finish_reason
    else:
        answer = remote.generate(USER, tools=tools, tool_choice="look")
        calls, text, finish = list(answer.tool_calls), answer.text, answer.finish_reason
        invalid = list(answer.invalid_calls)
    found = [(call.id, call.name, call.arguments) for call in calls]
    assert found == [("c1", "look", {"far": True}), ("c2", "rest", {})]
    assert invalid == [InvalidCall("rest", '{"broken', "c3")]
    assert not stream or not text
    assert finish == "stop"
    body = fake.requests[0]
    assert body["tools"] == tools
    assert body["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    remote.generate(USER, tools=tools, tool_choice="any")
    assert fake.requests[-1]["tool_choice"] == "required"
    with pytest.raises(PromptError, match="tools need a chat prompt"):
        remote.generate("text", tools=tools)


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_forced_call_cut_off_is_invalid(fake: FakeVllm, remote: RemoteEngine, stream: bool, calls: bool) -> None:
    if calls:  # cut off before its arguments; vLLM may also omit it
        fake.calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": ""}}]
    fake.finish = "length"
    asked: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "look"}}], "tool_choice": "look"}
    answer = join(remote.stream(USER, **asked)) if stream else remote.generate(USER, **asked)
    [call] = answer.invalid_calls
    assert (call.name, call.arguments) == ("look" if calls else "", "")
    assert (answer.tool_calls, answer.finish_reason) == ((), "length")
    assert stream or calls or answer.text == ""
    assert calls or not remote.generate(USER, tools=asked["tools"]).invalid_calls  # an answer that was not forced


def test_a_history_is_sent_in_openais_form(fake: FakeVllm, remote: RemoteEngine) -> None:
    call = {"type": "function", "id": "a", "function": {"name": "look", "arguments": {"far": "ä"}}}
    said = {"role": "assistant", "content": "", "reasoning_content": "Far.", "tool_calls": [call]}
    history = [*USER, said, {"role": "user", "content": ["a"]}]
    remote.generate(history)
    sent = fake.requests[-1]["messages"]
    assert (sent[1]["reasoning"], sent[1]["reasoning_content"]) == ("Far.", "Far.")
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"far": "ä"}'
    assert sent[2]["content"] == [{"type": "text", "text": "a"}]
    assert call["function"] == {"name": "look", "arguments": {"far": "ä"}}  # left as it was


def test_documents_are_warmed_first(fake: FakeVllm, remote: RemoteEngine) -> None:
    remote.generate(USER, documents=CHUNKS[:2], namespace="n")
    [asked] = fake.asked("warm")
    assert (asked["texts"], asked["document"], asked["namespace"]) == (CHUNKS[:2], ["", ""], "n")


def test_reports_that_are_missing(fake: FakeVllm, remote: RemoteEngine) -> None:
    fake.ignored = ["ratio must be a number"]
    assert remote.generate(USER).report.notes == ("ignored by the server: ratio must be a number",)
    note = "ignored by the server: ratio must be a number"
    assert list(remote.stream(USER))[-1].report.notes == (note,)  # type: ignore[union-attr]
    fake.ignored = []
    fake.error = "no memory"
    report = remote.generate(USER).report
    assert (report.prompt_tokens, report.reused_tokens, report.exact) == (5, 0, False)
    assert "no memory" in report.notes[0]
    assert "no memory" in list(remote.stream(USER))[-1].report.notes[0]  # type: ignore[union-attr]
    fake.has_connector = False
    assert "KV connector" in remote.generate(USER).report.notes[0]
    assert "KV connector" in list(remote.stream(USER))[-1].report.notes[0]  # type: ignore[union-attr]
    with pytest.raises(ServerError, match="no KV connector of kvrag: start it with --kv-transfer-config"):
        remote.warm(CHUNKS)


# ---------------------------------------------------------------- chunks


def test_chunks_of_vllm(fake: FakeVllm, remote: RemoteEngine) -> None:
    report = remote.warm(CHUNKS, document=["a", "a", "b", "b"], sources=["s", "s", "t", ""], namespace="n")
    assert isinstance(report, WarmReport)
    assert (report.chunks, report.new, report.warnings) == (4, 4, ("one",))
    [asked] = fake.asked("warm")
    assert asked["sources"] == ["s", "s", "t", ""]
    assert "replace" not in asked
    assert "contexts" not in asked
    assert remote.documents(namespace="n") == ["a", "b"]
    assert remote.documents("b", namespace="n") == ["b"]
    assert remote.documents() == []
    assert remote.forget("a", namespace="n") == 2
    assert remote.forget("a") == 0
    remote.warm([], document="b", namespace="n")
    assert remote.documents(namespace="n") == []
    assert asyncio.run(remote.awarm(CHUNKS[:1])).chunks == 1


def test_a_bar_is_shown_on_a_terminal_only(
    fake: FakeVllm, remote: RemoteEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remote.warm(CHUNKS[:1])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    remote.warm(CHUNKS[1:2])
    assert "encoding: 100%|" in capsys.readouterr().err


def test_the_prompt_reserves_pages_for_the_texts(fake: FakeVllm, remote: RemoteEngine) -> None:
    """The texts themselves, or all pages if they are longer than the window."""
    fake.window = 200
    texts = [" ".join([f"chunk{number}"] * 60) for number in range(9)]
    steps: list[tuple[int, int]] = []
    report = remote.warm(
        [*texts, "short", "shorter"],
        document=["d"] * 9 + ["e", "f"],
        progress=lambda *done: steps.append(done),
    )
    assert report.chunks == 11
    assert fake.documents["", "d"] == texts
    assert steps == [(9, 11), (11, 11)]
    assert [body["prompt"] for body in fake.requests] == [[0] * 199, "short\n\nshorter"]
    assert fake.tokenized == 1  # to find the window; the document is too long for sure
    remote.warm(["longer than the window in bytes only " * 10], document="g")
    assert fake.requests[-1]["prompt"] == "longer than the window in bytes only " * 10


@pytest.mark.parametrize("seed", range(20))
def test_documents_and_sources_are_not_divided(seed: int) -> None:
    rng = random.Random(seed)
    number = rng.randint(0, 30)
    documents = sorted(rng.choice("abcdefgh") for _ in range(number))
    texts = [NamedText("x" * rng.randint(1, 9), name, rng.choice(["", name])) for name in documents]
    made = list(whole_documents(texts, 12))
    assert [row for part in made for row in part] == texts
    names = [name for part in made for name in {row.document for row in part}]
    assert len(names) == len({*names})
    assert number < 12 or len(made) > 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"texts": "one"},
        {"texts": 3},
        {"texts": [3]},
        {"texts": CHUNKS, "document": ["a"]},
        {"texts": CHUNKS, "sources": ["a"]},
        {"texts": CHUNKS, "document": "\ud800"},
        {"texts": CHUNKS, "namespace": "\n"},
    ],
)
def test_wrong_chunks_are_refused_as_by_a_local_engine(
    remote: RemoteEngine, engine: BlendEngine, wrong: dict[str, Any]
) -> None:
    for each in (remote, engine):
        with pytest.raises(SettingError):
            each.warm(**wrong)


# ---------------------------------------------------------------- the server


def test_the_server_is_asked_once(fake: FakeVllm, remote: RemoteEngine) -> None:
    assert remote.context_window == 5000
    fake.fail = [500]  # it would fail
    assert remote.context_window == 5000
    assert (remote.model_name, remote.as_prompt("a")) == (MODEL, [{"role": "user", "content": "a"}])
    fake.fail = []
    assert remote.count_tokens("a b c") == remote.count_tokens([{"role": "user", "content": "a b c"}]) == 4
    assert remote.encode("a b c") == [0, 1, 2]
    assert RemoteEngine(fake.url).model_name == MODEL


def test_a_model_without_a_template(fake: FakeVllm, remote: RemoteEngine) -> None:
    fake.has_template = False
    assert remote.as_prompt("a") == "a"
    assert remote.generate("a").text == "a a"


def test_a_gateway_may_hide_fields_beyond_openais(fake: FakeVllm, remote: RemoteEngine) -> None:
    fake.fail = [0, 404]  # of /v1/models and /tokenize
    assert remote.generate("a").text == "a a"
    assert (remote.context_window, remote.as_prompt("a")) == (5000, [{"role": "user", "content": "a"}])


def test_pages_of_other_servers() -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html>welcome</html>")

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        with pytest.raises(ServerError, match="does not answer as an OpenAI-compatible server: check base_url="):
            RemoteEngine(f"http://127.0.0.1:{server.server_port}").generate("a")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_other_servers_are_refused(fake: FakeVllm) -> None:
    fake.owned_by = "gateway"
    assert RemoteEngine(fake.url, MODEL).generate("a").text == "a a"  # it has vLLM's /version
    with pytest.raises(ServerError, match=f"unknown model 'b': {fake.url} has '{MODEL}'"):
        RemoteEngine(fake.url, "b").generate("a")
    fake.fail = [0, 404]  # without a /version
    with pytest.raises(ServerError, match="neither kvrag serve nor vLLM"):
        RemoteEngine(fake.url, MODEL, max_retries=0).generate("a")
    with pytest.raises(ServerError, match="404"):
        RemoteEngine(f"{fake.url}/elsewhere", MODEL, max_retries=0).generate("a")


def test_a_key_is_sent_and_only_ours(fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.key = "right"
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    for key in (None, "wrong"):
        with pytest.raises(ServerError, match="api_key="):
            RemoteEngine(fake.url, MODEL, api_key=key).generate("a")
    assert RemoteEngine(fake.url, MODEL, api_key="right").generate("a").text
    monkeypatch.setenv("KVRAG_API_KEY", "right")
    assert RemoteEngine(fake.url, MODEL).generate("a").text


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (400, PromptError, "as told"),
        (401, ServerError, "api_key="),
        (404, ServerError, "/v1/models"),
        (413, ServerError, "send less"),
        (429, ServerError, "retry later"),
        (500, ServerError, "log"),
        (503, ServerError, "503"),
        (507, KvragError, "as told"),
    ],
)
def test_errors_are_one_line_with_a_remedy(
    fake: FakeVllm, remote: RemoteEngine, status: int, kind: type[Exception], reason: str
) -> None:
    ways: list[Any] = [
        lambda: remote.generate("a"),
        lambda: list(remote.stream("a")),
        lambda: asyncio.run(remote.agenerate("a")),
        lambda: remote.warm(CHUNKS),
        lambda: remote.documents(),
    ]
    assert remote.model_name
    for way in ways:
        fake.fail = [status]
        with pytest.raises(kind, match=reason) as caught:
            way()
        assert "\n" not in str(caught.value)
        assert getattr(caught.value, "status", status) == status


def test_requests_are_repeated(fake: FakeVllm) -> None:
    remote = RemoteEngine(fake.url, MODEL, max_retries=2)
    assert remote.model_name
    fake.fail = [503, 429]
    assert remote.generate("a").text == "a a"


def test_prompts_that_are_too_long_or_empty(remote: RemoteEngine) -> None:
    with pytest.raises(ContextWindowError, match="maximum context length is 5000"):
        remote.generate("word " * 6000)
    with pytest.raises(ContextWindowError):
        list(remote.stream([{"role": "user", "content": "word " * 6000}]))
    for empty in ("", "  ", [], 3, [3]):
        with pytest.raises(PromptError):
            remote.generate(empty)  # type: ignore[arg-type]


@pytest.mark.parametrize("as_messages", [False, True])
def test_an_answer_may_be_shorter_than_asked(fake: FakeVllm, remote: RemoteEngine, as_messages: bool) -> None:
    """As locally, a prompt is answered if one token fits after it; its tokens are counted only if needed."""
    for words, room, counted in ((10, 256, 0), (4900, 99, 1), (4998, 1, 1)):
        text = "word " * words
        assert remote.model_name
        before = fake.tokenized
        assert remote.generate([{"role": "user", "content": text}] if as_messages else text).text
        assert fake.requests[-1]["max_tokens"] == room
        assert fake.tokenized - before == counted


def test_answers_that_end_early(fake: FakeVllm, remote: RemoteEngine) -> None:
    fake.cut = True
    with pytest.raises(ServerError, match="the stream broke off"):
        list(remote.stream(USER))
    fake.cut = False
    fake.finish = "abort"
    with pytest.raises(ServerError, match="abort"):
        remote.generate(USER)


async def test_an_answer_that_is_left_ends_on_the_server(fake: FakeVllm, remote: RemoteEngine) -> None:
    """Cancelling a task closes its connection, and so does closing a stream."""

    async def ended() -> bool:
        was_set = await asyncio.to_thread(fake.left.wait, 10)
        fake.left.clear()
        return was_set

    assert remote.model_name
    fake.endless = True
    stream = remote.stream(USER)
    assert next(stream).text == "harp"
    stream.close()
    assert await ended()
    astream = remote.astream(USER)
    assert (await anext(astream)).text == "harp"
    await astream.aclose()
    assert await ended()

    async def read() -> None:
        async for _ in remote.astream(USER):
            pass

    for way in (remote.agenerate(USER), read(), remote.awarm(CHUNKS)):
        sent = len(fake.requests)
        task = asyncio.ensure_future(way)
        await asyncio.to_thread(until, lambda sent=sent: len(fake.requests) > sent, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await ended()


async def test_synchronous_calls_while_a_loop_runs(remote: RemoteEngine) -> None:
    """As in a notebook."""
    assert "".join(delta.text for delta in remote.stream(USER)) == remote.generate(USER).text == "harp harp"
    assert remote.warm(CHUNKS).new == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratio": 2},
        {"policy": "best"},
        {"controller": "on"},
        {"namespace": "\n"},
        {"stop": "a"},
        {"stop": [""]},
        {"temperature": -1},
        {"max_new_tokens": 0},
        {"tools": "look"},
        {"documents": "one"},
        {"unknown": 1},
    ],
)
def test_wrong_settings_are_refused_as_by_a_local_engine(
    fake: FakeVllm, remote: RemoteEngine, engine: BlendEngine, wrong: dict[str, Any]
) -> None:
    for each in (remote, engine):
        with pytest.raises(SettingError):
            each.generate(messages("a"), **wrong)
    assert not fake.requests


@pytest.mark.parametrize(
    "wrong",
    [{"base_url": "x"}, {"base_url": None}, {"timeout": 0}, {"timeout": -1}, {"max_retries": -1}, {"max_retries": 0.5}],
)
def test_wrong_servers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        RemoteEngine(**{"base_url": "http://localhost", **wrong})


def test_without_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(KvragError, match=r"pip install 'kvrag\[client\]'"):
        RemoteEngine("http://localhost")


def test_an_engine_is_shared_and_closed(fake: FakeVllm) -> None:
    one, two = (RemoteEngine.shared(f"{fake.url}/v1", MODEL, api_key="a") for _ in range(2))
    assert one is two is not RemoteEngine.shared(f"{fake.url}/v1", MODEL, api_key="b")
    assert copy.deepcopy(one) is one
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(one)
    for _ in range(2):
        with one:
            assert one.generate("a").text
    for method in (one.explain, one.calibrate, one.reset_calibration, one.verify):
        with pytest.raises(SettingError, match="run it where they are"):
            method()


# ---------------------------------------------------------------- kvrag serve, beyond what the frameworks' tests cover


@pytest.mark.slow
def test_kvrag_serve(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(engine) as served:
        remote = RemoteEngine(served.url, max_retries=0)
        assert (remote.model_name, remote.context_window) == (NAME, engine.context_window)
        many = [f"{CHUNKS[number % 4]} {number} " + "and so on " * 40 for number in range(12)]
        names = [f"d{number}/..%2e?" for number in range(12)]
        assert remote.warm(many, document=names).new == 12
        assert remote.documents() == engine.documents() == sorted(names)
        assert [remote.forget(name) for name in names] == [1] * 12
        with pytest.raises(SettingError, match="json_schema only"):
            remote.generate("a", grammar=Grammar(regex="a"))
        monkeypatch.setattr(KvragServe, "part_bytes", 1)  # each text has a request of its own
        texts = [*CHUNKS[:2], "word " * 5000, "odd \ud800" * 20]
        with pytest.raises(ContextWindowError, match=r"^chunk 2 has .* too many") as refused:
            remote.warm(texts)
        assert refused.value.chunk == 2
        warnings = remote.warm(texts, skip_invalid=True).warnings
        assert [warning[:16] for warning in warnings] == ["skipped: chunk 2", "skipped: chunk 3"]
        with pytest.raises(PromptError):
            remote.count_tokens([{"role": "nobody", "content": "a"}])
        schema = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}
        made = remote.generate("Say it: ", grammar=Grammar(json_schema=schema), temperature=0, max_new_tokens=64)
        assert made.text.startswith('{"far"')


@pytest.mark.slow
async def test_errors_in_mid_stream(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = []

    def broken(*_: Any, **__: Any) -> Iterator[Delta]:
        yield Delta("Once", (1,))
        raise errors[-1]

    monkeypatch.setattr(engine, "stream", broken)
    with serving(engine) as served:
        remote = RemoteEngine(served.url, NAME, max_retries=0)
        for error, kind, reason in (
            (ContextWindowError("no room"), ContextWindowError, "no room"),
            (KvragError("no luck"), ServerError, "no luck"),
        ):
            errors.append(error)
            deltas = remote.stream("a")
            assert next(deltas).text == "Once"
            with pytest.raises(kind, match=reason):
                next(deltas)
            with pytest.raises(kind, match=reason):
                [delta async for delta in remote.astream("a")]
