"""Changes that chains make to chunks before pasting them: escaping, joining lines, lower case.

A change is detected by trial: each one is applied to the chunk and looked up in the prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import escape
from typing import NamedTuple

from kvrag.inspect.explanation import Reason

_PIECE = 32  # characters per search step


def pieces(text: str) -> list[str]:
    """Return a text in pieces of equal length; a shorter rest is dropped unless it is the whole text."""
    text = text.strip()
    return [text[start : start + _PIECE] for start in range(0, len(text) - _PIECE + 1, _PIECE)] or [text]


def unquoted(text: str) -> str:
    """Return the text that a JSON or Python string literal contains."""
    controls = {"n": "\n", "r": "\r", "t": "\t"}

    def replacement(escape_sequence: re.Match[str]) -> str:
        code: str = escape_sequence[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else controls.get(code, code)

    text = re.sub(r"\\(u[0-9a-fA-F]{4}|.)", replacement, text)
    # JSON encodes some characters as two surrogates
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unchanged(text: str) -> str:
    return text


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _lower_case(text: str) -> str:
    return _one_line(text).lower()


class Change(NamedTuple):
    """A change that chains make to chunks. `on_chunk` applies it, `on_prompt` makes a prompt comparable."""

    reason: Reason
    detail: str
    on_chunk: Callable[[str], str]
    on_prompt: Callable[[str], str] = _unchanged


_HTML = "for HTML or XML"
_JSON = "as JSON"
_REPR = "by Python's repr, as when a list of documents is not joined into one text"

_ESCAPES: list[tuple[str, Callable[[str], str]]] = [
    (_HTML, lambda text: escape(text, quote=False)),
    (_HTML, lambda text: escape(text, quote=False).replace('"', "&quot;")),
    (_HTML, escape),
    (_HTML, lambda text: escape(text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")),
    (_JSON, lambda text: json.dumps(text, ensure_ascii=False)[1:-1]),
    (_JSON, lambda text: json.dumps(text)[1:-1]),
    (_REPR, lambda text: repr(text)[1:-1]),
    (_REPR, lambda text: repr('"' + text)[2:-1]),  # as for a chunk with both kinds of quotes
]
_REMEDY = "only text between the escaped characters is reused: paste it unescaped, or warm the escaped text too"

CHANGES = [
    *(Change("escaped", f"{purpose}: {_REMEDY}", on_chunk) for purpose, on_chunk in _ESCAPES),
    Change("rewritten", "its white space differs: warm it as it is pasted", _one_line, _one_line),
    Change("rewritten", "its case differs: warm it as it is pasted", _lower_case, _lower_case),
]
