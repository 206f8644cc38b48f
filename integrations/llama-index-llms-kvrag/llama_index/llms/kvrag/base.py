"""BlendLLM: messages or text in, a response out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from contextlib import aclosing, closing
from typing import Annotated, Any, Self

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM
from llama_index.llms.kvrag.messages import template_messages

from kvrag import Answer, BlendEngine, BlendReport, Delta, LazyEngine, LLMSettings, WarmReport

_Plain = Annotated[str, BeforeValidator(LLMSettings.plain)]
_Prompt = str | list[dict[str, Any]]


class BlendLLM(LLM):
    """LLM that answers from pre-encoded chunks.

    Chunks are found in the finished prompt by their tokens: query engines need not change. Making an object is cheap:
    the model is loaded when it is needed for the first time, and shared with all objects that have equal settings.

    Every response has in `raw["kvrag"]` what was reused, and `raw["usage"]` as OpenAI's. All settings of answers can be
    given per call, and `documents` and `template` besides (see `BlendEngine.stream`).

    Attributes:
        model: A hub name, a folder, or "reader" for the small model that comes with kvrag.
        store: Folder of the pre-encoded chunks; None = one of this model's under `~/.cache/kvrag`.
        codec: How chunks are stored there: "native", "int8" or "int4"; see `BlendEngine`.
        engine: One already built, instead of all that is said about the model.
        temperature: 0 = greedy. It and the other sampling settings: None = as the model's generation config says.
        stop: The answer ends before the first of these strings. Those given per call are added.
        ratio: Share of the reused tokens to recompute; 0 = plain reuse, 1 = full prefill's answer. None = what
            `kvrag calibrate` found, else 0.15.
        policy: Which ones; see `kvrag.POLICIES`.
        controller: "off" = never full prefill, nor a higher ratio, where neither ratio nor policy was given; see
            `kvrag.BlendConfig`.

    Example:
        ```python
        llm = BlendLLM(model="Qwen/Qwen2.5-1.5B-Instruct", store="kv")
        llm.warm(node.get_content(MetadataMode.LLM) for node in nodes)
        VectorStoreIndex(nodes).as_query_engine(llm=llm).query("What is a chunk?")
        ```
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: _Plain | None = None
    store: _Plain | None = None
    codec: str = "native"
    engine: BlendEngine | None = Field(default=None, exclude=True, repr=False)
    max_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    ratio: float | None = None
    policy: str | None = None
    controller: str | None = None
    dtype: _Plain = "auto"
    device: str | None = None
    device_map: str | dict[str, Any] | None = None
    revision: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    _lazy: LazyEngine = PrivateAttr(default_factory=LazyEngine)

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        LLMSettings.of(self)
        return self

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised form."""
        return "kvrag_blend_llm"

    @property
    def metadata(self) -> LLMMetadata:
        """The model's own window; loads the model."""
        model = self._open().model
        return LLMMetadata(
            context_window=model.context_window,
            num_output=self.max_tokens,
            is_chat_model=model.tokenizer.has_chat_template,  # without one, query engines send finished text
            model_name=LLMSettings.of(self).model_name,
        )

    def to_payload(self) -> dict[str, Any]:
        """For events. Unlike the metadata it does not load the model: the event loop is waiting."""
        return {"class_name": self.class_name(), **LLMSettings.of(self).identity()}

    def warm(self, texts: Iterable[str], *, document: str | Sequence[str] = "") -> WarmReport:
        """Encode every chunk that the store lacks; see `BlendEngine.warm`.

        Give them as the prompt will have them: `node.get_content(MetadataMode.LLM)`.
        """
        return self._open().warm(texts, document=document)

    def forget(self, document: str) -> int:
        """Drop a document's chunks unless another one has them; see `BlendEngine.forget`."""
        return self._open().forget(document)

    def documents(self, prefix: str = "") -> list[str]:
        """Names of the documents that begin so and have chunks."""
        return self._open().documents(prefix)

    def encode(self, text: str) -> list[int]:
        """Token ids by the model's own tokenizer: `Settings.tokenizer = llm.encode` makes LlamaIndex count right."""
        return self._open().model.tokenizer.encode(text)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages."""
        return _chat(self._answer(template_messages(messages), kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages, off the event loop."""
        return _chat(await self._aanswer(template_messages(messages), kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer messages piece by piece."""
        return (_chat(response) for response in self._stream(template_messages(messages), kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer messages piece by piece, off the event loop."""
        responses = await self._astream(template_messages(messages), kwargs)
        return (_chat(response) async for response in responses)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a text: one user message, or the whole prompt if it is `formatted`."""
        return self._answer(_prompt(prompt, formatted), kwargs)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Like `complete`, off the event loop."""
        return await self._aanswer(_prompt(prompt, formatted), kwargs)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Like `complete`, piece by piece."""
        return self._stream(_prompt(prompt, formatted), kwargs)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Like `stream_complete`, off the event loop."""
        return await self._astream(_prompt(prompt, formatted), kwargs)

    def _open(self) -> BlendEngine:
        return self._lazy.open(LLMSettings.of(self))

    def _answer(self, prompt: _Prompt, call: dict[str, Any]) -> CompletionResponse:
        request = LLMSettings.of(self).request(**call)
        return _response(self._open().generate(prompt, **request))

    async def _aanswer(self, prompt: _Prompt, call: dict[str, Any]) -> CompletionResponse:
        request = LLMSettings.of(self).request(**call)
        engine = await asyncio.to_thread(self._open)
        return _response(await engine.agenerate(prompt, **request))

    def _stream(self, prompt: _Prompt, call: dict[str, Any]) -> CompletionResponseGen:
        request = LLMSettings.of(self).request(**call)
        return _responses(self._open().stream(prompt, **request))

    async def _astream(self, prompt: _Prompt, call: dict[str, Any]) -> CompletionResponseAsyncGen:
        request = LLMSettings.of(self).request(**call)
        engine = await asyncio.to_thread(self._open)
        return _aresponses(engine.astream(prompt, **request))


def _prompt(prompt: str, formatted: bool) -> _Prompt:
    return prompt if formatted else [{"role": "user", "content": prompt}]


def _responses(deltas: Generator[Delta, None, None]) -> CompletionResponseGen:
    said = _Said()
    with closing(deltas):
        for delta in deltas:
            yield said.add(delta)


async def _aresponses(deltas: AsyncGenerator[Delta, None]) -> CompletionResponseAsyncGen:
    said = _Said()
    async with aclosing(deltas):
        async for delta in deltas:
            yield said.add(delta)


class _Said:
    """What a stream has said so far."""

    def __init__(self) -> None:
        self._text = ""
        self._num_tokens = 0

    def add(self, delta: Delta) -> CompletionResponse:
        """The response up to and with this piece."""
        self._text += delta.text
        self._num_tokens += len(delta.token_ids)
        raw = None if delta.report is None else _raw(delta.report, self._num_tokens, delta.finish_reason)
        return CompletionResponse(text=self._text, delta=delta.text, raw=raw)


def _response(answer: Answer) -> CompletionResponse:
    raw = _raw(answer.report, len(answer.token_ids), answer.finish_reason)
    return CompletionResponse(text=answer.text, raw=raw)


def _raw(report: BlendReport, num_tokens: int, finish_reason: str | None) -> dict[str, Any]:
    return {
        "usage": {
            "prompt_tokens": report.prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": report.prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": report.reused_tokens},
        },
        "kvrag": report.to_dict(),
        "finish_reason": finish_reason,
    }


def _chat(response: CompletionResponse) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=response.text)
    return ChatResponse(message=message, delta=response.delta, raw=response.raw)
