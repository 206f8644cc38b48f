"""Splitting texts into chunks: in Markdown, a heading stays with its text, and every part of a table has its header.

LangChain's splitters and semantic-text-splitter leave the heading of a long section in a chunk of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from langchain_text_splitters import RecursiveCharacterTextSplitter

_HEADING = r"#{1,6}[ \t].*"
_HEADER = r"[^|\n]*\|.*\n(?=[^\n]*-)(?=[^\n]*\|)[-:| \t\r]+$"  # of a table, with the line below it
_LINE = rf"(?!{_HEADING})[^\S\n]*\S.*"
_TEXT = rf"(?!{_HEADER}){_LINE}"
_BLOCK = re.compile(  # with the blank lines before it: tokenizers count white space at the end of a text as less
    rf"(?P<blank>(?:[^\S\n]*\n)*)^(?:(?P<heading>{_HEADING})|(?P<header>{_HEADER})(?:\n{_LINE})*|{_TEXT}(?:\n{_TEXT})*)",
    re.MULTILINE,
)


class MarkdownSplitter(RecursiveCharacterTextSplitter):
    """Splits between blocks. One that is too long is split as by LangChain: at lines, words, characters."""

    def split_text(self, text: str) -> list[str]:
        """Return the chunks of a text. They may exceed `chunk_size` by what lengths of parts do not add up to."""
        return self._merge_splits(self._pieces(text), "")

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield what may not be split any more: blocks, with the headings above them."""
        above = ""  # headings
        for block in _BLOCK.finditer(text.rstrip()):
            length = self._length_function(above + block[0])
            if block["heading"] and length <= self._chunk_size - self._chunk_size // 4:
                above += block[0]
            elif length <= self._chunk_size:
                yield above + block[0]
                above = ""
            else:
                body = text[max(block.end("blank"), block.end("header")) : block.end()]
                yield from self._parts(above + block["blank"], block["header"] or "", body)
                above = ""
        if above:
            yield above

    def _parts(self, above: str, header: str, body: str) -> Iterator[str]:
        """Yield the parts of a long block: the first one below the headings, all below the header of the table."""
        room = self._chunk_size - self._length_function(above + header)
        if room < self._chunk_size // 4:
            above, header, body, room = "", "", above + header + body, self._chunk_size
        overlap = min(self._chunk_overlap, room // 2)
        split = RecursiveCharacterTextSplitter(
            chunk_size=room, chunk_overlap=overlap, length_function=self._length_function, strip_whitespace=False
        )
        for part in split.split_text(body):
            yield above + (f"{header}\n{part.strip()}" if header else part)
            above = "\n\n" if header else ""
