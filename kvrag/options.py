"""Options that functions take as keywords: for type checkers, in signatures, and with their defaults.

A type checker reads a TypedDict only as it is written. So the types are here a second time, and a test compares them
with the declarations in `kvrag.config`; defaults and checks are there alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from kvrag.config import EngineOptions, Grammar, ModelOptions, Sampling
from kvrag.errors import SettingError

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])


class AnswerOptions(TypedDict, total=False):
    """Options of an answer, described in `BlendEngine.stream`."""

    documents: Sequence[str] | None
    namespace: str
    ratio: float | None
    margin: float | None
    policy: str | None
    controller: str | None
    history: str | None
    deterministic: bool | None
    stop: Sequence[str]
    tools: Sequence[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
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


class EngineKeywords(TypedDict, total=False):
    """Options of `BlendEngine`, described in `EngineOptions`."""

    ram_bytes: int
    codec: str
    conversation_bytes: int
    batch_bytes: int
    store_cache: str | Path | None
    device_bytes: int
    learn: bool
    check: float
    complete: str


class LoadOptions(TypedDict, total=False):
    """Options of `Model.from_pretrained`, described there."""

    dtype: str | torch.dtype
    device: str | None
    device_map: str | dict[str, Any] | None
    revision: str | None
    attn_implementation: str | None
    trust_remote_code: bool
    allow_unverified: bool
    preamble: bool
    compile_decode: bool
    adapter: str | Path | None


class LoadingOptions(EngineKeywords, LoadOptions):
    """Options of `BlendEngine.from_pretrained`, besides the store and the config."""


def _defaults(table: type) -> dict[str, Any]:
    return {row.name: row.default for row in fields(table)}


ENGINE_DEFAULTS, LOAD_DEFAULTS = _defaults(EngineOptions), _defaults(ModelOptions)
ANSWER_DEFAULTS = dict.fromkeys(AnswerOptions.__annotations__) | {"namespace": ""} | _defaults(Sampling)


def show_options(table: type, defaults: Mapping[str, Any]) -> Callable[[F], F]:
    """Show the names of `**options: Unpack[table]` in a function's signature.

    Type checkers and editors read the TypedDict; `help`, notebooks and Sphinx only read the signature.
    """

    def decorate(function: F) -> F:
        signature, keyword = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
        parameters = [named for named in signature.parameters.values() if named.kind is not named.VAR_KEYWORD]
        for name, kind in table.__annotations__.items():
            kind = getattr(kind, "__forward_arg__", kind)
            parameters.append(inspect.Parameter(name, keyword, default=defaults[name], annotation=kind))
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


def fill_options(function: str, defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the defaults of those not given; raise SettingError for an unknown name."""
    for name in options:
        if name not in defaults:
            raise SettingError(f"{function} got an unknown option {name!r}: it accepts {', '.join(defaults)}")
    return {**defaults, **options}
