"""Frozen value types of inputs and outputs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

Messages = list[dict[str, Any]]  # as in transformers' chat templates: {"role": ..., "content": ...}
TokenIds = list[int]  # a prompt, used as it is
Prompt = str | Messages | TokenIds
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
class _Report:
    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Return the report of a dict from `to_dict`; unknown keys, of a newer version, are ignored."""
        known = _known(cls, content)
        for name, value in known.items():
            if isinstance(value, list):
                known[name] = tuple(Run(**_known(Run, item)) if name == "runs" else item for item in value)
        for name in ("completed", "deepened"):
            if known.get(name):
                known[name] = Completed(**_known(Completed, known[name]))
        return cls(**known)


def _known(cls: type, content: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: content[field.name] for field in fields(cls) if field.name in content}


@dataclass(frozen=True, slots=True)
class WarmReport(_Report):
    """Result of an ingestion.

    `chunks` counts distinct chunks given, `new` those encoded now, `reused` those already in the store, `skipped`
    those too short to be matched. `tokens` counts those of the new ones, `bytes` what was stored. `warnings` name texts
    that will not be reused.
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
class LearnStats(_Report):
    """Counters of learning from prompts: texts seen once, chunks learned and their tokens, prompts with an error,
    prompts that were not looked at because too many waited, and tokens of prompts that learned chunks brought."""

    seen: int
    learned: int
    tokens: int
    failed: int
    ignored: int
    reused: int


@dataclass(frozen=True, slots=True)
class CheckStats(_Report):
    """Answers that were `compared` with full prefill's, and of these the `kept` ones, in which full prefill would have
    chosen every decided token; comparisons that `failed` in this process. `verdict` is in a sentence what the evidence
    says of the model; "" = too little is known."""

    compared: int = 0
    kept: int = 0
    failed: int = 0
    verdict: str = ""

    def __str__(self) -> str:
        compared = f"of {self.compared} compared answers {self.kept} were kept" if self.compared else ""
        return ". ".join(filter(None, (self.verdict.rstrip("."), compared))) or "nothing is known yet"


@dataclass(frozen=True, slots=True)
class Completed:
    """The recompute of more of a prompt, or of all its rest, because the model was unsure of a token.

    `token` is the number of tokens before it in the answer. Computed were `rows` tokens, those of the question and the
    answer included, in `seconds`.
    """

    token: int
    rows: int
    seconds: float


TIMES = ("match_s", "load_s", "stitch_s", "select_s", "blend_s", "ttft_s")


@dataclass(frozen=True, slots=True)
class BlendReport(_Report):
    """Reuse and timing of one answer. Counts are of prompt tokens, times in seconds.

    Attributes:
        prompt_tokens: Length of the prompt.
        reused_tokens: Those whose KV was never computed for this answer.
        recomputed_tokens: Those with stored KV that were computed all the same, those of `completed` included.
        fresh_tokens: Those without stored KV, in the store or from earlier prompts.
        runs: Runs of stored chunks in the prompt.
        policy, ratio: As they were applied; the ratio is the one that an adaptive answer began with.
        match_s: To find the chunks.
        load_s: To read them, mostly in parallel with the forward pass.
        stitch_s: To lay out and rotate them; part of `select_s` and `blend_s`.
        select_s: To select the tokens to recompute.
        blend_s: To compute the fresh and selected tokens.
        ttft_s: From the call to the first token; includes all others but `load_s`.
        bytes_loaded: Bytes read from below the RAM tier.
        tier: Source of the chunks: "device", "ram", "disk", "shared", "mixed" or "" (none).
        exact: The answer equals full prefill's by construction.
        notes: Remarks, such as chunks that could not be read.
        decision: The controller's choice and its reason; "" if it made none.
        created_tokens: Those with stored KV that was encoded for this answer (its `documents`).
        conversation_tokens: Those at the start with KV from earlier prompts and answers that begin alike.
        moved_tokens: Those with KV from another place of an earlier prompt, whose history was edited.
        load_stall_s: Time that the forward pass waited for chunks; part of `select_s` and `blend_s`.
        completed: How the rest was recomputed because the model was unsure of a token; None = it was not.
        deepened: How one more share was recomputed for that reason, before; None = it was not.
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
    moved_tokens: int = 0
    load_stall_s: float = 0.0
    completed: Completed | None = None
    deepened: Completed | None = None

    @property
    def stored_tokens(self) -> int:
        """Those with stored KV, recomputed or not."""
        return self.prompt_tokens - self.fresh_tokens

    @classmethod
    def unblended(cls, prompt_tokens: int, cached_tokens: int, **known: Any) -> BlendReport:
        """Return the report of a prompt that another engine answered, with `cached_tokens` from its prefix cache."""
        unknown: dict[str, Any] = dict.fromkeys(TIMES, 0.0)
        unknown |= {"recomputed_tokens": 0, "runs": (), "policy": "", "ratio": 0.0, "bytes_loaded": 0, "tier": ""}
        counts = {"reused_tokens": cached_tokens, "fresh_tokens": prompt_tokens - cached_tokens, "exact": False}
        return cls(**{"prompt_tokens": prompt_tokens, **counts, **unknown, **known})


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call by the model. `id` is the server's, or nine letters and digits, as Mistral's templates require."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True, slots=True)
class InvalidCall:
    """A tool call that cannot be executed: it was cut off, even in its name, or `arguments` are not a JSON object."""

    name: str
    arguments: str
    id: str


