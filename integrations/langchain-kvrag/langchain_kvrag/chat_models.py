"""ChatBlend: LangChain chat model on kvrag."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from operator import itemgetter
from types import FunctionType
from typing import Any, Literal, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool, create_schema_from_function
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.json import parse_partial_json
from langchain_core.utils.pydantic import is_basemodel_subclass

from kvrag import Answer, BlendEngine, Delta, LLMSettings, PromptError, RemoteEngine, SettingError
from kvrag.llm import LONGER, parameters_of
from kvrag.types import join
from langchain_kvrag.messages import template_messages
from langchain_kvrag.settings import BlendSettings, achunks, chunks, langchain_errors, usage

_UNTITLED = "answer"  # name of a schema without a title

_Method = Literal["json_schema", "function_calling", "json_mode"]


class ChatBlend(BlendSettings, BaseChatModel, extra="forbid"):
    """Chat model that answers from pre-encoded chunks.

    Chunks are found in the final prompt by their tokens, so chains need no change. `response_metadata["kvrag"]` of
    every answer reports what was reused. Answer settings can be given per call, and so can `model`, `documents`,
    `tools`, `tool_choice`, `parallel_tool_calls`, `response_format`, `grammar` and `template` (see
    `BlendEngine.stream`). `create_agent`, `bind_tools` and `with_structured_output` lose what was given to `bind`: give
    such settings to the constructor, or to `model_copy(update={"ratio": 0.3})`.

    The thought of a model that thinks before it answers is a `reasoning` block in front of the `text` block;
    `message.text` is the answer alone. Without a thought, `content` is a string. `reasoning=False` turns thoughts off
    where the chat template can.

    Example:
        ```python
        llm = ChatBlend(model="Qwen/Qwen2.5-1.5B-Instruct", store="kv")
        llm.warm(documents)
        llm.invoke("What is a chunk?")
        ```

    With `base_url=` instead of `store=`, a server answers: `kvrag serve`, or vLLM with kvrag's KV connector.
    """

    streaming: bool = False
    """LangChain's setting: True = `invoke` streams for the callbacks; an explicit False disables `stream`."""

    @property
    def _llm_type(self) -> str:
        return "kvrag-chat"

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # LangChain's default uses the serialised form, which omits `engine`
        return str(sorted({**self._get_invocation_params(stop=stop, **kwargs), **kwargs}.items()))

    def _resolve_model_profile(self) -> ModelProfile:
        profile = ModelProfile(
            text_inputs=True,
            image_inputs=False,
            pdf_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            text_outputs=True,
            tool_calling=True,
            tool_choice=True,
            structured_output=True,
            max_output_tokens=self.max_tokens,
        )
        if (facts := self._settings.facts(is_offline=True)) is not None:
            profile["max_input_tokens"], profile["reasoning_output"] = facts.window, facts.thinks
        return profile

    def _open(self) -> BlendEngine | RemoteEngine:
        engine = super()._open()
        if self.profile is not None and "max_input_tokens" not in self.profile:
            self.profile["max_input_tokens"] = engine.context_window
        return engine

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Return the length of the prompt that the chat template renders from messages."""
        openai_tools = [_openai_tool(tool) for tool in tools or ()]
        try:
            return self._open().count_tokens(template_messages(messages), tools=openai_tools)
        except PromptError:  # trimming counts parts of conversations, which need not be valid prompts
            return super().get_num_tokens_from_messages(messages)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind tools that the model can call.

        Args:
            tools: Tools, functions, Pydantic classes, or dicts: in OpenAI's form, or a JSON schema with a title.
            tool_choice: "auto" or None = the model may call them, "none" = it may not, "any", "required" or True = it
                must call one, a name = it must call that one. Forced calls are guaranteed, with arguments that match
                the schema.
            parallel_tool_calls: False = an answer has at most one call: further ones are dropped.
            strict: Accepted for compatibility: forced calls are always strict.
            kwargs: Further arguments to bind.

        Raises:
            SettingError: A schema has no name.
        """
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        if not tools:
            return self.bind(**kwargs)
        choice = {True: "required", False: None}.get(tool_choice) if isinstance(tool_choice, bool) else tool_choice
        return self.bind(tools=[_openai_tool(tool) for tool in tools], tool_choice=choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        include_raw: bool = False,
        method: _Method = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answer in the form of a schema, enforced by a grammar.

        An answer cut off by `max_tokens` raises an error.

        Args:
            schema: A Pydantic class, a TypedDict, or a JSON schema, with or without a title. A Pydantic class gives
                instances of it, any other schema the parsed JSON.
            include_raw: Return a dict of `raw`, `parsed` and `parsing_error`.
            method: "json_schema" = JSON of this schema, with an unchanged prompt. "function_calling" = a call of a tool
                with this schema, which is added to the prompt. "json_mode" = any JSON object; your prompt should
                describe its form.
            strict: Accepted for compatibility: all methods except "json_mode" are strict.

        Raises:
            SettingError: Unknown method or argument, or a schema that is missing or unsupported by the method.
        """
        if kwargs:
            raise SettingError(f"with_structured_output does not support {', '.join(kwargs)}: leave it out")
        if method not in ("json_schema", "function_calling", "json_mode"):
            raise SettingError(f"method must be json_schema, function_calling or json_mode, got {method!r}")
        if schema is None and method != "json_mode":
            raise SettingError(f"method {method!r} needs a schema")
        model_class: Any = schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
        traced: dict[str, Any] = {"kwargs": {"method": method, "strict": strict}, "schema": schema or {}}
        parser: Runnable[Any, Any]
        if method == "function_calling":
            assert schema is not None
            tool = _schema_tool(schema)
            name = tool["function"]["name"]
            llm = self.bind_tools([tool], tool_choice=name, ls_structured_output_format=traced)
            if model_class is not None:
                parser = PydanticToolsParser(tools=[model_class], first_tool_only=True)
            else:
                parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        else:
            response_format: dict[str, Any] = {"type": "json_object"}
            if method == "json_schema":
                assert schema is not None
                # LangChain's conversion requires a title, and supports only objects
                is_json = _is_json_schema(schema)
                json_schema = dict(cast(Any, schema)) if is_json else convert_to_json_schema(_openai_tool(schema))
                name = json_schema.get("title", _UNTITLED)
                response_format = {"type": "json_schema", "json_schema": {"name": name, "schema": json_schema}}
            llm = self.bind(response_format=response_format, ls_structured_output_format=traced)
            parser = JsonOutputParser() if model_class is None else PydanticOutputParser(pydantic_object=model_class)
        parser = RunnableGenerator(_complete, _acomplete) | parser
        if not include_raw:
            return llm | parser
        parsing = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=llm) | parsing.with_fallbacks([failed], exception_key="parsing_error")

    def _builder(self, settings: LLMSettings) -> ChatChunkBuilder:
        # LangChain would number the blocks of "v1" itself, and merge a tool call into the text before it
        return ChatChunkBuilder(settings.model_name, as_blocks=self.output_version == "v1")

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        settings, request = self._request(stop, kwargs)
        engine = self._lazy.open(settings)
        with langchain_errors():
            return _result(engine.generate(template_messages(messages), **request), settings.model_name)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        settings, request = self._request(stop, kwargs)
        engine = await asyncio.to_thread(self._lazy.open, settings)
        with langchain_errors():
            answer = await engine.agenerate(template_messages(messages), **request)
        return _result(answer, settings.model_name)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        settings, request = self._request(stop, kwargs)
        deltas = self._lazy.open(settings).stream(template_messages(messages), **request)
        yield from chunks(deltas, self._builder(settings).add, run_manager)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        settings, request = self._request(stop, kwargs)
        engine = await asyncio.to_thread(self._lazy.open, settings)
        deltas = engine.astream(template_messages(messages), **request)
        async with aclosing(achunks(deltas, self._builder(settings).add, run_manager)) as stream:
            async for chunk in stream:
                yield chunk


class ChatChunkBuilder:
    """Builds LangChain's chunks from the deltas of one stream.

    Content is a string until the first thought, unless `as_blocks` is set, and then blocks.
    """

    def __init__(self, model_name: str, as_blocks: bool) -> None:
        self._model_name, self._as_blocks = model_name, as_blocks
        self._deltas: list[Delta] = []
        self._num_blocks, self._last_block = 0, ""  # the type of the last one
        self._num_calls = 0

    def add(self, delta: Delta) -> ChatGenerationChunk | None:
        """Return the chunk for the next delta; None if it has no content and is the first.

        LangChain would keep its empty string in front of a thought.
        """
        self._deltas.append(delta)
        contents = ((one.text, one.reasoning, one.tool_calls, one.invalid_calls, one.report) for one in self._deltas)
        if not any(map(any, contents)):
            return None
        calls = [(call.name, json.dumps(call.arguments, ensure_ascii=False), call.id) for call in delta.tool_calls]
        for cut in delta.invalid_calls:
            calls.append((cut.name, cut.arguments + _unparsable_end(cut.arguments), cut.id))
        parts = [
            tool_call_chunk(name=name or None, args=arguments, id=call_id, index=index)
            for index, (name, arguments, call_id) in enumerate(calls, self._num_calls)
        ]
        self._num_calls += len(parts)
        message = AIMessageChunk(content=self._content(delta), tool_call_chunks=parts)
        if delta.report is not None:
            # on the last chunk only: LangChain adds up the usage of chunks and concatenates names
            answer = join(self._deltas)
            message.usage_metadata = usage(answer)
            message.response_metadata = _metadata(answer, self._model_name)
            message.chunk_position = "last"
        return ChatGenerationChunk(message=message)

    def _content(self, delta: Delta) -> str | list[str | dict[str, Any]]:
        """Return the text, or blocks with an index by which LangChain merges them."""
        self._as_blocks |= bool(delta.reasoning)
        if not self._as_blocks:
            return delta.text
        blocks: list[str | dict[str, Any]] = []
        for block in _blocks(delta):
            if block["type"] != self._last_block:
                self._last_block, self._num_blocks = block["type"], self._num_blocks + 1
            # text, because LangChain would merge the tool call with the same number into the block
            blocks.append({**block, "index": f"lc_{self._last_block}_{self._num_blocks}"})
        return blocks


def _blocks(said: Answer | Delta) -> list[dict[str, Any]]:
    """Return the thought and the text as LangChain's standard blocks."""
    parts = {"reasoning": said.reasoning, "text": said.text}
    return [{"type": kind, kind: text} for kind, text in parts.items() if text]


def _is_json_schema(schema: Any) -> bool:
    tool_forms = ("function", "parameters", "input_schema", "toolSpec")
    return isinstance(schema, dict) and not any(name in schema for name in tool_forms)


def _openai_tool(tool: Any) -> dict[str, Any]:
    """Return a tool in OpenAI's form."""
    if _is_json_schema(tool):
        if not {"title", "name"} & {*tool}:
            raise SettingError(f"a tool needs a name: give its JSON schema a title, got {tool!r:.120}")
        return _schema_tool(tool)
    converted = convert_to_openai_tool(tool)
    # LangChain replaces references by what they refer to, and one within itself by {}
    parameters = _own_parameters(tool)
    if _is_recursive(parameters):
        function = {**converted["function"], "parameters": {**parameters}}
        for name in ("title", "description"):
            function["parameters"].pop(name, None)
        return {**converted, "function": function}
    return converted


def _own_parameters(tool: Any) -> dict[str, Any]:
    """Return the parameters of a class, a tool or a function as pydantic gives them; {} where it does not."""
    if isinstance(tool, BaseTool):
        tool = tool.tool_call_schema
    elif isinstance(tool, FunctionType):
        # as in LangChain's conversion
        options: dict[str, Any] = {"parse_docstring": True, "error_on_invalid_docstring": False}
        tool = create_schema_from_function(tool.__name__, tool, filter_args=(), include_injected=False, **options)
    return parameters_of(tool) if hasattr(tool, "model_json_schema") else {}


def _is_recursive(schema: dict[str, Any]) -> bool:
    """Return whether a definition refers to itself."""
    definitions = schema.get("$defs", {})
    uses = {name: {*re.findall(r'"\$ref": "#/\$defs/([^"]+)"', json.dumps(definitions[name]))} for name in definitions}
    for _ in uses:  # add what these use
        uses = {name: found.union(*(uses.get(other, ()) for other in found)) for name, found in uses.items()}
    return any(name in found for name, found in uses.items())


def _schema_tool(schema: Any) -> dict[str, Any]:
    """Return the tool whose arguments have this schema."""
    if not _is_json_schema(schema):
        return _openai_tool(schema)
    if schema.get("type", "object") != "object":
        raise SettingError(
            f"tool arguments must be an object, got a schema of type {schema['type']!r}: use method='json_schema'"
        )
    # tool names cannot contain spaces
    name = re.sub(r"[^\w.-]+", "_", schema.get("title") or schema.get("name") or _UNTITLED)
    parameters = {key: value for key, value in schema.items() if key not in ("title", "name", "description")}
    function = {"name": name, "description": schema.get("description", ""), "parameters": parameters}
    return {"type": "function", "function": function}


def _result(answer: Answer, model_name: str) -> ChatResult:
    message = AIMessage(
        content=[*_blocks(answer)] if answer.reasoning else answer.text,
        tool_calls=[tool_call(name=call.name, args=call.arguments, id=call.id) for call in answer.tool_calls],
        invalid_tool_calls=[
            invalid_tool_call(
                name=call.name or None, args=call.arguments, id=call.id, error=_why_invalid(answer.finish_reason)
            )
            for call in answer.invalid_calls
        ],
        usage_metadata=usage(answer),
        response_metadata=_metadata(answer, model_name),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def _why_invalid(finish_reason: str) -> str:
    if finish_reason == "length":
        return f"the call was cut off: {LONGER}"
    return "the arguments are not a JSON object"


def _unparsable_end(arguments: str) -> str:
    """Return a suffix for invalid arguments that prevents LangChain from repairing them.

    Otherwise an agent would execute a cut-off call with the arguments that are left.
    """
    ends = ("]", "}", '"]', '"}', '""]', '""}')  # close an open string, if any, and then a bracket that is not open
    return next(end for end in ends if not _is_repairable(arguments + end))


def _is_repairable(arguments: str) -> bool:
    try:
        return isinstance(parse_partial_json(arguments), dict)
    except ValueError:
        return False


def _metadata(answer: Answer, model_name: str) -> dict[str, Any]:
    return {
        "kvrag": answer.report.to_dict(),
        "model_name": model_name,
        "model_provider": "kvrag",
        "finish_reason": "tool_calls" if answer.tool_calls and answer.finish_reason == "stop" else answer.finish_reason,
    }


def _complete(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """Yield the chunks; raise an error if the answer was cut off, which parsers do not detect."""
    yield from map(_check_complete, messages)


async def _acomplete(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    async for message in messages:
        yield _check_complete(message)


def _check_complete(message: AIMessage) -> AIMessage:
    if message.response_metadata.get("finish_reason") == "length":
        raise OutputParserException(f"the answer was cut off: {LONGER}", llm_output=message.text)
    return message
