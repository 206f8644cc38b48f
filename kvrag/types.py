"""Values that go in and come out: frozen, without behaviour beyond derived numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Messages = list[dict[str, Any]]
"""Chat messages as transformers' chat templates take them: `{"role": ..., "content": ...}`."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of prompt tokens identical to a stretch of an ingested chunk.

    Prompt positions `start` to `stop` (half-open) equal the chunk's tokens from `offset` on.
    """

    start: int
    stop: int
    key: str
    offset: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class WarmReport:
    """Result of an ingestion.

    `chunks` counts distinct chunks given, `new` those encoded now, `reused` those already in the store, `skipped`
    those too short to be matched. `tokens` and `bytes` count the new ones. `warnings` name texts that will not be
    reused.
    """

    chunks: int
    tokens: int
    bytes: int
    new: int
    reused: int
    skipped: int
    seconds: float
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BlendReport:
    """What was reused and recomputed for one answer, and how long each step took.

    `reused_tokens` came from the store or the conversation, `recomputed_tokens` of them were computed again on all
    layers, `fresh_tokens` were in neither. Times are in seconds; `ttft_s` runs from the call to the first token and
    includes all others; `load_s` and `stitch_s` fall within `select_s` and `blend_s`. Of the reused tokens,
    `created_tokens` were encoded for this answer, as its `documents`, and `conversation_tokens`, the first of the
    prompt, come from the conversation's last turn; `runs` are the rest. `exact`: the answer is full prefill's by
    construction. `tier` is the source of the KV: "ram", "disk", "mixed" or "" (none). `decision` is the controller's
    choice and its reason, "" if it had nothing to decide.
    """

    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    fresh_tokens: int
    runs: tuple[Run, ...]
    policy: str
    ratio: float
    match_s: float
    load_s: float
    stitch_s: float
    select_s: float
    blend_s: float
    ttft_s: float
    bytes_loaded: int
    tier: str
    exact: bool
    notes: tuple[str, ...] = ()
    decision: str = ""
    created_tokens: int = 0
    conversation_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "runs": [asdict(run) for run in self.runs], "notes": list(self.notes)}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call by the model; `id` is made here, nine letters and digits, as Mistral's templates require."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished generation. `text` is the answer without its tool calls."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    report: BlendReport
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed answer.

    The last one has `finish_reason` and `report` set; its `text` may be empty. `token_ids` are the tokens generated
    since the previous delta, `tool_calls` the calls that they completed.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    report: BlendReport | None = None
    tool_calls: tuple[ToolCall, ...] = ()
