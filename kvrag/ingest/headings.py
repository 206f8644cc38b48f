"""The title and the headings above a text, with which it is encoded as context."""

from __future__ import annotations

import re

_HEADING = re.compile(r"(#{1,6})\s+\S")
_SUFFIX = re.compile(r"\.[A-Za-z]{2,5}$")


def title(source: str) -> str:
    """Return the title of a source: its name, of a path or URL the last part without the suffix."""
    return _SUFFIX.sub("", re.split(r"[/\\]", source.rstrip("/\\"))[-1])


def headings_after(path: list[str], text: str) -> list[str]:
    """Return the title and the Markdown headings above the text after `text`, given those above it, outermost first.

    Lines of a code block are not headings if the text contains the fence that opens it.
    """
    in_code = False
    for line in text.splitlines():
        in_code ^= line.lstrip().startswith(("```", "~~~"))
        if not in_code and (heading := _HEADING.match(line)):
            level = len(heading[1])
            name, *above = path
            path = [name, *(other for other in above if other.index(" ") < level), line.strip()]
    return path
