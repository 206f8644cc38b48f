"""Tracing: OpenTelemetry spans of answers, by its semantic conventions for generative AI.

Nothing is recorded without the package `opentelemetry-api`, or before the process has configured OpenTelemetry's SDK.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvrag.types import TIMES, Answer, Delta, join

try:
    from opentelemetry import context, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    trace = None  # type: ignore[assignment]


def traced(deltas: Generator[Delta, None, None], operation: str, model: str) -> Generator[Delta, None, None]:
    """Return the deltas of an answer, produced in a span whose parent is the span that is current now.

    The new span is current while a delta is produced, but not for the consumer between two deltas.
    """
    if trace is None or isinstance(tracer := trace.get_tracer("kvrag"), trace.ProxyTracer):  # nothing is configured
        return deltas
    return _traced(deltas, operation, model, context.get_current(), tracer)


def _traced(
    deltas: Generator[Delta, None, None], operation: str, model: str, parent: Any, tracer: Any
) -> Generator[Delta, None, None]:
    about = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "kvrag", "gen_ai.request.model": model}
    span = tracer.start_span(f"{operation} {model}", parent, attributes=about)
    if not span.is_recording():
        yield from deltas
        return
    own, parts = trace.set_span_in_context(span, parent), list[Delta]()
    try:
        while True:
            with _current(own):
                delta = next(deltas, None)
            if delta is None:
                break
            parts.append(delta)
            if delta.report is not None:
                span.set_attributes(_attributes(join(parts)))
            yield delta
    except Exception as error:
        span.record_exception(error)
        span.set_status(trace.StatusCode.ERROR, str(error))
        span.set_attribute("error.type", type(error).__name__)
        raise
    finally:
        with _current(own):
            deltas.close()
        span.set_attribute("gen_ai.usage.output_tokens", sum(delta.num_tokens for delta in parts))
        span.end()


def _attributes(answer: Answer) -> dict[str, Any]:
    report, is_call = answer.report, answer.tool_calls and answer.finish_reason == "stop"
    return {
        "gen_ai.response.finish_reasons": ("tool_calls" if is_call else answer.finish_reason,),
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": report.reused_tokens,
        "gen_ai.usage.cache_creation.input_tokens": report.created_tokens,
        "gen_ai.usage.reasoning.output_tokens": answer.reasoning_tokens,
        "kvrag.policy": report.policy,
        "kvrag.ratio": report.ratio,
        "kvrag.recomputed_tokens": report.recomputed_tokens,
        **{"kvrag." + name: getattr(report, name) for name in TIMES},
    }


@contextmanager
def continued(headers: Mapping[str, str]) -> Iterator[None]:
    """Make the span in a request's `traceparent` current, unless one of this process is."""
    if trace is None or trace.get_current_span().get_span_context().is_valid:
        yield
        return
    with _current(TraceContextTextMapPropagator().extract(headers)):
        yield


@contextmanager
def _current(own: Any) -> Iterator[None]:
    token = context.attach(own)
    try:
        yield
    finally:
        context.detach(token)


def trace_headers() -> dict[str, str]:
    """Return the headers of a request that continue the current span, if there is one."""
    headers: dict[str, str] = {}
    if trace is not None:
        TraceContextTextMapPropagator().inject(headers)
    return headers
