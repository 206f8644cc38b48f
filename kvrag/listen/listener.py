"""The interface of all listeners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrag.config import Sampling
from kvrag.request import Request
from kvrag.types import Messages, TokenIds

Prefill = Callable[[Request], None]
"""`BlendEngine.prefill`, for a request."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A complete answer.

    Attributes:
        request: As it was prefilled and decoded, still with its KV.
        tokens: Those of the answer.
        is_ended: An end token came after them.
        has_grammar: The tokens were chosen with a grammar.
        prefill: For other requests.
    """

    request: Request
    sampling: Sampling
    tokens: Sequence[int]
    is_ended: bool
    has_grammar: bool
    prefill: Prefill


class Listener:
    """Watches answers. Thread-safe: answers of several threads call it at the same time.

    Attributes:
        name: Of its statistics in `BlendEngine.stats`; "" = it has none.
    """

    name = ""

    def prefilled(self, request: Request, prompt: str | Messages | TokenIds) -> None:
        """Note a prompt before its first token."""

    def answered(self, answer: Answered) -> None:
        """Note an answer. Not called for those that were abandoned."""

    def forgotten(self) -> None:
        """Drop the requests with `is_forgotten`: texts of them were deleted."""

    def forget_learned(self, namespace: str) -> None:
        """Drop what came from the namespace's prompts."""

    def stats(self, namespace: str | None) -> object:
        """Return statistics of a namespace; None = of all."""
