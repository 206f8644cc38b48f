"""BlendLLM: LlamaIndex LLM on kvrag."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from copy import copy
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

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
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import ConfigDict
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.program.utils import get_program_for_llm
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore
from llama_index.core.tools.types import BaseTool, ToolMetadata
from llama_index.core.types import BasePydanticProgram, Model
from llama_index.llms.kvrag.messages import assistant_message, template_messages

from kvrag import Answer, Delta, InvalidCall, ToolCall
from kvrag.llm import LONGER, parameters_of
from kvrag.llm_fields import LLMFields
from kvrag.types import join, openai_usage

_Prompt = str | list[dict[str, Any]]


def source_name(node: BaseNode | NodeWithScore | str, collection: str = "default") -> str:
    """Return the name of a node's document; "" = unknown."""
    node = node.node if isinstance(node, NodeWithScore) else node
    source = node.ref_doc_id if isinstance(node, BaseNode) else None
    return f"llama_index/{quote(collection, safe='')}/{quote(source, safe='')}/" if source else ""


class BlendLLM(FunctionCallingLLM, LLMFields):
    """LLM that answers from pre-encoded chunks.

    Chunks are found in the final prompt by their tokens, so query engines need no change. Creating an object is cheap:
    the model is loaded on the first answer and shared by all objects with equal settings.

    The settings are the fields of `kvrag.LLMSettings`. Answer settings can be given per call, and so can `documents`,
    `tools`, `tool_choice`, `response_format`, `grammar` and `template` (see `kvrag.LLMSettings.request`).
    `raw["kvrag"]` of every response reports what was reused; `raw["usage"]` has OpenAI's form. Where LlamaIndex
    requests an object of a class, a grammar enforces its schema.

    The thought of a model that thinks before it answers is a `ThinkingBlock` of the message; its next part is
    `additional_kwargs["thinking_delta"]` of a streamed response. `additional_kwargs["thinking"]` of a completion is the
    thought. `reasoning=False` turns thoughts off where the chat template can.

    Attributes:
        engine: An existing engine, instead of the settings that select a model and a store.
        timeout: Seconds until an answer fails, also per call: with an `AnswerTimeoutError`, which is a TimeoutError, or
            a `ServerError` from the server in `base_url`. A local model also checks it during prefill.
        max_retries, api_key: For the server in `base_url`; without effect on a local model. `api_key` defaults to the
            environment variable KVRAG_API_KEY.

    Example:
        ```python
        llm = BlendLLM(model="Qwen/Qwen2.5-1.5B-Instruct", store="kv")
        llm.warm(nodes)
        VectorStoreIndex(nodes).as_query_engine(llm=llm).query("What is a chunk?")
        ```

    With `base_url=` instead of `store=`, a server answers: `kvrag serve`, or vLLM with kvrag's KV connector.
    """

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def class_name(cls) -> str:
        """Return the name in serialised form."""
        return "kvrag_blend_llm"

    @property
    def metadata(self) -> LLMMetadata:
        """The model's context window and capabilities, read without loading its weights."""
        settings = self._settings
        facts = settings.facts()
        assert facts is not None
        return LLMMetadata(
            context_window=facts.window,
            num_output=self.max_tokens,
            is_chat_model=facts.has_chat_template,  # without a chat template, query engines send plain text
            is_function_calling_model=facts.has_chat_template,
            model_name=settings.model_name,
        )

    def to_payload(self) -> dict[str, Any]:
        """Return the fields for events. Reads no files, because it runs on the event loop."""
        return {"class_name": self.class_name(), **self._settings.identity()}

    def encode(self, text: str) -> list[int]:
        """Return token ids of the model's own tokenizer; set `Settings.tokenizer = llm.encode` to count with it."""
        return self._open().encode(text)

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
        """Stream the answer to messages."""
        return (_chat(response) for response in self._stream(template_messages(messages), kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Stream the answer to messages, off the event loop."""
        pieces = await self._astream(template_messages(messages), kwargs)
        return (_chat(response) async for response in pieces)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a text: one user message, or the whole prompt if it is `formatted` or there is no chat template."""
        return _completion(self._answer(self._prompt(prompt, formatted), kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Like `complete`, off the event loop."""
        rendered = await asyncio.to_thread(self._prompt, prompt, formatted)
        return _completion(await self._aanswer(rendered, kwargs))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Like `complete`, as a stream."""
        return (_completion(response) for response in self._stream(self._prompt(prompt, formatted), kwargs))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Like `stream_complete`, off the event loop."""
        rendered = await asyncio.to_thread(self._prompt, prompt, formatted)
        pieces = await self._astream(rendered, kwargs)
        return (_completion(response) async for response in pieces)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the tool calls in a response. During a stream, they have the arguments received so far.

        Raises:
            ValueError: A call was cut off, or is malformed; or there is none, and `error_on_no_tool_call` is set.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        _check_calls(response)
        if error_on_no_tool_call and not calls:
            hint = f"; it was cut off: {LONGER}" if _is_cut_off(response) else ""
            raise ValueError(f"the model called no tool but answered {response.message.content!r:.200}{hint}")
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "",
                tool_name=call.tool_name,
                tool_kwargs=call.tool_kwargs
                if isinstance(call.tool_kwargs, dict)
                else _parse_partial(call.tool_kwargs),
            )
            for call in calls
        ]

    def predict_and_call(self, tools: Sequence[BaseTool], *args: Any, **kwargs: Any) -> AgentChatResponse:
        """Like `FunctionCallingLLM.predict_and_call`, also for recursive classes."""
        return super().predict_and_call([*map(_with_properties, tools)], *args, **kwargs)

    async def apredict_and_call(self, tools: Sequence[BaseTool], *args: Any, **kwargs: Any) -> AgentChatResponse:
        """Like `predict_and_call`, off the event loop."""
        return await super().apredict_and_call([*map(_with_properties, tools)], *args, **kwargs)

    def stream_chat_with_tools(self, *args: Any, **kwargs: Any) -> ChatResponseGen:
        """Like `FunctionCallingLLM.stream_chat_with_tools`; raises ValueError at the end of an invalid call."""
        responses = super().stream_chat_with_tools(*args, **kwargs)

        def checked() -> ChatResponseGen:
            for response in responses:
                yield response
                _check_calls(response)

        return checked()

    async def astream_chat_with_tools(self, *args: Any, **kwargs: Any) -> ChatResponseAsyncGen:
        """Like `stream_chat_with_tools`, off the event loop."""
        responses = await super().astream_chat_with_tools(*args, **kwargs)

        async def checked() -> ChatResponseAsyncGen:
            async for response in responses:
                yield response
                _check_calls(response)

        return checked()

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        return {
            "messages": [*(chat_history or []), *([user_msg] if user_msg else [])],
            "tools": [_with_properties(tool).metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": tool_choice or ("required" if tool_required else None),
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        _check_calls(response)
        return response

    # LlamaIndex forces the tool call for complete objects, but not for streamed ones

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        return self._program(output_cls, prompt).stream_call(llm_kwargs=llm_kwargs, **prompt_args)

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        return await self._program(output_cls, prompt).astream_call(llm_kwargs=llm_kwargs, **prompt_args)

    def _program(self, output_cls: type[Model], prompt: PromptTemplate) -> BasePydanticProgram[Model]:
        return get_program_for_llm(output_cls, prompt, self, self.pydantic_program_mode, tool_choice="required")

    @staticmethod
    def _text(chunk: Any) -> Any:
        return chunk.get_content(MetadataMode.LLM) if isinstance(chunk, (BaseNode, NodeWithScore)) else chunk

    @staticmethod
    def _source(chunk: Any) -> str:
        return source_name(chunk)

    def _prompt(self, text: str, formatted: bool) -> _Prompt:
        return text if formatted else self._open().as_prompt(text)

    def _request(self, call: dict[str, Any]) -> dict[str, Any]:
        return self._settings.request(**{**call, "documents": self._texts(call.get("documents"))})

    def _answer(self, prompt: _Prompt, call: dict[str, Any]) -> _Response:
        request = self._request(call)
        return _Response.of_answer(self._open().generate(prompt, **request))

    async def _aanswer(self, prompt: _Prompt, call: dict[str, Any]) -> _Response:
        request = self._request(call)
        engine = await asyncio.to_thread(self._open)
        return _Response.of_answer(await engine.agenerate(prompt, **request))

    def _stream(self, prompt: _Prompt, call: dict[str, Any]) -> Generator[_Response, None, None]:
        request = self._request(call)
        return _pieces(self._open().stream(prompt, **request))

    async def _astream(self, prompt: _Prompt, call: dict[str, Any]) -> AsyncGenerator[_Response, None]:
        request = self._request(call)
        engine = await asyncio.to_thread(self._open)
        return _apieces(engine.astream(prompt, **request))


@dataclass(frozen=True, slots=True)
class _Response:
    """The response so far, with its latest delta."""

    text: str = ""
    delta: str | None = None
    calls: tuple[ToolCall | InvalidCall, ...] = ()
    thought: str = ""
    thought_delta: str = ""
    thought_tokens: int = 0
    raw: dict[str, Any] | None = None
    deltas: tuple[Delta, ...] = ()

    @classmethod
    def of_answer(cls, answer: Answer) -> _Response:
        return cls(
            answer.text,
            calls=(*answer.tool_calls, *answer.invalid_calls),
            thought=answer.reasoning,
            thought_tokens=answer.reasoning_tokens,
            raw=_raw(answer),
        )

    def add(self, delta: Delta) -> _Response:
        deltas = (*self.deltas, delta)
        return _Response(
            self.text + delta.text,
            delta.text,
            (*self.calls, *delta.tool_calls, *delta.invalid_calls),
            self.thought + delta.reasoning,
            delta.reasoning,
            self.thought_tokens + delta.reasoning_tokens,
            None if delta.report is None else _raw(join(deltas)),
            deltas,
        )

    @property
    def thought_kwargs(self) -> dict[str, Any]:
        """`additional_kwargs` of a response: the key of the thought's next part is LlamaIndex's."""
        return {"thinking_delta": self.thought_delta} if self.thought_delta else {}


class _Metadata(ToolMetadata):
    """Metadata of a tool whose class refers to itself: LlamaIndex leaves out its properties."""

    def get_parameters_dict(self) -> dict[str, Any]:
        parameters = parameters_of(self.fn_schema)
        return {key: parameters[key] for key in ("type", "properties", "required", "$defs") if key in parameters}


def _with_properties(tool: BaseTool) -> BaseTool:
    if "properties" in tool.metadata.get_parameters_dict() or not hasattr(tool, "_metadata"):
        return tool
    tool = copy(tool)
    tool._metadata = _Metadata(**vars(tool.metadata))
    return tool


def _is_cut_off(response: ChatResponse) -> bool:
    return isinstance(response.raw, dict) and response.raw.get("finish_reason") == "length"


def _check_calls(response: ChatResponse) -> None:
    """Raise ValueError if a complete response has an invalid tool call."""
    if response.raw is None:  # more of the stream follows
        return
    for block in response.message.blocks:
        if isinstance(block, ToolCallBlock) and not isinstance(block.tool_kwargs, dict):
            if _is_cut_off(response):
                raise ValueError(f"the call of the tool {block.tool_name!r} was cut off: {LONGER}")
            raise ValueError(
                f"the model called the tool {block.tool_name!r} with malformed arguments: {block.tool_kwargs!r:.200}"
            )


def _parse_partial(arguments: str) -> dict[str, Any]:
    """Parse incomplete JSON arguments; {} if that is not possible."""
    try:
        parsed = parse_partial_json(arguments)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _pieces(deltas: Generator[Delta, None, None]) -> Generator[_Response, None, None]:
    response = _Response()
    with closing(deltas):
        for delta in deltas:
            response = response.add(delta)
            yield response


async def _apieces(deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[_Response, None]:
    response = _Response()
    async with aclosing(deltas):
        async for delta in deltas:
            response = response.add(delta)
            yield response


def _raw(answer: Answer) -> dict[str, Any]:
    return {
        "usage": openai_usage([answer]),
        "kvrag": answer.report.to_dict(),
        "finish_reason": answer.finish_reason,
    }


def _completion(response: _Response) -> CompletionResponse:
    thought = {"thinking": response.thought} if response.thought else {}
    return CompletionResponse(
        text=response.text, delta=response.delta, raw=response.raw, additional_kwargs=thought | response.thought_kwargs
    )


def _chat(response: _Response) -> ChatResponse:
    calls = [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments) for call in response.calls
    ]
    thoughts = [ThinkingBlock(content=response.thought, num_tokens=response.thought_tokens)] if response.thought else []
    return ChatResponse(
        message=assistant_message(response.text, calls, thoughts),
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.thought_kwargs,
    )
