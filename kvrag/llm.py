"""What the frameworks' LLM classes share: their settings, the engine behind them, and the methods no framework has.

The settings are one table, `EngineSettings` and `AnswerSettings`. The adapters' pydantic classes inherit from it, which
makes every row a validated field that editors and type checkers know, and the command line makes its options of it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_type_hints

from kvrag.config import (
    CODECS,
    CONTROLLERS,
    POLICIES,
    Grammar,
    Sampling,
    check_codec,
    check_controller,
    check_namespace,
    check_policy,
    check_ratio,
)
from kvrag.errors import KvragError, SettingError

if TYPE_CHECKING:  # the command line reads the table, and torch takes seconds to import
    from kvrag.engine import BlendEngine
    from kvrag.inspect.explanation import Explanation
    from kvrag.types import BlendReport, Messages, WarmReport

T = TypeVar("T")

_ONLY_PER_CALL = ("documents", "tools", "tool_choice", "grammar", "response_format", "template")


def _row(default: T, about: str, choices: Sequence[str] = ()) -> T:
    """Return a dataclass field, typed as its default so that type checkers see an ordinary class attribute."""
    made: Any = field(default=default, metadata={"about": about, "choices": tuple(choices)})
    return made


@dataclass(kw_only=True)
class EngineSettings:
    """The settings that choose a model and a store, as `BlendEngine.from_pretrained` takes them."""

    model: str | None = _row(None, "hub name, folder, or 'reader' for the small model that comes with kvrag")
    store: str | None = _row(None, "folder of the pre-encoded chunks; by default one per model in ~/.cache/kvrag")
    codec: str = _row("native", "how chunks are stored: as they are, or in 8 or 4 bits", CODECS)
    dtype: str = _row("auto", "precision to compute in; auto = as the weights are stored")
    device: str | None = _row(None, "cuda, cpu, ...; by default a GPU if there is one")
    device_map: str | dict[str, Any] | None = _row(None, "to split a model over GPUs")  # noqa: RUF009
    revision: str | None = _row(None, "branch, tag or commit of the model on the hub")
    attn_implementation: str | None = _row(None, "transformers' attn_implementation")
    trust_remote_code: bool = _row(False, "run the Python code that a model repository ships")


@dataclass(kw_only=True)
class AnswerSettings:
    """The settings of answers, as `BlendEngine.stream` takes them; every call can override them."""

    max_tokens: int = _row(256, "longest answer, in tokens")
    temperature: float | None = _row(None, "0 = greedy; by default as the model's generation config says")
    top_p: float | None = _row(None, "sample from the likeliest tokens that add up to this probability")
    top_k: int | None = _row(None, "sample from this many of the likeliest tokens")
    repetition_penalty: float | None = _row(None, "above 1 makes tokens that occurred before less likely")
    seed: int | None = _row(None, "makes sampling repeatable")
    stop: list[str] | None = _row(None, "the answer ends before these; a call's are added")  # noqa: RUF009
    ratio: float | None = _row(None, "share of the reused tokens to recompute, 0 to 1; by default as calibrated")
    policy: str | None = _row(None, "which tokens to recompute; 'full' = ordinary prefill", POLICIES)
    controller: str | None = _row(None, "'off' = no full prefill where that is predicted to be faster", CONTROLLERS)
    namespace: str = _row("", "reuse chunks and conversations of this namespace only")


class Setting(NamedTuple):
    """A row of the table. `kind` is the type of a value that is not None; no `choices` = any."""

    name: str
    kind: Any
    default: Any
    about: str
    choices: tuple[str, ...]


def _rows(table: type) -> Iterator[Setting]:
    types = get_type_hints(table)
    for row in fields(table):
        kind = next(kind for kind in get_args(types[row.name]) or (types[row.name],) if kind is not type(None))
        yield Setting(row.name, kind, row.default, row.metadata["about"], row.metadata["choices"])


_ENGINE = {row.name: row for row in _rows(EngineSettings)}
_ANSWER = {row.name: row for row in _rows(AnswerSettings)}
SETTINGS = _ENGINE | _ANSWER
"""All rows by name."""


@dataclass(kw_only=True)
class LLMSettings(EngineSettings, AnswerSettings):
    """The settings of one LLM object, checked.

    Attributes:
        engine: An engine already built; excludes the settings that choose a model and a store.
    """

    engine: BlendEngine | None = None

    def __post_init__(self) -> None:
        if self.engine is None and self.model is None:
            raise SettingError("no model: give model=, a hub name or a folder, or engine=, an engine already built")
        if self.engine is not None and self.engine_settings():
            names = ", ".join(f"{name}=" for name in self.engine_settings())
            raise SettingError(f"engine= has its model and store already: leave out {names}")
        check_codec(self.codec)
        self.request()

    @classmethod
    def of(cls, llm: object) -> LLMSettings:
        """Read the settings from an object's attributes.

        Raises:
            SettingError: One is out of range, or both or neither of model and engine are given.
        """
        return cls(**{row.name: getattr(llm, row.name) for row in fields(cls)})

    @staticmethod
    def plain(value: Any) -> Any:
        """Return a folder or a dtype as a string, so that settings can be serialised; anything else unchanged."""
        import torch

        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    def engine_settings(self) -> dict[str, Any]:
        """Return the engine's settings that differ from the defaults, so that equal engines have equal settings."""
        given = {name: getattr(self, name) for name in _ENGINE}
        return {name: value for name, value in given.items() if value != _ENGINE[name].default}

    def request(self, **call: Any) -> dict[str, Any]:
        """Return the arguments of `BlendEngine.stream` for one call.

        Args:
            call: Overrides for this call; None keeps the setting, and `stop` is added to it. `documents`, `tools`,
                `tool_choice`, `grammar` and `template` can be given here only, and so can OpenAI's `response_format`,
                which becomes a grammar.

        Raises:
            SettingError: A value is out of range, or a name is unknown.
        """
        if unknown := [name for name in call if name not in (*_ANSWER, *_ONLY_PER_CALL)]:
            known = ", ".join((*_ANSWER, *_ONLY_PER_CALL))
            raise SettingError(f"unknown setting {', '.join(unknown)}; a call takes {known}")
        if not isinstance(call.get("stop"), list | tuple | None):
            raise SettingError(f"stop must be a list of strings, got {call['stop']!r}")
        request = {name: getattr(self, name) for name in _ANSWER}
        request |= {name: value for name, value in call.items() if value is not None}
        request["stop"] = tuple(dict.fromkeys([*(self.stop or ()), *(call.get("stop") or ())]))
        request["max_new_tokens"] = request.pop("max_tokens")
        if response_format := request.pop("response_format", None):
            if "grammar" in request:
                raise SettingError("response_format and grammar exclude each other: leave out one of them")
            request["grammar"] = Grammar.of_response_format(response_format)
        Sampling(**{row.name: request[row.name] for row in fields(Sampling)})
        check_namespace(request["namespace"])
        for name, check in (("ratio", check_ratio), ("policy", check_policy), ("controller", check_controller)):
            if request[name] is not None:
                check(request[name])
        return request

    @property
    def model_name(self) -> str:
        """Name of the model; loads nothing."""
        return self.engine.model.name if self.engine is not None else str(self.model)

    def window(self) -> tuple[int, bool]:
        """Return the context window in tokens, and whether the model has a chat template; loads no weights."""
        if self.engine is None:
            return _window(str(self.model), self.revision, self.trust_remote_code)
        return self.engine.model.context_window, self.engine.model.tokenizer.has_chat_template

    def window_on_disk(self) -> int | None:
        """Return the context window, or None if the model's configuration is not on this machine or cannot be read."""
        if self.engine is not None:
            return self.engine.model.context_window
        try:
            return _window_on_disk(str(self.model), self.revision, self.trust_remote_code)
        except KvragError:
            return None

    def identity(self) -> dict[str, Any]:
        """Return everything that changes an answer, in plain types: the key for a cache of answers."""
        identity = {name: getattr(self, name) for name in SETTINGS if name != "model"}
        identity["model_name"] = self.model_name
        if self.engine is not None:
            identity["engine"] = {"model": self.engine.fingerprint.digest, **asdict(self.engine.config)}
        return identity


