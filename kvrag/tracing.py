"""Tracing: OpenTelemetry spans of answers, by its semantic conventions for generative AI.

Nothing is recorded without the package `opentelemetry-api`, or before the process has configured OpenTelemetry's SDK.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter, time_ns
from typing import Any

from kvrag.types import Answer, Delta, join

try:
    from opentelemetry import context, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    trace = None  # type: ignore[assignment]

_PREFILLED = "kvrag-prefilled"  # in the context of an answer: the ends of its prefills


def traced(deltas: Generator[Delta, None, None], operation: str, model: str) -> Generator[Delta, None, None]:
    """Return the deltas of an answer, produced in a span whose parent is the span that is current now.

    The new span is current while a delta is produced, but not for the consumer between two deltas.
    """
    return deltas if trace is None else _traced(deltas, operation, model, context.get_current())


def _traced(
    deltas: Generator[Delta, None, None], operation: str, model: str, parent: Any
) -> Generator[Delta, None, None]:
    about = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "kvrag", "gen_ai.request.model": model}
    tracer = trace.get_tracer("kvrag")
    span = tracer.start_span(f"{operation} {model}", parent, attributes=about)
    if not span.is_recording():
        yield from deltas
        return
    inside, prefilled, parts, end = trace.set_span_in_context(span, parent), list[int](), list[Delta](), 0
    own = context.set_value(_PREFILLED, prefilled, inside)
    try:
        while True:
            with _current(own):
                delta = next(deltas, None)
            if delta is None:
                break
            end = time_ns()
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
        if parts and prefilled:
            tracer.start_span("decode", inside, start_time=prefilled[-1]).end(end)
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
    }


def record_steps(steps: Mapping[str, tuple[float, float]]) -> None:
    """Add the steps of a prefill, each with start and end by `time.perf_counter`, to the current answer's span."""
    prefilled: Any = None if trace is None else context.get_value(_PREFILLED)
    if prefilled is None:
        return
    tracer, epoch = trace.get_tracer("kvrag"), time_ns() - perf_counter() * 1e9
    times = {name: (int(epoch + start * 1e9), int(epoch + end * 1e9)) for name, (start, end) in steps.items()}
    blend = tracer.start_span("blend", start_time=times["stitch"][0])  # layers are stitched and selected within it
    for name in [name for name in ("match", "load", "stitch", "select") if name in times]:
        parent = trace.set_span_in_context(blend) if name in ("stitch", "select") else None
        tracer.start_span(name, parent, start_time=times[name][0]).end(times[name][1])
    prefilled.append(times["blend"][1])
    blend.end(prefilled[-1])


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
