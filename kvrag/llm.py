"""What the framework classes have in common, so that an adapter only translates: their settings and their engine."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from kvrag.backend.transformers.loading import context_window, load_config, load_tokenizer
from kvrag.config import Grammar, Sampling, check_codec, check_controller, check_policy, check_ratio
from kvrag.engine import BlendEngine
from kvrag.errors import KvragError, SettingError

_ABOUT_THE_ENGINE = (
    *("model", "store", "codec", "dtype", "device", "device_map"),
    *("revision", "attn_implementation", "trust_remote_code"),
)
_ABOUT_ANSWERS = (
    *("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed"),
    *("stop", "ratio", "policy", "controller"),
)
_ONLY_PER_CALL = ("documents", "tools", "tool_choice", "grammar", "response_format", "template")


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMSettings:
    """Settings of a framework's LLM class; every such class has attributes of these names.

    Attributes:
        engine: One already built; excludes what is said about the model.
        model, store, codec, dtype, device, device_map, revision, attn_implementation, trust_remote_code: As
            `BlendEngine.from_pretrained` takes them.
        max_tokens, temperature, top_p, top_k, repetition_penalty, seed, stop, ratio, policy, controller: For every
            answer, as `BlendEngine.stream` takes them; `max_tokens` is its `max_new_tokens`.
    """

    engine: BlendEngine | None = None
    model: str | None = None
    store: str | None = None
    codec: str = "native"
    dtype: str = "auto"
    device: str | None = None
    device_map: str | dict[str, Any] | None = None
    revision: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    max_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Sequence[str] | None = None
    ratio: float | None = None
    policy: str | None = None
    controller: str | None = None

    def __post_init__(self) -> None:
        if self.engine is None and self.model is None:
            raise SettingError("no model: give model=, a hub name or a folder, or engine=, one already built")
        if self.engine is not None and self._engine_settings():
            names = ", ".join(f"{name}=" for name in self._engine_settings())
            raise SettingError(f"engine= has its model and store already: leave out {names}")
        check_codec(self.codec)
        self.request()

    @classmethod
    def of(cls, llm: object) -> LLMSettings:
        """Read them from an object's attributes.

        Raises:
            SettingError: One is out of range, or both or neither of model and engine are given.
        """
        return cls(**{field.name: getattr(llm, field.name) for field in fields(cls)})

    @staticmethod
    def plain(value: Any) -> Any:
        """A folder or a dtype as the string that means the same, so that settings can be serialised; else unchanged."""
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    def _engine_settings(self) -> dict[str, Any]:
        # only what differs from the defaults, so that BlendEngine.shared finds what was opened without naming them
        defaults = {field.name: field.default for field in fields(self)}
        given = {name: getattr(self, name) for name in _ABOUT_THE_ENGINE}
        return {name: value for name, value in given.items() if value != defaults[name]}

    def request(self, **call: Any) -> dict[str, Any]:
        """Arguments of `BlendEngine.stream` for one call.

        Args:
            call: What this call wants otherwise, None meaning the same; `stop` is added to that of the settings.
                `documents`, `tools`, `tool_choice`, `grammar` and `template` can be given here only, and OpenAI's
                `response_format`, which becomes a grammar.

        Raises:
            SettingError: Out of range, or an unknown name.
        """
        known = (*_ABOUT_ANSWERS, *_ONLY_PER_CALL)
        if unknown := [name for name in call if name not in known]:
            raise SettingError(f"unknown setting {', '.join(unknown)}; a call takes {', '.join(known)}")
        if not isinstance(call.get("stop"), list | tuple | None):
            raise SettingError(f"stop must be a list of strings, got {call['stop']!r}")
        request = {name: getattr(self, name) for name in _ABOUT_ANSWERS}
        request |= {name: value for name, value in call.items() if value is not None}
        request["stop"] = tuple(dict.fromkeys([*(self.stop or ()), *(call.get("stop") or ())]))
        request["max_new_tokens"] = request.pop("max_tokens")
        if response_format := request.pop("response_format", None):
            if "grammar" in request:
                raise SettingError("response_format and grammar exclude each other: leave out one of them")
            request["grammar"] = Grammar.of_response_format(response_format)
        Sampling(**{field.name: request[field.name] for field in fields(Sampling)})
        if request["ratio"] is not None:
            check_ratio(request["ratio"])
        if request["policy"] is not None:
            check_policy(request["policy"])
        if request["controller"] is not None:
            check_controller(request["controller"])
        return request

    @property
    def model_name(self) -> str:
        """Name of the model, which need not be loaded."""
        return self.engine.model.name if self.engine is not None else str(self.model)

    def window(self) -> tuple[int, bool]:
        """How many tokens the model can see, and whether it takes messages; its weights are left where they are."""
        if self.engine is None:
            return _window(str(self.model), self.revision, self.trust_remote_code)
        return self.engine.model.context_window, self.engine.model.tokenizer.has_chat_template

    def window_on_disk(self) -> int | None:
        """How many tokens the model can see; None if its configuration would have to be downloaded, or cannot be read.

        For what is told when an object is made.
        """
        if self.engine is not None:
            return self.engine.model.context_window
        try:
            return _window_on_disk(str(self.model), self.revision, self.trust_remote_code)
        except KvragError:
            return None

    def identity(self) -> dict[str, Any]:
        """Everything that changes an answer, in plain types: what a cache of answers must be keyed by."""
        names = [name for name in (*_ABOUT_THE_ENGINE, *_ABOUT_ANSWERS) if name != "model"]
        identity = {"model_name": self.model_name} | {name: getattr(self, name) for name in names}
        if self.engine is not None:
            identity["engine"] = {"model": self.engine.fingerprint.digest, **asdict(self.engine.config)}
        return identity


@functools.lru_cache(maxsize=64)
def _window(name: str, revision: str | None, trust_remote_code: bool) -> tuple[int, bool]:
    config = load_config(name, revision, trust_remote_code)
    tokenizer = load_tokenizer(name, revision, trust_remote_code)
    return context_window(config.get_text_config()), tokenizer.chat_template is not None


@functools.lru_cache(maxsize=64)
def _window_on_disk(name: str, revision: str | None, trust_remote_code: bool) -> int:
    config = load_config(name, revision, trust_remote_code, local_files_only=True)
    return context_window(config.get_text_config())


class LazyEngine:
    """Opens the engine of some settings when it is needed, and keeps it alive.

    For an attribute of a framework's LLM class: copies of the object arrive at the same engine, pickles leave it out.
    """

    def __init__(self) -> None:
        self._engines: dict[str, BlendEngine] = {}  # a call can name another model

    def open(self, settings: LLMSettings) -> BlendEngine:
        """The engine given, or the one shared by all that have equal settings."""
        if settings.engine is not None:
            return settings.engine
        # asked every time: the object's fields may have changed, and the engine may have been closed
        known = settings._engine_settings()
        engine = self._engines[settings.model_name] = BlendEngine.shared(known.pop("model"), **known)
        return engine

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LazyEngine)  # two objects do not differ by having answered

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[LazyEngine], tuple[()]]:
        return (LazyEngine, ())