@functools.lru_cache(maxsize=64)
def _window(name: str, revision: str | None, trust_remote_code: bool) -> tuple[int, bool]:
    from kvrag.backend.transformers.loading import context_window, load_config, load_tokenizer

    config = load_config(name, revision, trust_remote_code)
    tokenizer = load_tokenizer(name, revision, trust_remote_code)
    return context_window(config.get_text_config()), tokenizer.chat_template is not None


@functools.lru_cache(maxsize=64)
def _window_on_disk(name: str, revision: str | None, trust_remote_code: bool) -> int:
    from kvrag.backend.transformers.loading import context_window, load_config

    config = load_config(name, revision, trust_remote_code, local_files_only=True)
    return context_window(config.get_text_config())


class LazyEngine:
    """Opens the engine of some settings when it is first needed, and keeps it alive.

    For an attribute of a framework's LLM class: copies of the object open the same engine, pickles leave it out.
    """

    def __init__(self) -> None:
        self._engines: dict[str, BlendEngine] = {}  # a call can name another model

    def open(self, settings: LLMSettings) -> BlendEngine:
        """Return the engine given, or the one shared by all objects with equal settings."""
        from kvrag.engine import BlendEngine

        if settings.engine is not None:
            return settings.engine
        # looked up every time: the object's fields may have changed, and the engine may have been closed
        known = settings.engine_settings()
        engine = self._engines[settings.model_name] = BlendEngine.shared(known.pop("model"), **known)
        return engine

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LazyEngine)  # having answered makes no difference between two objects

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[LazyEngine], tuple[()]]:
        return (LazyEngine, ())


