"""Texts to encode, and their division into requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvrag.config import check_names
from kvrag.errors import SettingError


class NamedText(NamedTuple):
    """A text with the names of its document and its source; "" = none."""

    text: str
    document: str
    source: str


def named_texts(
    texts: Iterable[str], document: str | Sequence[str], sources: str | Sequence[str] | None
) -> list[NamedText]:
    """Return the arguments of `BlendEngine.warm`, text by text; raise SettingError if they do not fit together."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        shown = "one string" if isinstance(texts, str) else repr(texts)
        raise SettingError(f"texts must be a list of strings, not {shown:.80}")
    listed = list(texts)
    for number, text in enumerate(listed):
        if not isinstance(text, str):
            raise SettingError(f"chunk {number} must be a string, got {type(text).__name__}")
    sources = document if sources is None else sources
    columns = [[names] * len(listed) if isinstance(names, str) else list(names) for names in (document, sources)]
    for what, names in zip(("document names", "sources"), columns, strict=True):
        if len(names) != len(listed):
            raise SettingError(f"{len(names)} {what} for {len(listed)} texts: give one per text, or a single string")
    check_names(*{*columns[0], *columns[1]}, *([document] if isinstance(document, str) else ()))
    return list(map(NamedText, listed, *columns))


def whole_documents(texts: Sequence[NamedText], size: int) -> Iterator[Sequence[NamedText]]:
    """Yield parts of about this many bytes. No document and no source is divided, whatever its size."""
    last = {name: number for number, row in enumerate(texts) for name in (row.document, row.source) if name}
    start = filled = open_until = 0
    for number, row in enumerate(texts):
        if filled >= size and number > open_until:
            yield texts[start:number]
            start, filled = number, 0
        filled += num_bytes(row.text)
        open_until = max(open_until, last.get(row.document, 0), last.get(row.source, 0))
    if texts:
        yield texts[start:]


def num_bytes(text: str) -> int:
    """Return the length of a text in UTF-8."""
    return len(text.encode(errors="surrogatepass"))
