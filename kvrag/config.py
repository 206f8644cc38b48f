"""Options, checked where they are given. Each one is declared here once; what offers it elsewhere is made from that.

`Sampling` and `BlendConfig` are values. The options of functions are TypedDicts, whose names type checkers see. Those
of an answer have the names of both values too, because type checkers read a TypedDict only as it is written.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import InitVar, dataclass, field, fields, replace
from functools import cache, partial
from itertools import chain
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, cast, get_type_hints
from urllib.parse import urlsplit

from kvrag.errors import PromptError, SettingError

CODECS = ("native", "int8", "int4")  # of stored KV: as the model computes it, or in 8 or 4 bits

_MODULES = (Path(__file__).parent / "reuse" / "policies").glob("[!_]*.py")

POLICIES = ("none", "full", *sorted(path.stem for path in _MODULES))
"""No recompute, full prefill, and the modules of `kvrag.reuse.policies`, which import this one."""

DEFAULT_POLICY = "query"
DEFAULT_RATIO = 0.15  # CacheBlend's; see `BlendConfig.ratio`
DEFAULT_CONTEXT = 256  # tokens that a chunk is encoded with

ANSWER_SETTINGS = ("ratio", "margin", "policy", "controller", "edited_history", "deterministic")
"""Names of the settings that every answer can override."""

T = TypeVar("T")

_MAX_DEPTH = 100  # levels of JSON; llguidance reads 128
_TOO_DEEP = f"{{}} is nested deeper than {_MAX_DEPTH} levels: use a flatter one"
_EXTREME = 1e9  # logits can be multiplied or divided by it twice within float32
_FACTOR: dict[str, Any] = {"least": 1 / _EXTREME, "most": _EXTREME}
_SHARE = _FACTOR | {"most": 1}


def _require(condition: bool, message: str, *got: object) -> None:
    """Raise SettingError unless the condition holds; the message ends with what was given instead."""
    if not condition:
        raise SettingError(f"{message}, got {_shown(got[0])}" if got else message)


def _shown(value: object) -> str:
    try:
        return f"{value!r:.120}"
    except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
        return f"one of type {type(value).__name__} that is too large to show"


def check_number(name: str, value: Any, least: float = 0, most: float = math.inf, whole: bool = False) -> Any:
    """Return `value` as a Python number if it is one (a whole one) from `least` to `most`, else raise SettingError."""
    is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    is_number = is_number and (whole or abs(value) == math.inf or abs(value) <= sys.float_info.max)  # as a float
    kind, limits = "an integer" if whole else "a number", f"in [{least:g}, {most:g}]"
    limits = f"of at least {least:g}" if most == math.inf else limits
    _require(is_number and least <= value <= most, f"{name} must be {kind} {limits}", value)
    return int(value) if whole else float(value)


def check_choice(name: str, value: str, choices: Sequence[str]) -> str:
    """Return `value` if it is one of the choices, else raise SettingError."""
    if not (isinstance(value, str) and value in choices):  # an array can be equal to them in part
        raise SettingError(f"unknown {name} {_shown(value)}; choose one of {', '.join(choices)}")
    return value


def check_type(name: str, value: T, kind: Any, form: str) -> T:
    """Return `value` if it is of this kind, else raise SettingError; `form` says what it must be."""
    _require(isinstance(value, kind), f"{name} must be {form}", value)
    return value


def check_list(name: str, value: Iterable[T]) -> list[T]:
    """Return the items of an iterable, else raise SettingError, also for a string."""
    _require(not isinstance(value, str), f"{name} must be a list, not one string")
    try:
        return list(value)
    except TypeError:
        raise SettingError(f"{name} must be a list, not {_shown(value)}") from None


def option(default: Any, about: str = "", check: Callable[..., Any] = lambda name, value: value, **limits: Any) -> Any:
    """Declare an option: its default, what it is for in one line, and its check, called with the name and a value.

    Its type is the field's. None is accepted as well if it is the default. The limits are the check's, and metadata.
    """
    return field(default=default, metadata={"about": about, "check": partial(check, **limits), **limits})


def number(default: Any, about: str = "", **limits: Any) -> Any:
    """Declare an option that is a number; for the limits, see `check_number`."""
    return option(default, about, check_number, **limits)


def choice(default: str, choices: Sequence[str], about: str) -> Any:
    """Declare an option with these choices."""
    return option(default, about, check_choice, choices=choices)


def switch(about: str) -> Any:
    """Declare an option that is off."""
    return option(False, about, check_type, kind=bool, form="True or False")


def check_fields(settings: Any) -> None:
    """Check and convert the options of a dataclass that is being created."""
    for declared in fields(settings):
        value = getattr(settings, declared.name)
        if declared.metadata and not (value is None and declared.default is None):
            object.__setattr__(settings, declared.name, declared.metadata["check"](declared.name, value))


_FORMER = {"history": "edited_history"}
"""Former names of options, with the present ones: they work for one release."""


def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by their present names; warn of former ones."""
    present = dict(options)
    for former in _FORMER.keys() & present.keys():
        present[_FORMER[former]] = present.pop(former)
        message = f"the option {former} is now {_FORMER[former]}: the former name works in this release only"
        warnings.warn(message, FutureWarning, stacklevel=3)
    return present