def arguments_of(value: Any) -> dict[str, Any] | None:
    """Return arguments, given as a dict or JSON, as a dict of plain JSON types; None if they are neither.

    Lone surrogates, which models may write as escapes and tokenizers reject, become U+FFFD.
    """
    try:
        if isinstance(value, str):
            value = json.loads(value, strict=False) if value.strip() else {}
        if value is not None and not isinstance(value, Mapping):
            return None
        text = json.dumps(dict(value or {}), ensure_ascii=False)
        return dict(json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")))
    except (TypeError, ValueError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a generated token, by the model's logits before any sampling setting."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, best first


@dataclass(frozen=True, slots=True)
class _Generated:
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    report: BlendReport | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    num_tokens: int = 0
    invalid_calls: tuple[InvalidCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    reasoning_tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", self.num_tokens or len(self.token_ids))


@dataclass(frozen=True, slots=True)
class Answer(_Generated):
    """A complete generation. `text` is the answer without its tool calls, valid or not.

    `num_tokens` is the number of generated tokens. Servers send no `token_ids`. `logprobs` has one entry per token if
    requested. `reasoning` is the model's thought before the answer, `reasoning_tokens` of the tokens belong to it.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    report: BlendReport


@dataclass(frozen=True, slots=True)
class Delta(_Generated):
    """A piece of a streamed answer.

    The last one has `finish_reason` and `report` set; its `text` may be empty. `token_ids` are the tokens generated
    since the previous delta, `num_tokens` their number, `logprobs` their log probabilities if requested. `tool_calls`
    and `invalid_calls` are the calls that end here. `reasoning` is the next part of the model's thought, and
    `reasoning_tokens` of the tokens belong to a thought. Servers send no `token_ids`, and the calls and the numbers of
    all tokens with the last delta.
    """


def openai_usage(answers: Sequence[Answer], per_prompt: int = 1) -> dict[str, Any]:
    """Return OpenAI's usage. The prompt of `per_prompt` answers counts once, with what was computed for any of them."""
    reports = [answer.report for answer in answers]
    prompts = [reports[start : start + per_prompt] for start in range(0, len(reports), per_prompt)]
    prompt, answered = sum(rows[0].prompt_tokens for rows in prompts), sum(answer.num_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answered,
        "total_tokens": prompt + answered,
        "prompt_tokens_details": {
            "cached_tokens": sum(min(row.reused_tokens for row in rows) for rows in prompts),
            "cache_write_tokens": sum(row.created_tokens for row in reports),
        },
        "completion_tokens_details": {"reasoning_tokens": sum(answer.reasoning_tokens for answer in answers)},
    }


def join(deltas: Iterable[Delta]) -> Answer:
    """Join the deltas of an answer."""
    parts = list(deltas)
    last = parts[-1]
    assert last.finish_reason is not None
    assert last.report is not None
    return Answer(
        "".join(delta.text for delta in parts),
        tuple(token for delta in parts for token in delta.token_ids),
        last.finish_reason,
        last.report,
        tuple(call for delta in parts for call in delta.tool_calls),
        sum(delta.num_tokens for delta in parts),
        tuple(call for delta in parts for call in delta.invalid_calls),
        tuple(logprob for delta in parts for logprob in delta.logprobs),
        "".join(delta.reasoning for delta in parts),
        sum(delta.reasoning_tokens for delta in parts),
    )
