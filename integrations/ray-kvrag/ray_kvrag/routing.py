"""Routing of requests to the server that has most of the prompt's chunks in memory.

The chunks of a prompt are unknown before it is matched, so its paragraphs represent them: equal chunks have equal
paragraphs. Each paragraph is assigned to one server by rendezvous hashing, so adding or removing a server only affects
that server's paragraphs. A request goes to the server with most of its text.
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

_MIN_LENGTH = 64  # characters: shorter paragraphs are headings and questions
_BLANK = re.compile(r"\n\s*\n")
_PLACES = ("documents", "chunks", "messages", "input", "prompt")


@dataclass(frozen=True)
class Route:
    """Properties of a request that determine its server.

    Attributes:
        weights: Length of each paragraph in characters, by its hash.
        is_pinned: Whether the request goes to its server even if that is busy.
    """

    weights: Mapping[str, int] = field(default_factory=dict)
    is_pinned: bool = False

    @classmethod
    def of(cls, path: str, namespace: str, body: bytes) -> Route:
        """Return the route of a request; empty if the body is not valid."""
        if path.startswith("/v1/corpus"):  # a deletion must find what is being encoded
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
        long = [part for part in parts if len(part) >= _MIN_LENGTH]
        return cls({_hash(namespace, part): len(part) for part in long or parts if part})

    def rank(self, loads: Mapping[str, int], spread: int) -> list[str]:
        """Return the servers, best first.

        Args:
            loads: Requests in progress, by server.
            spread: A server with more than this many requests above the least busy one is used last.
        """
        votes: Counter[str] = Counter()
        for key, weight in self.weights.items() if loads else ():
            votes[max(loads, key=lambda server: _hash(key, server))] += weight
        most = float("inf") if self.is_pinned else min(loads.values(), default=0) + spread
        return sorted(loads, key=lambda server: (loads[server] > most, -votes[server], loads[server], random.random()))


def _texts(content: Any) -> Iterator[str]:
    """Yield the texts in a part of a request, except system messages, which many prompts have in common."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        if content and all(isinstance(item, int) for item in content):
            yield str(content)
        else:
            for item in content:
                yield from _texts(item)
    elif isinstance(content, dict) and content.get("role") not in ("system", "developer"):
        yield from _texts(content.get("text"))
        yield from _texts(content.get("content"))


def _hash(*parts: str) -> str:
    return blake2b("\0".join(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()
