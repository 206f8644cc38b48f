"""Shared fields of the LangChain classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Self
from urllib.parse import quote

from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseLanguageModel
from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, field_validator, model_validator

from kvrag import BlendEngine, BlendReport, ContextWindowError, LazyEngine, LLMBase, LLMSettings, RemoteEngine

_VERSION = version("langchain-kvrag")


class PromptOverflowError(ContextWindowError, ContextOverflowError):
    """A prompt that does not fit into the model's window; LangChain's middleware can handle this error."""


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Raise errors that LangChain has a class for as that class."""
    try:
        yield
    except ContextWindowError as error:
        raise PromptOverflowError(str(error)) from error


def usage(report: BlendReport, num_tokens: int) -> UsageMetadata:
    """Return the usage of an answer of `num_tokens` tokens."""
    return UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=num_tokens,
        total_tokens=report.prompt_tokens + num_tokens,
        input_token_details=InputTokenDetails(
            cache_read=report.reused_tokens - report.created_tokens, cache_creation=report.created_tokens
        ),
    )


def source_name(document: Document | str, collection: str = "default") -> str:
    """Return the source in a document's metadata, as written by LangChain's loaders; "" = unknown."""
    source = document.metadata.get("source") if isinstance(document, Document) else None
    return "" if source is None else f"langchain/{quote(collection, safe='')}/{source}"


class BlendSettings(BaseLanguageModel[Any], LLMBase):
    """An engine, or a model and a store to create one, and the settings of its answers.

    The settings are the fields of `kvrag.LLMSettings`. Creating an object is cheap: the model is loaded on the first
    answer and shared by all objects with equal settings.

    Attributes:
        engine: An existing engine, instead of the settings that select a model and a store.
        timeout: Seconds until an answer fails, also per call: with an `AnswerTimeoutError`, which is a TimeoutError, or
            a `ServerError` from the server in `base_url`. A local model checks it after every token.
        max_retries, api_key: Of the server in `base_url`; without effect on a local model. Without an `api_key`, the
            environment variable KVRAG_API_KEY is used.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    engine: BlendEngine | None = Field(default=None, exclude=True, repr=False)

    timeout: float | None = Field(default=None, exclude=True)
    max_retries: int | None = Field(default=None, exclude=True)
    api_key: SecretStr | None = Field(default=None, exclude=True)

    _lazy: LazyEngine = PrivateAttr(default_factory=LazyEngine)
    _plain = field_validator("model", "store", "dtype", mode="before")(LLMSettings.plain)
    _length = field_validator("max_tokens", mode="before")(LLMSettings.length)

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        LLMSettings.of(self)
        return self

    @model_validator(mode="after")
    def _set_kvrag_version(self) -> Self:
        self._add_version("langchain-kvrag", _VERSION)
        return self

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return True: settings can be serialised, unless they hold an engine."""
        return True

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """Return the serialised form for LangChain's `dumps` and for traces."""
        return super().to_json() if self.engine is None else self.to_json_not_implemented()

    def _open(self) -> BlendEngine | RemoteEngine:
        return self._lazy.open(LLMSettings.of(self))

    def _opened(self) -> BlendEngine | RemoteEngine | None:
        return self._lazy.opened(LLMSettings.of(self))

    @staticmethod
    def _text(chunk: Any) -> Any:
        return chunk.page_content if isinstance(chunk, Document) else chunk

    @staticmethod
    def _source(chunk: Any) -> str:
        return source_name(chunk)

    def _asked(self, stop: list[str] | None, call: dict[str, Any]) -> tuple[LLMSettings, dict[str, Any]]:
        """Return the settings of the engine for a call, and the arguments for its `stream`."""
        settings, asked = LLMSettings.of(self), dict(call)
        asked.pop("stream", None)  # already handled by LangChain
        asked["documents"] = self._texts(asked.get("documents"))
        model = LLMSettings.plain(asked.pop("model", None))
        if model is not None and model != settings.model_name:
            settings = replace(settings, model=model, engine=None)
        return settings, settings.request(stop=stop, **asked)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of the model's own tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._open().encode(text)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        identity = LLMSettings.of(self).identity()
        # in its cache key, LangChain overwrites `stop` with the stop strings of the call
        return identity | {"stop_sequences": identity.pop("stop")}