class LLMBase(EngineSettings, AnswerSettings):
    """Base of the frameworks' LLM classes: the settings as fields, and the methods that all of them have.

    A pydantic class inherits from its framework's class first and from this one second. It declares `engine` and
    implements `_open`, `_text` and `_source`.
    """

    def _open(self) -> BlendEngine:
        raise NotImplementedError

    @staticmethod
    def _text(chunk: Any) -> Any:
        """Return the text that a prompt will have of a framework's document; anything else unchanged."""
        raise NotImplementedError

    @staticmethod
    def _source(chunk: Any) -> str:
        """Return the name of the source that a framework's document is a piece of; "" = unknown."""
        raise NotImplementedError

    def _texts(self, chunks: Any) -> Any:
        """Return the texts of a list of documents; anything but a list is left to the engine to reject."""
        return [self._text(chunk) for chunk in chunks] if isinstance(chunks, (list, tuple)) else chunks

    def _in(self, namespace: str | None) -> str:
        return self.namespace if namespace is None else namespace

    def warm(
        self,
        texts: Iterable[Any],
        *,
        document: str | Sequence[str] = "",
        sources: str | Sequence[str] | None = None,
        namespace: str | None = None,
    ) -> WarmReport:
        """Encode every chunk that the store lacks; see `BlendEngine.warm`.

        Args:
            texts: The framework's documents or nodes, or their texts as prompts will have them, in reading order.
            document: Name of the document that holds them.
            sources: Names of the sources they are pieces of; None = those that the documents or nodes name themselves.
            namespace: Where the chunks are visible; None = this object's namespace.
        """
        if isinstance(texts, str):
            raise SettingError("texts must be a list of chunks, not one string")
        chunks = list(texts)
        if sources is None and any(self._source(chunk) for chunk in chunks):
            sources = [self._source(chunk) for chunk in chunks]
        namespace = self._in(namespace)
        return self._open().warm(self._texts(chunks), document=document, sources=sources, namespace=namespace)

    def forget(self, document: str, *, namespace: str | None = None) -> int:
        """Drop a document's chunks unless another document has them; see `BlendEngine.forget`."""
        return self._open().forget(document, namespace=self._in(namespace))

    def documents(self, prefix: str = "", *, namespace: str | None = None) -> list[str]:
        """Return the names of the documents that begin so and have chunks, sorted."""
        return self._open().documents(prefix, namespace=self._in(namespace))

    def explain(
        self,
        prompt: str | Messages | BlendReport | dict[str, Any] | None = None,
        *,
        retrieved: Sequence[Any] | None = None,
        namespace: str | None = None,
    ) -> Explanation:
        """Explain what was reused of a prompt, and why not more; see `BlendEngine.explain`.

        Args:
            prompt: None = the prompt answered last in the namespace. Else a text, messages as dicts with `role` and
                `content`, or the report of an earlier answer. Give the report where several callers share an engine.
            retrieved: What the retriever returned for it: documents, nodes, or their texts.
            namespace: None = this object's namespace.
        """
        engine = self._open()
        if isinstance(prompt, str):
            prompt = engine.model.tokenizer.as_prompt(prompt)
        return engine.explain(
            prompt,
            retrieved=self._texts(retrieved),
            namespace=self._in(namespace),
            ratio=self.ratio,
            policy=self.policy,
            controller=self.controller,
        )
