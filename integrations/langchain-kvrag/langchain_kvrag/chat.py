"""ChatBlend: messages in, a message out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from kvrag import Answer, BlendReport, Delta, LLMSettings, PromptError
from langchain_kvrag.messages import template_messages
from langchain_kvrag.settings import BlendSettings


class ChatBlend(BlendSettings, BaseChatModel, extra="forbid"):
    """Chat model that answers from pre-encoded chunks.

    Chunks are found in the finished prompt by their tokens: chains need not change. Every answer tells in
    `response_metadata["kvrag"]` what was reused. All settings of answers can be given per call, and `documents` and
    `template` besides (see `BlendEngine.stream`).

    Example:
        ```python
        llm = ChatBlend(model="Qwen/Qwen2.5-1.5B-Instruct", store="kv")
        llm.warm(document.page_content for document in documents)
        llm.invoke("What is a chunk?")
        ```
    """

    streaming: bool = False
    """LangChain's: True = `invoke` streams for the callbacks, False given = `stream` does not."""

    @property
    def _llm_type(self) -> str:
        return "kvrag-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "kvrag"
        params["ls_model_name"] = kwargs.get("model") or LLMSettings.of(self).model_name
        return params

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Length of the prompt that the chat template makes of them."""
        if tools is not None:
            return super().get_num_tokens_from_messages(messages, tools)
        try:
            return len(self._open().model.tokenizer.render(template_messages(messages)))
        except PromptError:  # a part of a conversation, which trimming wants counted, need not be a prompt
            return super().get_num_tokens_from_messages(messages)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = self._request(stop, kwargs)
        return self._result(self._open().generate(template_messages(messages), **request))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = self._request(stop, kwargs)
        engine = await asyncio.to_thread(self._open)
        return self._result(await engine.agenerate(template_messages(messages), **request))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        request = self._request(stop, kwargs)
        num_tokens = 0
        with closing(self._open().stream(template_messages(messages), **request)) as deltas:
            for delta in deltas:
                num_tokens += len(delta.token_ids)
                chunk = self._chunk(delta, num_tokens)
                if run_manager:
                    run_manager.on_llm_new_token(delta.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        request = self._request(stop, kwargs)
        engine = await asyncio.to_thread(self._open)
        num_tokens = 0
        async with aclosing(engine.astream(template_messages(messages), **request)) as deltas:
            async for delta in deltas:
                num_tokens += len(delta.token_ids)
                chunk = self._chunk(delta, num_tokens)
                if run_manager:
                    await run_manager.on_llm_new_token(delta.text, chunk=chunk)
                yield chunk

    def _result(self, answer: Answer) -> ChatResult:
        message = AIMessage(
            content=answer.text,
            usage_metadata=_usage(answer.report, len(answer.token_ids)),
            response_metadata=self._metadata(answer),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _chunk(self, delta: Delta, num_tokens: int) -> ChatGenerationChunk:
        if delta.report is None:
            return ChatGenerationChunk(message=AIMessageChunk(content=delta.text))
        # only here: LangChain adds the chunks' usage up and strings their names together
        message = AIMessageChunk(
            content=delta.text,
            usage_metadata=_usage(delta.report, num_tokens),
            response_metadata=self._metadata(delta),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)

    def _metadata(self, end: Answer | Delta) -> dict[str, Any]:
        assert end.report is not None
        return {
            "kvrag": end.report.to_dict(),
            "model_name": LLMSettings.of(self).model_name,
            "model_provider": "kvrag",
            "finish_reason": end.finish_reason,
        }


def _usage(report: BlendReport, num_tokens: int) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=num_tokens,
        total_tokens=report.prompt_tokens + num_tokens,
        input_token_details=InputTokenDetails(cache_read=report.reused_tokens),
    )