def _check_temperature(name: str, value: Any) -> float:
    return float(check_number(name, value, most=_EXTREME) and check_number(name, value, **_FACTOR))


def check_budget(name: str, value: Any) -> int:
    """Return the number of bytes of a budget if it is one, else raise SettingError."""
    return int(check_number(name, value, least=1, most=(1 << 63) - 1024))


def without_password(url: str) -> str:
    """Return the URL of a store for messages and names: without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


def check_namespace(namespace: str) -> str:
    """Return `namespace` if it is a valid name, else raise SettingError. "" is the default namespace."""
    ok = isinstance(namespace, str) and len(namespace) <= 200 and (namespace.isprintable() or not namespace)
    _require(ok, "namespace must be a string of at most 200 printable characters", namespace)
    return namespace


def check_timeout(timeout: float | None) -> None:
    """Raise SettingError unless this is a positive number of seconds, or None."""
    ok = timeout is None or (isinstance(timeout, Real) and not isinstance(timeout, bool) and timeout > 0)
    ok = ok and (timeout is None or timeout == math.inf or timeout <= sys.float_info.max)
    _require(ok, "timeout must be a positive number of seconds", timeout)


class NamedText(NamedTuple):
    """A text with the names of its document and its source; "" = none."""

    text: str
    document: str
    source: str


def named_texts(
    texts: Iterable[str], document: str | Sequence[str] = "", sources: str | Sequence[str] | None = None
) -> list[NamedText]:
    """Return the arguments of `BlendEngine.warm`, text by text; raise SettingError if they do not fit together."""
    listed = check_list("texts", texts)
    for number, text in enumerate(listed):
        _require(isinstance(text, str), f"chunk {number} must be a string, got {type(text).__name__}")
    columns = []
    for names, kind in ((document, "document names"), (document if sources is None else sources, "sources")):
        column = [names] * len(listed) if isinstance(names, str) else check_list(kind, names)
        wrong = f"{len(column)} {kind} for {len(listed)} texts: give one per text, or a single string"
        _require(len(column) == len(listed), wrong)
        columns.append(column)
    check_names(*{name for column in columns for name in column}, *([document] if isinstance(document, str) else ()))
    return list(map(NamedText, listed, *columns))


def check_names(*names: str) -> None:
    """Raise SettingError unless all of them can name a document or a source."""
    for name in names:
        ok = isinstance(name, str) and not any("\ud800" <= letter <= "\udfff" for letter in name)
        _require(ok, "names of documents and sources must be strings of valid Unicode", name)


def check_text(text: str) -> None:
    """Raise PromptError unless this is a string that tokenizers read."""
    if not isinstance(text, str):
        raise PromptError(f"the text must be a string, got {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text has a lone surrogate at character {error.start}; "
            "clean it with text.encode('utf-8', 'replace').decode()"
        ) from None


@dataclass(frozen=True, slots=True)
class BlendConfig:
    """Recompute settings: how much of the stitched KV, and which tokens.

    Attributes:
        policy: One of `POLICIES`, see `kvrag.reuse.policies`.
        ratio: Share of the reused, inexact tokens to recompute; 0 = plain reuse, 1 = full prefill's logits.
            None = by the model's size and its answers so far: 0.3 to begin with from about a billion parameters on,
            and more once the model is unsure, see `margin` and `kvrag.control.plan`.
        margin: Without a ratio, the model counts as unsure of a token if the likeliest one is less than this many nats
            more likely than the next one, a third of it for the first token; more of the prompt is recomputed before
            it is emitted, in the end all. 0 = never, None = by the model's size and its answers so far; then all only
            where the first two shares were less than half.
        controller: "auto" = without a ratio, the engine chooses full prefill if it is predicted to be faster.
            "off" = always blend, at the given or default ratio. See `kvrag.control.plan`.
        min_run: Minimum length of a reused run, in tokens.
        edited_history: KV of earlier prompts and answers that is reused. "exact": as far as a prompt begins like one of
            them. "blend": also behind an edit of the history; it is recomputed in part, like chunks.
        deterministic: The same prompt and store give the same answer, whatever the load and the earlier prompts, on
            machines and thread counts alike: nothing depends on measured speed, no KV of earlier prompts and answers
            is reused, and the answer shares no decode step with others. Sampling also needs a seed.
        context_tokens: At ingestion, a chunk is encoded with this many preceding tokens of its document as context, or
            more where they are computed anyway, so that its KV resolves pronouns and references. 0 = every chunk is
            encoded alone: its KV, and every chunk that prompts reuse, depends on its own text only.
    """

    policy: str = choice(DEFAULT_POLICY, POLICIES, "which tokens to recompute; 'full' = ordinary prefill")
    ratio: float | None = number(None, "share of reused tokens to recompute, 0 to 1; default: by the model", most=1)
    margin: float | None = number(None, "nats by which a token must lead, else more is recomputed", most=_EXTREME)
    controller: str = choice("auto", ("auto", "off"), "'off' = always blend, at the given or default ratio")
    min_run: int = number(16, least=16, whole=True)  # guaranteed by the matcher
    edited_history: str = choice("exact", ("exact", "blend"), "'blend' = also reuse KV of earlier turns behind an edit")
    deterministic: bool = switch("the same answer at every load and after any prompts; slower")
    context_tokens: int = number(DEFAULT_CONTEXT, whole=True)
    history: InitVar[str | None] = None  # the former name of `edited_history`

    def __post_init__(self, history: str | None) -> None:
        if history is not None:
            object.__setattr__(self, "edited_history", renamed({"history": history})["edited_history"])
        check_fields(self)
        clash = 'deterministic=True reuses nothing of earlier prompts: leave edited_history at "exact"'
        _require(not self.deterministic or self.edited_history == "exact", clash)

    def overridden(self, options: Mapping[str, Any]) -> BlendConfig:
        """Return the config with those of an answer's options that are given; with a policy, always blend."""
        given = blend_of(options)
        return replace(self, **({"controller": "off"} if "policy" in given else {}) | given) if given else self

    @property
    def reuses_prompts(self) -> bool:
        """Whether KV of earlier prompts and answers is reused. Full prefill is the reference, so it is not."""
        return self.policy != "full" and not self.deterministic


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings. `None` = as in the model's own generation config, like `model.generate`.

    Attributes:
        max_new_tokens: Maximum length of the answer.
        temperature: 0 = greedy.
        top_p, top_k, min_p, repetition_penalty: As in transformers' GenerationConfig.
        frequency_penalty, presence_penalty: Subtracted from the logits of tokens that the answer contains, per
            occurrence or once, as by OpenAI; in [-2, 2].
        logit_bias: Numbers in [-100, 100] that are added to the logits, by token id.
        logprobs: Report the log probability of every token, and this many of the likeliest tokens (0 to 20).
        seed: Makes sampling repeatable.
        stop: The answer ends before the first of these strings, independent of token boundaries.
    """

    max_new_tokens: int = number(256, "maximum length of an answer, in tokens", least=1, whole=True)
    temperature: float | None = option(None, "0 = greedy; default: the model's generation config", _check_temperature)
    top_p: float | None = number(None, "sample from the likeliest tokens that add up to this probability", **_SHARE)
    top_k: int | None = number(None, "sample from this many of the likeliest tokens", whole=True)
    min_p: float | None = number(None, "sample from tokens with this share of the likeliest one's probability", most=1)
    repetition_penalty: float | None = number(None, "above 1 makes tokens that occurred before less likely", **_FACTOR)
    frequency_penalty: float | None = number(None, "subtracted from a token's logit per occurrence", least=-2, most=2)
    presence_penalty: float | None = number(None, "subtracted from the logit of used tokens", least=-2, most=2)
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = number(None, most=20, whole=True)
    seed: int | None = number(None, "makes sampling repeatable", most=(1 << 64) - 1, whole=True)
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        _require(isinstance(self.logit_bias, Mapping | None), "logit_bias must be a dict", self.logit_bias)
        for token, value in (self.logit_bias or {}).items():
            check_number("a token id of logit_bias", token, whole=True)
            check_number(f"logit_bias of token {token}", value, -100, 100)
        ok = isinstance(self.stop, Sequence | Set) and not isinstance(self.stop, str | bytes)
        _require(ok, "stop must be a sequence of strings, not one string", self.stop)
        _require(all(isinstance(s, str) and s for s in self.stop), "stop strings must not be empty", self.stop)
        object.__setattr__(self, "stop", tuple(self.stop))


class EngineOptions(TypedDict, total=False):
    """Options of `BlendEngine`, besides its model, store and config.

    Attributes:
        ram_bytes: Size of the RAM tier in front of the store; 0 = no RAM tier.
        codec: Codec of stored chunks: "native" = as computed, "int8" and "int4" = half and less than a third of the
            bytes; with these, no reused KV is exact.
        conversation_bytes: Maximum size of the KV of recent conversations, kept on the model's device for their next
            turns; 0 = none.
        batch_bytes: Maximum size of the KV of all answers in progress, each counted at its full length: an answer that
            would exceed it waits.
        store_cache: Folder of the local copies of a shared store; None = `~/.cache/kvrag/shared`.
        device_bytes: Size of a tier of unpacked KV on the model's device, in front of the RAM tier, for chunks that are
            used repeatedly; 0 = none. None = on GPUs, half of what the model, `conversation_bytes` and `batch_bytes`
            leave free, at most 16 GiB. It shrinks where memory runs out.
        learn: Encode texts that two prompts of a namespace contain, while no answer is in progress: paragraphs, and
            messages of tools, of at least 64 tokens. See `BlendEngine.forget_learned`.
        check: Share of the greedy answers, after a namespace's first ones, that are compared with full prefill while no
            answer is in progress; 0 = none.
    """

    ram_bytes: Annotated[int, number(2 << 30, "stored KV kept in RAM", whole=True)]
    codec: Annotated[str, choice("native", CODECS, "codec of stored chunks: native precision, 8 or 4 bits")]
    conversation_bytes: Annotated[int, number(1 << 30, "KV of recent conversations, for their next turns", whole=True)]
    batch_bytes: Annotated[int, number(4 << 30, "KV of the answers in progress", whole=True)]
    store_cache: Annotated[
        str | Path | None, option(None, "local copies of a shared store; default: ~/.cache/kvrag/shared")
    ]
    device_bytes: Annotated[
        int | None, number(None, "stored KV kept on the GPU; default: half of what is free, at most 16 GiB", whole=True)
    ]
    learn: Annotated[bool, switch("when idle, encode texts that two prompts of a namespace contain")]
    check: Annotated[float, number(0.05, "share of answers to compare with full prefill when idle; 0 = none", most=1)]


class ModelOptions(TypedDict, total=False):
    """Options of `Model.from_pretrained`, described there."""

    dtype: Annotated[str | Any, option("auto", "dtype to compute in; auto = dtype of the stored weights")]
    device: Annotated[str | None, option(None, "cuda, cpu, ...; default: a GPU if there is one")]
    device_map: Annotated[str | dict[str, Any] | None, option(None, "splits a model over GPUs")]
    revision: Annotated[str | None, option(None, "branch, tag or commit of the model on the hub")]
    attn_implementation: Annotated[str | None, option(None, "transformers' attn_implementation")]
    trust_remote_code: Annotated[bool, switch("run the Python code that a model repository ships")]
    allow_unverified: Annotated[bool, switch("")]
    preamble: Annotated[bool, option(True, check=check_type, kind=bool, form="True or False")]
    quantization: Annotated[
        str | None,
        option(None, "int8 = weights in 8 bits: faster on CPUs", check_choice, choices=("int8",)),
    ]
    store_states: Annotated[bool, switch("of models that keep states (hybrids), store those at each chunk's end")]
    n_ctx: Annotated[int | None, number(None, "window of a GGUF model; default: 2 GiB of KV", least=64, whole=True)]
    kv_type: Annotated[str, choice("f16", ("f16", "q8_0"), "KV in memory of a GGUF model: 16 or 8 bits")]
    n_threads: Annotated[
        int | None, number(None, "threads of a GGUF model; default: all cores", least=1, most=512, whole=True)
    ]
    n_gpu_layers: Annotated[int | None, number(None, "layers of a GGUF model on a GPU; default: all", whole=True)]


OF_GGUF = ("n_ctx", "kv_type", "n_threads", "n_gpu_layers")
"""Names of the options that are for GGUF files alone."""


@cache
def declared(table: Any) -> dict[str, Any]:
    """Return the options of a TypedDict by name, as fields that have their default and metadata."""
    return {name: kind.__metadata__[0] for name, kind in get_type_hints(table, include_extras=True).items()}


DECLARED: dict[str, Any] = {row.name: row for table in (Sampling, BlendConfig) for row in fields(table)}
DECLARED |= declared(EngineOptions) | declared(ModelOptions)
"""All options by name: the one place that has their defaults, checks and descriptions."""


def check_option(name: str, value: Any) -> Any:
    """Return the value of an option as its declaration accepts it, else raise SettingError."""
    row = DECLARED[name]
    return None if value is None and row.default is None else row.metadata["check"](name, value)


def checked(function: str, table: type[T], options: Mapping[str, Any]) -> T:
    """Return the options of a TypedDict, with the defaults of those not given; raise SettingError if one is wrong."""
    defaults = {name: row.default for name, row in declared(cast(Any, table)).items()}
    given = _filled(function, defaults, options)
    return cast(T, {name: check_option(name, value) for name, value in given.items()})


@dataclass(frozen=True, slots=True)
class Grammar:
    """Format of an answer: exactly one of the three. Needs the extra `kvrag[grammar]`.

    An answer that reaches `max_new_tokens` is still cut off; its `finish_reason` is then "length".

    Attributes:
        json_schema: A JSON schema; `{"type": "object"}` = any object. Unnamed properties are not generated. Keywords
            that grammars cannot enforce, such as `uniqueItems`, are named in the report's notes.
        regex: A regular expression for the whole answer, in Rust's syntax (no look-around, no back-references).
        lark: A context-free grammar in Lark's syntax, or in the EBNF of llama.cpp (GBNF).
    """

    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None
    lark: str | None = None

    def __post_init__(self) -> None:
        formats = [name for name in ("json_schema", "regex", "lark") if getattr(self, name) is not None]
        _require(len(formats) == 1, f"a grammar needs json_schema, regex or lark, got {', '.join(formats) or 'none'}")
        for name, text in (("regex", self.regex), ("lark", self.lark)):
            _require(isinstance(text, str | None), f"{name} must be a string", text)
        if self.json_schema is not None:
            _require(isinstance(self.json_schema, Mapping), "json_schema must be a dict", self.json_schema)
            check_json("json_schema", self.json_schema)

    @classmethod
    def of_response_format(cls, response_format: Mapping[str, Any]) -> Grammar | None:
        """Return the grammar for OpenAI's `response_format`; None for `{"type": "text"}`; raises SettingError."""
        kind = response_format.get("type") if isinstance(response_format, Mapping) else None
        if kind == "text":
            return None
        if kind == "json_object":
            return cls(json_schema={"type": "object"})
        wrapper = response_format.get("json_schema") if kind == "json_schema" else None
        schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
        _require(
            schema is not None,
            'response_format must be {"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"schema": ...}}',
            response_format,
        )
        return cls(json_schema=schema)


