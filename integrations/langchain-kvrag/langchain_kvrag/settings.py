"""Shared fields of the LangChain classes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import aclosing, closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Self, TypeVar
from urllib.parse import quote

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseLanguageModel, LangSmithParams
from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGenerationChunk, GenerationChunk
from pydantic import model_validator

from kvrag import Answer, ContextWindowError, Delta, LLMSettings
from kvrag.llm_fields import LLMFields

_VERSION = version("langchain-kvrag")

Chunk = TypeVar("Chunk", GenerationChunk, ChatGenerationChunk)


class PromptOverflowError(ContextWindowError, ContextOverflowError):
    """The prompt exceeds the model's context window. LangChain's middleware can handle this error."""


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Convert errors to LangChain's own classes where it has one."""
    try:
        yield
    except ContextWindowError as error:
        raise PromptOverflowError(str(error)) from error


def chunks(
    deltas: Generator[Delta, None, None],
    to_chunk: Callable[[Delta], Chunk | None],
    run_manager: CallbackManagerForLLMRun | None,
) -> Iterator[Chunk]:
    """Yield the chunks of a stream.

    Args:
        to_chunk: Returns the chunk for the next delta; None if it has none.
    """
    with langchain_errors(), closing(deltas):
        for delta in deltas:
            chunk = to_chunk(delta)
            if chunk is None:
                continue
            if run_manager:
                run_manager.on_llm_new_token(delta.text, chunk=chunk)
            yield chunk


async def achunks(
    deltas: AsyncGenerator[Delta, None],
    to_chunk: Callable[[Delta], Chunk | None],
    run_manager: AsyncCallbackManagerForLLMRun | None,
) -> AsyncGenerator[Chunk, None]:
    """Like `chunks`, off the event loop."""
    with langchain_errors():
        async with aclosing(deltas):
            async for delta in deltas:
                chunk = to_chunk(delta)
                if chunk is None:
                    continue
                if run_manager:
                    await run_manager.on_llm_new_token(delta.text, chunk=chunk)
                yield chunk


def usage(answer: Answer) -> UsageMetadata:
    """Return the usage of an answer."""
    report = answer.report
    counted = UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=answer.num_tokens,
        total_tokens=report.prompt_tokens + answer.num_tokens,
        input_token_details=InputTokenDetails(cache_read=report.reused_tokens, cache_creation=report.created_tokens),
    )
    if answer.reasoning_tokens:
        counted["output_token_details"] = OutputTokenDetails(reasoning=answer.reasoning_tokens)
    return counted


def source_name(document: Document | str, collection: str = "default") -> str:
    """Return the source name from a document's metadata, which LangChain's loaders write; "" = unknown."""
    source = document.metadata.get("source") if isinstance(document, Document) else None
    return "" if source is None else f"langchain/{quote(collection, safe='')}/{source}"


class BlendSettings(BaseLanguageModel[Any], LLMFields):
    """Base of the LangChain classes: an engine, or a model and a store to create one, and answer settings.

    See `kvrag.LLMSettings` for the settings, and `kvrag.llm_fields.LLMFields` for `engine`, `timeout`, `max_retries`
    and `api_key`.
    """

    @model_validator(mode="after")
    def _set_kvrag_version(self) -> Self:
        self._add_version("langchain-kvrag", _VERSION)
        return self

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return True. An object with an `engine` is an exception, see `to_json`."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Return the package without the module, which may change, so that serialised objects stay readable."""
        namespace = super().get_lc_namespace()  # of a class of yours, it is the whole path
        return namespace[:1] if namespace[0] == "langchain_kvrag" else namespace

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """Return the serialised form for LangChain's `dumps` and for traces."""
        return super().to_json() if self.engine is None else self.to_json_not_implemented()

    @staticmethod
    def _text(chunk: Any) -> Any:
        return chunk.page_content if isinstance(chunk, Document) else chunk

    @staticmethod
    def _source(chunk: Any) -> str:
        return source_name(chunk)

    def _request(self, stop: list[str] | None, call: dict[str, Any]) -> tuple[LLMSettings, dict[str, Any]]:
        """Return the settings of the engine for a call, and the arguments for its `stream`."""
        settings, arguments = self._settings, dict(call)
        arguments.pop("stream", None)  # already handled by LangChain
        if "documents" in arguments:
            arguments["documents"] = self._texts(arguments["documents"])
        if "model" in arguments:
            model = LLMSettings.plain(arguments.pop("model"))
            if model not in (None, settings.model_name):
                settings = replace(settings, model=model, engine=None)
        return settings, settings.request(stop=stop, **arguments)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of the model's own tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._open().encode(text)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "kvrag"
        params["ls_model_name"] = kwargs.get("model") or self._settings.model_name
        return params

    @property
    def _identifying_params(self) -> dict[str, Any]:
        identity = self._settings.identity()
        # LangChain's cache key overwrites `stop` with the stop strings of the call
        return identity | {"stop_sequences": identity.pop("stop")}
