"""OpenAI's whole interface, with common clients: sampling features, responses, uploads, keep-alives."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from blending import CHUNKS
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI
from serving import NAME, Served, make_corpus, serving, until
from transformers import AutoModelForCausalLM

import kvrag
import kvrag.server.answers
from kvrag import BlendConfig, BlendEngine, FileStore, Model
from kvrag.server.corpus import Corpus
from kvrag.server.settings import ApiKey

QUESTION = "Who likes curry?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
PLAIN: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8}
CALL: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 8}
PARAMETERS = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}
TOOL: Any = {"type": "function", "name": "look", "description": "Look.", "parameters": PARAMETERS, "strict": False}


@pytest.fixture(scope="module")
def engine(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """The bundled reader, without an end token: its answers end only at the limit."""
    hf = AutoModelForCausalLM.from_pretrained(Path(kvrag.__file__).parent / "reader")
    hf.generation_config.suppress_tokens = [hf.generation_config.eos_token_id]
    store = FileStore(tmp_path_factory.mktemp("served") / "kv", min_free_bytes=0)
    with BlendEngine(Model(hf, tokenizer, NAME), store, BlendConfig(controller="off")) as engine:
        yield engine


@pytest.fixture(scope="module")
def corpus(engine: BlendEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    corpus = make_corpus(engine, tmp_path_factory.mktemp("corpus"))
    engine.warm(CHUNKS, document="all.txt")
    corpus.index.add(CHUNKS, document="all.txt")
    yield corpus
    corpus.index.close()


@pytest.fixture(scope="module")
def served(engine: BlendEngine, corpus: Corpus) -> Iterator[Served]:
    with serving(engine, corpus, top_k=2, max_tokens=16) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


# -------------------------------------------------------------------- sampling features


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_reports_log_probabilities(client: OpenAI, engine: BlendEngine, stream: bool) -> None:
    expected = engine.generate(MESSAGES, logprobs=2, **PLAIN)
    said: Any = client.chat.completions.create(
        **CALL, messages=MESSAGES, logprobs=True, top_logprobs=2, seed=1, stream=stream
    )
    choices = [piece.choices[0] for piece in said] if stream else said.choices
    found = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected.logprobs], abs=1e-3)
    assert bytes(byte for each in found for byte in each.bytes).decode() == expected.text
    assert all(len(each.top_logprobs) == 2 for each in found)
    assert all(each.top_logprobs[0].logprob >= each.logprob for each in found)


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_reports_log_probabilities(client: OpenAI, stream: bool) -> None:
    said: Any = client.completions.create(**CALL, prompt="Mira Brel was", logprobs=3, stream=stream)
    choices = [piece.choices[0] for piece in said] if stream else said.choices
    text = "".join(choice.text for choice in choices)
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for part in parts for token in part.tokens]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert "".join(tokens) == text
    assert [text[start:][: len(token)] for start, token in zip(offsets, tokens, strict=True)] == tokens
    assert {len(top) for part in parts for top in part.top_logprobs} == {3}


def test_penalties_and_biases_change_the_answer_as_in_the_engine(client: OpenAI, engine: BlendEngine) -> None:
    first = engine.generate(MESSAGES, **PLAIN).token_ids[0]
    changes: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    expected = engine.generate(MESSAGES, **PLAIN, **changes, logit_bias={first: -100})
    said = client.chat.completions.create(**CALL, messages=MESSAGES, **changes, logit_bias={str(first): -100})
    assert said.choices[0].message.content == expected.text != engine.generate(MESSAGES, **PLAIN).text


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_have_seeds_of_their_own(client: OpenAI, engine: BlendEngine, stream: bool) -> None:
    settings: dict[str, Any] = {"temperature": 2.0, "top_p": 0.99}
    expected = [engine.generate(MESSAGES, seed=seed, max_new_tokens=8, **settings).text for seed in (5, 6, 7)]
    assert len(set(expected)) == 3
    said: Any = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        n=3,
        seed=5,
        max_tokens=8,
        stream=stream,
        **settings,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    if stream:
        pieces = list(said)
        texts, usage = ["", "", ""], pieces[-1].usage
        for piece in pieces[:-1]:
            texts[piece.choices[0].index] += piece.choices[0].delta.content or ""
    else:
        texts, usage = [choice.message.content for choice in said.choices], said.usage
        assert all(choice.model_extra["kvrag"]["prompt_tokens"] == usage.prompt_tokens for choice in said.choices)
    assert texts == expected
    prompt = len(engine.tokenize(MESSAGES))
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, 24)


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_are_lists_of_texts_or_of_token_ids(client: OpenAI, engine: BlendEngine, stream: bool) -> None:
    texts = ["Mira Brel was", "Kan Dror owns"]
    ids = [engine.tokenize(text) for text in texts]
    expected = [engine.generate(text, **PLAIN).text for text in texts]
    for prompt, wanted in ((texts, expected), (ids, expected), (ids[1], expected[1:])):
        said: Any = client.completions.create(**CALL, prompt=prompt, stream=stream)
        answers = [""] * len(wanted)
        for piece in said if stream else [said]:
            for choice in piece.choices:
                answers[choice.index] += choice.text
        assert answers == wanted
        if not stream:
            assert said.usage.prompt_tokens == sum(map(len, ids[-len(wanted) :]))


def test_parameters_of_sdks_without_effect_are_accepted(client: OpenAI) -> None:
    plain = client.chat.completions.create(**CALL, messages=MESSAGES)
    said = client.chat.completions.create(
        **CALL,
        messages=MESSAGES,
        reasoning_effort="low",
        verbosity="low",
        modalities=["text"],
        service_tier="auto",
        prompt_cache_key="a",
        store=False,
        n=1,
        logit_bias={},
        frequency_penalty=0,
    )
    assert said.choices[0].message.content == plain.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="Input should be 'text'"):
        client.chat.completions.create(**CALL, messages=MESSAGES, modalities=["text", "audio"])


# -------------------------------------------------------------------- responses


def test_a_response_has_the_answer_of_a_chat(client: OpenAI, engine: BlendEngine) -> None:
    history: list[Any] = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    expected = engine.generate(history, **PLAIN)
    said = client.responses.create(
        model=NAME, input=QUESTION, instructions="Be brief.", temperature=0, max_output_tokens=8, store=True
    )
    assert said.output_text == expected.text
    assert (said.status, said.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    usage = said.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (expected.report.prompt_tokens, 8)
    assert usage.total_tokens == usage.input_tokens + 8
    assert said.model_extra is not None
    assert said.model_extra["kvrag"]["prompt_tokens"] == usage.input_tokens
    listed = client.responses.create(
        model=NAME,
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        ],
        temperature=0,
        max_output_tokens=8,
        include=["message.output_text.logprobs"],
        top_logprobs=1,
    )
    assert listed.output_text == said.output_text
    [part] = listed.output[0].content  # type: ignore[union-attr]
    assert len(part.logprobs) == 8  # type: ignore[union-attr, arg-type]


def test_a_streamed_response_has_openais_events(client: OpenAI, served: Served) -> None:
    whole = client.responses.create(model=f"{NAME}-rag", input=QUESTION, temperature=0, max_output_tokens=8)
    body = {"model": f"{NAME}-rag", "input": QUESTION, "temperature": 0, "max_output_tokens": 8}
    with client.responses.stream(**body) as stream:  # checks the order of the events
        events: list[Any] = list(stream)
    final = events[-1].response
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert final.output_text == whole.output_text
    assert [each["document"] for each in final.model_extra["citations"]] == ["all.txt", "all.txt"]
    raw = served.http.post("/v1/responses", json={**body, "stream": True}).text
    assert raw.startswith("event: response.created\ndata: {")
    assert "[DONE]" not in raw


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_calls_functions(client: OpenAI, engine: BlendEngine, stream: bool) -> None:
    settings: dict[str, Any] = {"model": NAME, "tools": [TOOL], "temperature": 0, "max_output_tokens": 64}
    said: Any = client.responses.create(**settings, input=QUESTION, tool_choice="required", stream=stream)
    if stream:
        events = list(said)
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        said = events[-1].response
        assert deltas == [said.output[0].arguments]
    [call] = said.output
    assert (call.type, call.name, said.status) == ("function_call", "look", "completed")
    assert isinstance(json.loads(call.arguments)["far"], bool)
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": text} for text in ("A bird.", "A plane.")],
    }
    again = client.responses.create(**settings, input=[*MESSAGES, call, result], tool_choice="none")
    function = {"name": "look", "arguments": json.loads(call.arguments)}
    history = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": call.call_id, "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "A bird.\nA plane."},
    ]
    answer = engine.generate(
        history, temperature=0, max_new_tokens=64
    )  # begins like the other prompt: rounded otherwise
    assert again.output_text[:80] == answer.text[:80]


def test_a_call_of_a_response_that_is_cut_off_is_incomplete(client: OpenAI) -> None:
    settings: dict[str, Any] = {"model": NAME, "tools": [TOOL], "temperature": 0, "tool_choice": "required"}
    sizes = []
    for limit in range(1, 64, 9):  # the engine's own test cuts at every token
        *events, last = client.responses.create(**settings, input=QUESTION, max_output_tokens=limit, stream=True)
        if last.type == "response.completed":
            break
        assert last.type == "response.incomplete"
        [call] = last.response.output
        is_whole = call.arguments.endswith("}")  # only the closing marks are missing
        assert (call.name, call.status) == ("look", "completed" if is_whole else "incomplete")
        assert [event.item for event in events if event.type == "response.output_item.done"] == [call]
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == call.arguments
        sizes.append(len(call.arguments))
    assert sizes[0] == 0 < sizes[-1]


def test_a_response_follows_a_schema(client: OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "place", "schema": PARAMETERS}, "verbosity": "low"}
    said = client.responses.create(model=NAME, input=QUESTION, text=text, temperature=0, max_output_tokens=64)
    assert list(json.loads(said.output_text)) == ["far"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"previous_response_id": "resp_1"}, "responses are not stored, send the whole conversation as input"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "type: Input should be 'input_text'"),
        ({"input": [{"role": "user"}]}, "input.0.content: Field required"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input.0.arguments: Field required"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "contains no message"),
        ({"background": True}, "background: Input should be False"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_unsupported_options_of_responses_are_refused_in_one_line(
    served: Served, changes: dict[str, Any], words: str
) -> None:
    said = served.http.post("/v1/responses", json={"model": NAME, "input": QUESTION, **changes})
    assert said.status_code == 400
    assert words in said.json()["error"]["message"]


def test_a_response_that_fails_in_mid_stream_reports_it(engine: BlendEngine) -> None:
    with serving(engine, timeout=2, token_limit=100_000) as served:
        body = {"model": NAME, "input": QUESTION, "max_output_tokens": 100_000, "stream": True}
        lines = served.http.post("/v1/responses", json=body).text.splitlines()
    kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert kinds[-2:] == ["error", "response.failed"]
    assert "longer than" in json.loads(lines[-2].removeprefix("data: "))["response"]["error"]["message"]


# -------------------------------------------------------------------- documents, pages


def test_a_form_is_not_taken_for_a_file(served: Served) -> None:
    said = served.http.put("/v1/corpus/a.txt", files={"file": b"x"})
    assert (said.status_code, "not a form" in said.text) == (400, True)


def test_the_interface_is_described_with_keys(engine: BlendEngine) -> None:
    with serving(engine, api_keys=(ApiKey("one"),)) as served:
        described = httpx.get(f"{served.url}/openapi.json").json()
    assert described["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    assert {"/v1/responses", "/v1/chat/completions", "/v1/corpus"} <= set(described["paths"])
    assert {"messages", "ratio"} <= set(described["components"]["schemas"]["ChatRequest"]["properties"])


def test_the_limit_of_a_body_names_its_option(engine: BlendEngine, tmp_path: Path) -> None:
    corpus = make_corpus(engine, tmp_path / "small", namespace="small")
    with serving(engine, corpus, namespace="small", max_body=1 << 20, max_upload=3 << 20) as served:
        long = served.ask("x" * (2 << 20))
        upload = served.http.put("/v1/corpus/a.txt", content=b"x" * (4 << 20))
        page = b"<p>A bird.</p><!--" + b"x" * (2 << 20) + b"-->"  # little text: splitting much goes on for minutes
        allowed = served.http.put("/v1/corpus/a.html", content=page)
        served.http.delete("/v1/corpus/a.html").raise_for_status()
    corpus.index.close()
    assert long.status_code == upload.status_code == 413
    assert "limit of 1 MiB (--max-body-mib)" in long.json()["error"]["message"]
    assert "limit of 3 MiB (--max-upload-mib)" in upload.json()["error"]["message"]
    assert allowed.status_code == 200


# -------------------------------------------------------------------- keep-alives


def test_a_stream_without_events_is_kept_alive(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvrag.server.answers, "KEEP_ALIVE_S", 0.05)
    forward, heard = engine.model.forward, threading.Event()

    def slow(*args: Any, **settings: Any) -> Any:
        assert heard.wait(60)
        return forward(*args, **settings)

    with serving(engine) as served:
        expected = served.ask(QUESTION, max_tokens=2).json()["choices"][0]["message"]["content"]
        monkeypatch.setattr(engine.model, "forward", slow)
        body = {**CALL, "max_tokens": 2, "messages": MESSAGES, "stream": True}
        with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines) == ": waiting"
            heard.set()
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        heard.clear()
        threading.Timer(0.3, heard.set).start()
        client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        pieces = client.chat.completions.create(**{**CALL, "max_tokens": 2}, messages=MESSAGES, stream=True)
        said = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert said == expected


def test_an_error_after_the_first_keep_alive_is_an_event(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvrag.server.answers, "KEEP_ALIVE_S", 0.05)

    heard = threading.Event()

    def fails(*args: Any, **settings: Any) -> Any:
        assert heard.wait(60)
        raise MemoryError

    monkeypatch.setattr(engine.model.hf, "forward", fails)
    body = {**CALL, "messages": MESSAGES, "stream": True}
    with serving(engine) as served:
        with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines) == ": waiting"
            heard.set()
            said = "\n".join(lines)
        until(lambda: served.running() == (0, 0))
    assert (response.status_code, "out_of_memory" in said, "[DONE]" in said) == (200, True, False)


def test_a_client_that_disconnects_before_the_first_event_ends_the_work(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvrag.server.answers, "KEEP_ALIVE_S", 0.05)
    forward, calls, left = engine.model.forward, [0], threading.Event()

    def slow(*args: Any, **settings: Any) -> Any:
        calls[0] += 1
        assert left.wait(60)
        return forward(*args, **settings)

    monkeypatch.setattr(engine.model, "forward", slow)
    body = {**CALL, "max_tokens": 500, "messages": MESSAGES, "stream": True}
    with serving(engine) as served:
        with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert next(response.iter_lines()) == ": waiting"
        threading.Timer(0.2, left.set).start()
        until(lambda: served.running() == (0, 0))
    assert calls[0] < 20


# -------------------------------------------------------------------- what other clients send


def test_langchain_uses_the_responses_interface(served: Served, engine: BlendEngine) -> None:
    llm = ChatOpenAI(
        base_url=f"{served.url}/v1", api_key="none", model=NAME, temperature=0, max_tokens=8, use_responses_api=True
    )
    expected = engine.generate(MESSAGES, **PLAIN).text
    said = llm.invoke(QUESTION)
    assert said.text == expected
    assert said.usage_metadata is not None
    assert said.usage_metadata["output_tokens"] == 8
    assert "".join(piece.text for piece in llm.stream(QUESTION)) == expected
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}
    llm.max_tokens = 64
    called = llm.bind_tools([tool], tool_choice="look").invoke(QUESTION)
    assert [call["name"] for call in called.tool_calls] == ["look"]


def test_langchain_reads_log_probabilities_and_several_answers(served: Served) -> None:
    llm = ChatOpenAI(
        base_url=f"{served.url}/v1",
        api_key="none",
        model=NAME,
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        n=2,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        logit_bias={"5": -1},
    )
    generations = llm.generate([[HumanMessage(QUESTION)]]).generations[0]
    assert len(generations) == 2
    assert len(generations[0].message.response_metadata["logprobs"]["content"]) == 4  # type: ignore[union-attr]


def test_llama_indexs_class_for_such_servers(served: Served, engine: BlendEngine) -> None:
    """It needs openai<3: skipped where a newer one is installed."""
    module = pytest.importorskip("llama_index.llms.openai_like")
    llm = module.OpenAILike(
        api_base=f"{served.url}/v1", api_key="none", model=NAME, is_chat_model=True, temperature=0, max_tokens=8
    )
    assert llm.complete(QUESTION).text == engine.generate(MESSAGES, **PLAIN).text
    assert "".join(piece.delta or "" for piece in llm.stream_complete(QUESTION)).strip()


LIBRECHAT = {
    "model": NAME,
    "temperature": 1,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "user": "662f1f77bcf86cd799439011",
    "stream": True,
    "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
}


def test_librechat_is_answered(served: Served) -> None:
    said = served.http.post("/v1/chat/completions", json=LIBRECHAT)
    assert said.status_code == 200, said.text
    *events, done = [line.removeprefix("data: ") for line in said.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    assert "".join(choice["delta"].get("content", "") for event in events for choice in json.loads(event)["choices"])