def check_json(name: str, value: object) -> None:
    """Raise SettingError unless `value` can be serialised as JSON and is not nested too deeply."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise SettingError(f"{name} is not JSON: {error}") from None
    except RecursionError:
        raise SettingError(_TOO_DEEP.format(name)) from None
    check_depth(name, value)


def check_depth(name: str, value: object) -> None:
    """Raise SettingError if a JSON value is nested too deeply for recursive code."""
    level: list[Any] = [[value]]
    for _ in range(_MAX_DEPTH + 1):
        parts = chain.from_iterable(outer.values() if isinstance(outer, dict) else outer for outer in level)
        if not (level := [part for part in parts if isinstance(part, dict | list | tuple)]):
            return
    raise SettingError(_TOO_DEEP.format(name))


class WarmOptions(TypedDict, total=False):
    """Options of `BlendEngine.awarm`, described in `BlendEngine.warm`."""

    document: str | Sequence[str]
    sources: str | Sequence[str] | None
    namespace: str
    skip_invalid: bool


class AnswerOptions(TypedDict, total=False):
    """Options of an answer, described in `BlendEngine.stream`."""

    documents: Sequence[str] | None
    namespace: str
    ratio: float | None
    margin: float | None
    policy: str | None
    controller: str | None
    edited_history: str | None
    deterministic: bool | None
    stop: Sequence[str]
    tools: Sequence[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None
    grammar: Grammar | None
    template: dict[str, Any] | None
    reasoning: bool | None
    max_new_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    seed: int | None
    timeout: float | None


class LoadingOptions(EngineOptions, ModelOptions):
    """Options of `BlendEngine.from_pretrained`, besides the store and the config."""


ANSWER_DEFAULTS: dict[str, Any] = dict.fromkeys(AnswerOptions.__annotations__) | {"namespace": ""}
ANSWER_DEFAULTS |= {row.name: row.default for row in fields(Sampling)}
_ANSWER_TYPES: dict[str, tuple[Any, str]] = {
    "tools": (list | tuple, "a list of dicts"),
    "tool_choice": (str | Mapping, "a name or a dict"),
    "grammar": (Grammar, "a Grammar"),
    "template": (Mapping, "a dict"),
    "reasoning": (bool, "True, False or None"),
    "parallel_tool_calls": (bool, "True, False or None"),
}


def checked_answer(
    options: Mapping[str, Any], config: BlendConfig = BlendConfig()
) -> tuple[dict[str, Any], BlendConfig, Sampling]:
    """Return the options of an answer with the defaults of those not given, and the settings that follow from them.

    Raises SettingError if one is unknown or wrong.
    """
    given = _filled("an answer", ANSWER_DEFAULTS, options)
    check_timeout(given["timeout"])
    check_namespace(given["namespace"])
    for name, (kind, form) in _ANSWER_TYPES.items():
        check_type(name, given[name], kind | None, form)
    documents = () if given["documents"] is None else check_list("documents", given["documents"])
    given["documents"] = [row.text for row in named_texts(documents)]
    return given, config.overridden(given), Sampling(**{row.name: given[row.name] for row in fields(Sampling)})


def blend_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options of an answer that are a BlendConfig's, and are given."""
    return {name: options[name] for name in ANSWER_SETTINGS if options.get(name) is not None}


def _filled(function: str, defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the defaults of those not given; raise SettingError for an unknown name."""
    given = renamed(options)
    for name in given:
        if name not in defaults:
            raise SettingError(f"{function} got an unknown option {name!r}: it accepts {', '.join(defaults)}")
    return {**defaults, **given}
