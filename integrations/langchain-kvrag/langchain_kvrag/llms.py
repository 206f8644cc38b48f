"""BlendLLM: LangChain text LLM on kvrag."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import PrivateAttr

from kvrag import Answer, Delta, LLMSettings, SettingError
from kvrag.types import join, openai_usage
from langchain_kvrag.settings import BlendSettings, achunks, chunks, langchain_errors, usage

_RUN_ARGUMENTS = ("callbacks", "tags", "metadata", "run_name", "run_id")


class BlendLLM(BlendSettings, BaseLLM, extra="forbid"):
    """LLM that answers from pre-encoded chunks. Use it in chains that need a string; otherwise prefer `ChatBlend`.

    The text becomes one user message of the chat template; a model without a template gets it unchanged.

    `generation_info` of every generation, and of the last chunk of a stream, contains the report (`"kvrag"`), the usage
    (`"usage_metadata"`) and the `"finish_reason"`; the model's thought, if any, is in `"reasoning"`.
    `llm_output["token_usage"]` of a result is the usage of all its prompts, in OpenAI's form.
    """

    _call_arguments: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "kvrag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return super()._identifying_params | self._call_arguments

    def _called_with(self, call: dict[str, Any]) -> Self:
        """Return a copy for one call: LangChain's cache key has the object's settings, not the call's arguments."""
        copy = self.model_copy()
        copy._call_arguments = {name: value for name, value in call.items() if name not in _RUN_ARGUMENTS}
        return copy

    def generate(self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any) -> LLMResult:
        """Answer several texts, as in LangChain."""
        return super(BlendLLM, self._called_with(kwargs)).generate(prompts, stop, *args, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Like `generate`, off the event loop."""
        return await super(BlendLLM, self._called_with(kwargs)).agenerate(prompts, stop, *args, **kwargs)

    def _request(self, stop: list[str] | None, call: dict[str, Any]) -> tuple[LLMSettings, dict[str, Any]]:
        if call.get("tools"):
            raise SettingError("BlendLLM supports text only: use ChatBlend for tools")
        return super()._request(stop, call)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        settings, request = self._request(stop, kwargs)
        engine = self._lazy.open(settings)
        with langchain_errors():
            answers = engine.generate_batch([engine.as_prompt(prompt) for prompt in prompts], **request)
        return _result(answers, settings.model_name)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        settings, request = self._request(stop, kwargs)
        engine = await asyncio.to_thread(self._lazy.open, settings)
        tasks = [asyncio.ensure_future(engine.agenerate(engine.as_prompt(prompt), **request)) for prompt in prompts]
        try:
            with langchain_errors():
                answers = await asyncio.gather(*tasks)
        finally:  # an error in one of the answers abandons the others
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return _result(answers, settings.model_name)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        settings, request = self._request(stop, kwargs)
        engine = self._lazy.open(settings)
        deltas = engine.stream(engine.as_prompt(prompt), **request)
        yield from chunks(deltas, TextChunkBuilder(settings.model_name).add, run_manager)

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        settings, request = self._request(stop, kwargs)
        engine = await asyncio.to_thread(self._lazy.open, settings)
        deltas = engine.astream(engine.as_prompt(prompt), **request)
        async with aclosing(achunks(deltas, TextChunkBuilder(settings.model_name).add, run_manager)) as stream:
            async for chunk in stream:
                yield chunk


class TextChunkBuilder:
    """Builds LangChain's chunks from the deltas of one stream."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._deltas: list[Delta] = []

    def add(self, delta: Delta) -> GenerationChunk:
        """Return the chunk for the next delta."""
        self._deltas.append(delta)
        info = {"reasoning": delta.reasoning} if delta.reasoning else {}
        if delta.report is not None:
            info |= _info(join(self._deltas), self._model_name)
        return GenerationChunk(text=delta.text, generation_info=info or None)


def _info(answer: Answer, model_name: str) -> dict[str, Any]:
    return {
        "kvrag": answer.report.to_dict(),
        "usage_metadata": usage(answer),
        "finish_reason": answer.finish_reason,
        "model_name": model_name,
    }


def _result(answers: Sequence[Answer], model_name: str) -> LLMResult:
    thoughts = [{"reasoning": answer.reasoning} if answer.reasoning else {} for answer in answers]
    infos = [_info(answer, model_name) | thought for answer, thought in zip(answers, thoughts, strict=True)]
    pairs = zip(answers, infos, strict=True)
    return LLMResult(
        generations=[[Generation(text=answer.text, generation_info=info)] for answer, info in pairs],
        llm_output={"token_usage": openai_usage(answers), "model_name": model_name},
    )
