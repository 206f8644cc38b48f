"""The explanation of a prompt, as values, as text and as HTML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Literal

from kvrag.types import BlendReport
from kvrag.words import counted

Kind = Literal["fresh", "stored", "conversation"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the prompt, positions `start` to `stop` (half-open).

    Attributes:
        kind: "stored" = a run of a chunk, "conversation" = kept from the turn before, "fresh" = neither.
        pieces: Its text in order, as (text, was recomputed) pairs; `recomputed` counts its recomputed tokens.
        key, offset, documents: For a run: the chunk, the run's offset in it, and the documents that hold it.
    """

    start: int
    stop: int
    kind: Kind
    pieces: tuple[tuple[str, bool], ...]
    recomputed: int = 0
    key: str = ""
    offset: int = 0
    documents: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Text of the whole stretch."""
        return "".join(text for text, _ in self.pieces)

    @property
    def source(self) -> str:
        """Origin of the stretch and how much was recomputed, in words; "" for fresh ones."""
        if self.kind == "fresh":
            return ""
        origin = "the conversation so far"
        if self.kind == "stored":
            origin = f"{_name(self.documents, self.key)} from token {self.offset}"
        return f"{origin}, {self.recomputed} recomputed" if self.recomputed else origin


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding about a chunk, or about a text that may be one.

    Attributes:
        tokens: Length of the text; the KV of `reused` of them was not computed for this prompt.
        reason: "stored" = all but a few tokens at its ends; "changed" = the prompt has it in part or not at all;
            "never warmed" = it could not be reused.
        detail: What differs, or why and the remedy, in a sentence; "" if there is nothing to do.
        key, documents: The stored chunk and the documents that hold it; "" and none if it is not one.
    """

    text: str
    tokens: int
    reused: int
    reason: Literal["stored", "changed", "never warmed"]
    detail: str = ""
    key: str = ""
    documents: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Name of the chunk and the beginning of its text."""
        return f"{_name(self.documents, self.key)}: {_brief(self.text)}" if self.key else _brief(self.text)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The parts of a prompt: reused, recomputed and fresh, with reasons.

    `print` shows text, notebooks show colours, `html` returns a page.

    Attributes:
        summary: Sentences, most important first.
        stretches: The whole prompt in order.
        chunks: Chunks in the prompt, and stretches that are in none; problems first.
        report: Report of the answer, or of the prefill made for the explanation.
    """

    summary: tuple[str, ...]
    stretches: tuple[Stretch, ...]
    chunks: tuple[Finding, ...]
    report: BlendReport

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation in plain JSON types."""
        fields = asdict(self) | {"report": self.report.to_dict()}
        for stretch in fields["stretches"]:
            stretch["pieces"] = [{"text": text, "recomputed": recomputed} for text, recomputed in stretch["pieces"]]
        return fields

    def __str__(self) -> str:
        lines = [*self.summary, ""]
        for stretch in self.stretches:
            source = f"  [{stretch.source}]" if stretch.source else ""
            size = stretch.stop - stretch.start
            lines.append(f"{stretch.start:6d}  {size:5d}  {stretch.kind:12s}  {_brief(stretch.text)}{source}")
        lines += [""] * bool(self.chunks)
        for chunk in self.chunks:
            detail = f": {chunk.detail}" if chunk.detail else ""
            lines.append(f"{chunk.reason} ({chunk.reused} of {chunk.tokens} tokens reused), {chunk.title}{detail}")
        return "\n".join(lines)

    def html(self) -> str:
        """Return a self-contained HTML page."""
        head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>kvrag explain</title>'
        return f"{head}<body>{self._repr_html_()}</body></html>\n"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        summary = "".join(f"<p>{escape(line)}</p>" for line in self.summary)
        rows = "".join(
            f"<tr><td>{escape(chunk.reason)}<td>{chunk.reused} of {chunk.tokens}<td>{escape(chunk.title)}"
            f"<td>{escape(chunk.detail)}</tr>"
            for chunk in self.chunks
        )
        table = f"<table><tr><th>chunk<th>tokens reused<th><th></tr>{rows}</table>" if rows else ""
        prompt = "".join(
            f'<span class="{stretch.kind}" title="tokens {stretch.start} to {stretch.stop}\n{escape(stretch.source)}">'
            + "".join(f"<mark>{escape(text)}</mark>" if marked else escape(text) for text, marked in stretch.pieces)
            + "</span>"
            for stretch in self.stretches
        )
        legend = (
            '<p><span class="stored">reused</span> <span class="stored"><mark>stored, but recomputed</mark></span> '
            '<span class="conversation">kept from the conversation</span> <span class="fresh">fresh</span></p>'
        )
        return f'<div class="kvrag-explain"><style>{_STYLE}</style>{summary}{table}{legend}<pre>{prompt}</pre></div>'


def summary_of(report: BlendReport) -> Iterator[str]:
    """Yield what was reused of a prompt, how long it took, and the report's notes."""
    begin = "at first " if report.completed or report.deepened else ""
    yield (
        f"{report.prompt_tokens} prompt tokens: {report.reused_tokens} reused, {report.recomputed_tokens} stored but "
        f"recomputed, {report.fresh_tokens} fresh; first token after {report.ttft_s * 1000:.0f} ms "
        f"({begin}policy {report.policy}, ratio {report.ratio:.2f})"
    )
    if report.conversation_tokens:
        yield f"kept from the conversation: the first {counted(report.conversation_tokens, 'token')}"
    seconds = {"matching": report.match_s, "waiting for chunks": report.load_stall_s, "stitching": report.stitch_s}
    seconds |= {"selecting": report.select_s, "computing": report.blend_s}
    yield "milliseconds: " + ", ".join(f"{name} {value * 1000:.0f}" for name, value in seconds.items())
    more, rest = "one more share of the chunks among them", "and it went on as by full prefill"
    for done, what in ((report.deepened, more), (report.completed, rest)):
        if done:
            rows = f"{counted(done.rows, 'token')} computed in {done.seconds * 1000:.0f} ms"
            yield f"the model was unsure after {counted(done.token, 'token')}: {rows}, {what}"
    if report.policy == "full":
        yield "full prefill was used: nothing but a conversation is reused, whatever is stored"
    yield from filter(None, [report.decision, *report.notes])


def _brief(text: str) -> str:
    """Return a text on one line, with its middle left out."""
    text = " ".join(text.split())
    return repr(text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}")


def _name(documents: tuple[str, ...], key: str) -> str:
    more = f" and {len(documents) - 1} more" if len(documents) > 1 else ""
    return f"{documents[0]}{more}, chunk {key[:8]}" if documents else f"chunk {key[:8]}"


_STYLE = """
.kvrag-explain { color: #1c2733; background: #fff; font: 14px/1.5 system-ui, sans-serif; padding: 1em; }
.kvrag-explain td, .kvrag-explain th { text-align: left; vertical-align: top; padding: 0.2em 0.8em 0.2em 0; }
.kvrag-explain pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.kvrag-explain .stored { background: #d3efd8; border-left: 2px solid #4a9a5b; }
.kvrag-explain .conversation { background: #dbe7fb; border-left: 2px solid #5b7fc0; }
.kvrag-explain .fresh { background: #f2f2f2; }
.kvrag-explain mark { background: #ffc46b; color: inherit; }
""".strip()
