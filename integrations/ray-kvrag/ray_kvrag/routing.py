"""Which of several servers answers a request: the one that has most of the prompt's chunks in memory.

Chunks are not known before a prompt is matched, so its paragraphs stand for them: the same chunk has the same
paragraphs. Each paragraph has one server, by rendezvous hashing: a server that comes or goes changes only its own. The
request goes to the server of most of its text.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

_LEAST = 64  # characters: shorter paragraphs are headings and questions
_BLANK = re.compile(r"\n\s*\n")
_PLACES = ("documents", "chunks", "messages", "input", "prompt")


@dataclass(frozen=True)
class Route:
    """What decides about a request's server.

    Attributes:
        weights: By hash of a paragraph, its length in characters.
        is_pinned: However busy that server is.
    """

    weights: Mapping[str, int] = field(default_factory=dict)
    is_pinned: bool = False

    @classmethod
    def of(cls, path: str, namespace: str, body: bytes) -> Route:
        """Return the route of a request; a body that cannot be read has none."""
        if path.startswith("/v1/corpus"):  # one server knows which documents are queued
            return cls({_hash("corpus", namespace): 1}, is_pinned=True)
        if path.startswith("/v1/chunks") or not body:
            return cls()
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            return cls()
        if not isinstance(content, dict):
            return cls()
        parts = [part.strip() for name in _PLACES for text in _texts(content.get(name)) for part in _BLANK.split(text)]
        long = [part for part in parts if len(part) >= _LEAST]
        return cls({_hash(namespace, part): len(part) for part in long or parts if part})

    def rank(self, loads: Mapping[str, int], spread: int) -> list[str]:
        """Return the servers, best first.

        Args:
            loads: Requests in progress, by server.
            spread: A server with so many more of them than the least busy one is passed over.
        """
        votes: Counter[str] = Counter()
        for key, weight in self.weights.items() if loads else ():
            votes[max(loads, key=lambda server: _hash(key, server))] += weight
        most = float("inf") if self.is_pinned else min(loads.values(), default=0) + spread
        return sorted(loads, key=lambda server: (loads[server] > most, -votes[server], loads[server], random.random()))


def _texts(content: Any) -> Iterator[str]:
    """Yield the texts of a part of a request, but not of system messages: many prompts have the same one."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        if content and all(isinstance(each, int) for each in content):
            yield str(content)
        else:
            for each in content:
                yield from _texts(each)
    elif isinstance(content, dict) and content.get("role") not in ("system", "developer"):
        yield from _texts(content.get("text"))
        yield from _texts(content.get("content"))


def _hash(*parts: str) -> str:
    return blake2b("\0".join(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()
