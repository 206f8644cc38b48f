"""Spans of answers, with OpenTelemetry's SDK."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
from blending import CHUNKS, messages
from langchain_core.messages import HumanMessage
from langchain_kvrag import ChatBlend
from llama_index.core.llms import ChatMessage
from llama_index.llms.kvrag import BlendLLM
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from serving import serving

from kvrag import BlendEngine, ContextWindowError, RemoteEngine, tracing
from kvrag.types import join

PROMPT = messages(*CHUNKS)
PLAIN: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4, "policy": "hkvd", "ratio": 0.2}
STEPS = ["match", "load", "stitch", "select", "blend", "ttft"]

Spans = Callable[[], dict[str, ReadableSpan]]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)  # the global provider can be set only once
    return exporter


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Spans:
    """The spans since the last call, by name."""

    def take() -> dict[str, ReadableSpan]:
        found = exporter.get_finished_spans()
        exporter.clear()
        by_name = {span.name: span for span in found}
        assert len(by_name) == len(found)
        return by_name

    return take


def test_an_answer_is_a_span_with_the_seconds_of_its_steps(engine: BlendEngine, endless: Any, spans: Spans) -> None:
    engine.warm(CHUNKS)
    assert spans() == {}
    answer = engine.generate(PROMPT, **PLAIN)
    found, report = spans(), answer.report
    assert list(found) == ["chat tiny"]
    chat = found["chat tiny"]
    assert chat.parent is None
    assert chat.status.is_unset
    assert chat.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvrag",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.reasoning.output_tokens": 0,
        "gen_ai.usage.cache_read.input_tokens": report.reused_tokens,
        "gen_ai.usage.cache_creation.input_tokens": 0,
        "kvrag.policy": "hkvd",
        "kvrag.ratio": 0.2,
        "kvrag.recomputed_tokens": report.recomputed_tokens,
        **{f"kvrag.{step}_s": getattr(report, f"{step}_s") for step in STEPS},
    }
    assert min(report.reused_tokens, report.recomputed_tokens) > 0


def test_text_documents_and_calls(engine: BlendEngine, spans: Spans) -> None:
    report = engine.generate("\n".join(CHUNKS), documents=CHUNKS, **PLAIN).report
    said = spans()["text_completion tiny"].attributes or {}
    assert said["gen_ai.usage.cache_creation.input_tokens"] == report.created_tokens > 0
    assert said["gen_ai.usage.cache_read.input_tokens"] == report.reused_tokens == 0
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    assert engine.generate(PROMPT, tools=[tool], tool_choice="required", max_new_tokens=64).tool_calls
    assert (spans()["chat tiny"].attributes or {})["gen_ai.response.finish_reasons"] == ("tool_calls",)


def test_a_span_is_current_for_the_engine_and_never_for_the_consumer(
    engine: BlendEngine, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[Any] = []
    notice = engine._answering.forgetting.notice
    monkeypatch.setattr(
        engine._answering.forgetting,
        "notice",
        lambda removals: (inside.append(trace.get_current_span().get_span_context()), notice(removals)),
    )
    with trace.get_tracer("test").start_as_current_span("app") as app:
        deltas = engine.stream(PROMPT, **PLAIN)
    with trace.get_tracer("test").start_as_current_span("other") as other:
        for _ in deltas:
            assert trace.get_current_span() is other
    found = spans()
    assert inside == [found["chat tiny"].context]
    assert found["chat tiny"].parent == app.get_span_context()


async def test_answers_in_other_threads_have_the_callers_span_as_parent(
    engine: BlendEngine, exporter: InMemorySpanExporter
) -> None:
    with trace.get_tracer("test").start_as_current_span("app") as app:
        async for _ in engine.astream(PROMPT, **PLAIN):
            assert trace.get_current_span() is app
        engine.generate_batch([PROMPT, PROMPT], **PLAIN)
    parents = [span.parent for span in exporter.get_finished_spans() if span.name == "chat tiny"]
    assert parents == [app.get_span_context()] * 3


def test_an_error_is_the_spans_status_and_an_abandoned_answer_is_none(engine: BlendEngine, spans: Spans) -> None:
    with pytest.raises(ContextWindowError):
        engine.generate("word " * 5000)
    failed = spans()["text_completion tiny"]
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert "too many" in (failed.status.description or "")
    assert (failed.attributes or {})["error.type"] == "ContextWindowError"
    deltas = engine.stream(PROMPT, **PLAIN)
    next(deltas)
    deltas.close()
    found = spans()
    assert found["chat tiny"].status.is_unset
    assert (found["chat tiny"].attributes or {})["gen_ai.usage.output_tokens"] == 1


def test_frameworks_report_the_counts_of_the_span(engine: BlendEngine, spans: Spans) -> None:
    engine.warm(CHUNKS)
    text = "\n\n".join(CHUNKS)
    usage: Any = ChatBlend(engine=engine, max_tokens=4).invoke([HumanMessage(text)]).usage_metadata
    said = spans()["chat tiny"].attributes or {}
    assert usage["input_token_details"]["cache_read"] == said["gen_ai.usage.cache_read.input_tokens"]
    assert usage["input_token_details"]["cache_creation"] == said["gen_ai.usage.cache_creation.input_tokens"]
    counts = [said[f"gen_ai.usage.{name}_tokens"] for name in ("input", "output")]
    assert [usage["input_tokens"], usage["output_tokens"]] == counts
    raw: Any = BlendLLM(engine=engine, max_tokens=4).chat([ChatMessage(text)]).raw
    said = spans()["chat tiny"].attributes or {}
    counts = [said[f"gen_ai.usage.{name}_tokens"] for name in ("input", "output", "cache_read.input")]
    details = raw["usage"]["prompt_tokens_details"]
    assert [raw["usage"]["prompt_tokens"], raw["usage"]["completion_tokens"], details["cached_tokens"]] == counts
    assert counts[2] > 40


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_server_continues_the_clients_trace(is_stream: bool, engine: BlendEngine, spans: Spans) -> None:
    with serving(engine) as served:
        remote = RemoteEngine(served.url, max_retries=0)
        with trace.get_tracer("test").start_as_current_span("app") as app:
            report = (join(remote.stream(PROMPT)) if is_stream else remote.generate(PROMPT)).report
        chat = spans()["chat tiny"]
        remote.generate(PROMPT)
        assert spans()["chat tiny"].parent is None
        remote.close()
    assert chat.parent is not None
    assert (chat.parent.trace_id, chat.parent.span_id) == (
        app.get_span_context().trace_id,
        app.get_span_context().span_id,
    )
    assert (chat.attributes or {})["gen_ai.usage.input_tokens"] == report.prompt_tokens


def test_without_opentelemetry_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert tracing.__spec__ is not None
    spec = importlib.util.spec_from_file_location("kvrag_untraced", str(tracing.__file__))
    assert spec is not None
    assert spec.loader is not None
    untraced = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(untraced)
    deltas = iter(())
    assert untraced.traced(deltas, "chat", "tiny") is deltas
    assert untraced.trace_headers() == {}
    with untraced.continued({"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}):
        pass
