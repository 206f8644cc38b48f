"""Division of texts into requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvrag.config import check_names
from kvrag.errors import ContextWindowError, SettingError

_SURE, _LIKELY = 1, 3  # UTF-8 bytes per token: at least, and usually more than this


@dataclass(frozen=True, slots=True)
class NamedTexts:
    """Texts with the name of a document and of a source each; "" = none."""

    texts: list[str]
    documents: list[str]
    sources: list[str]

    @classmethod
    def of(cls, texts: Iterable[str], document: str | Sequence[str], sources: str | Sequence[str] | None) -> NamedTexts:
        """Return the arguments of `BlendEngine.warm`, one name per text.

        Raises:
            SettingError: They do not fit together.
        """
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            shown = "one string" if isinstance(texts, str) else repr(texts)
            raise SettingError(f"texts must be a list of strings, not {shown:.80}")
        listed = list(texts)
        for number, text in enumerate(listed):
            if not isinstance(text, str):
                raise SettingError(f"chunk {number} must be a string, got {type(text).__name__}")
        names = [document] * len(listed) if isinstance(document, str) else list(document)
        if isinstance(sources, str):
            sources = [sources] * len(listed)
        sources = names if sources is None else list(sources)
        for what, labels in (("document names", names), ("sources", sources)):
            if len(labels) != len(listed):
                raise SettingError(
                    f"{len(labels)} {what} for {len(listed)} texts: give one per text, or a single string"
                )
        check_names(*{*names, *sources}, *([document] if isinstance(document, str) else []))
        return cls(listed, names, sources)

    def __getitem__(self, part: slice) -> NamedTexts:
        return NamedTexts(self.texts[part], self.documents[part], self.sources[part])

    def __len__(self) -> int:
        return len(self.texts)

    def of_documents(self, names: Container[str]) -> NamedTexts:
        """Return the texts of these documents."""
        rows = zip(self.texts, self.documents, self.sources, strict=True)
        texts, documents, sources = zip(*(row for row in rows if row[1] in names), strict=True)
        return NamedTexts(list(texts), list(documents), list(sources))


def whole_documents(texts: NamedTexts, size: int) -> Iterator[NamedTexts]:
    """Yield parts of about this many bytes. No document and no source is divided, whatever its size."""
    last = {name: number for names in (texts.documents, texts.sources) for number, name in enumerate(names) if name}
    last |= {name: max(last[name], number) for number, name in enumerate(texts.documents) if name}
    start = filled = open_until = 0
    for number, text in enumerate(texts.texts):
        if filled >= size and number > open_until:
            yield texts[start:number]
            start, filled = number, 0
        filled += len(text.encode(errors="surrogatepass"))
        for name in (texts.documents[number], texts.sources[number]):
            open_until = max(open_until, last.get(name, 0))
    yield texts[start:]


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """A part of the texts that fits into one prompt.

    Attributes:
        is_whole: It has all texts of its documents.
    """

    part: NamedTexts
    is_whole: bool


def prompt_of(part: NamedTexts) -> str:
    """Return the prompt that reserves room for the texts; vLLM refuses an empty one."""
    return "\n\n".join(part.texts) or " "


def batches(texts: NamedTexts, window: int, count: Callable[[str], int]) -> list[PromptBatch]:
    """Divide texts into prompts that leave room for one more token in the window.

    Args:
        count: Returns the number of tokens of a prompt; asked only when the prompt may be too long.

    Raises:
        ContextWindowError: A text is too long.
    """
    parts: list[NamedTexts] = []
    start = 0
    while start < len(texts):
        stop = _reach(texts, start, window)
        while not _fits(texts[start:stop], window, count):
            if stop - start == 1:
                raise ContextWindowError(
                    f"chunk {start} is too long for the server's window of {window} tokens: split it"
                )
            stop = start + (stop - start) // 2
        parts.append(texts[start:stop])
        start = stop
    times = Counter(name for part in parts for name in {*part.documents})
    return [PromptBatch(part, all(times[name] == 1 for name in part.documents if name)) for part in parts]


def _reach(texts: NamedTexts, start: int, window: int) -> int:
    """Return the end of a batch that probably fits."""
    filled = 0
    for number in range(start, len(texts)):
        filled += len(texts.texts[number].encode(errors="surrogatepass"))
        if number > start and filled > _LIKELY * window:
            return number
    return len(texts)


def _fits(part: NamedTexts, window: int, count: Callable[[str], int]) -> bool:
    prompt = prompt_of(part)
    if len(prompt.encode(errors="surrogatepass")) + 4 <= _SURE * window:  # a few control tokens and the answer
        return True
    return count(prompt) + 1 <= window
