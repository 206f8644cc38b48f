"""BlendLLM: LangChain text LLM on kvrag."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LLM, LangSmithParams
from langchain_core.outputs import GenerationChunk, LLMResult
from pydantic import PrivateAttr

from kvrag import Delta, LLMSettings, SettingError
from langchain_kvrag.settings import BlendSettings

_OF_THE_RUN = ("callbacks", "tags", "metadata", "run_name", "run_id")


class BlendLLM(BlendSettings, LLM, extra="forbid"):
    """LLM that answers from pre-encoded chunks. The text becomes one user message of the chat template.

    A model without a template gets the text unchanged.

    For chains that need a string; otherwise prefer `ChatBlend`. The last chunk of a stream has the report in
    `generation_info["kvrag"]`.
    """

    _of_the_call: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "kvrag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return super()._identifying_params | self._of_the_call

    def _called_with(self, call: dict[str, Any]) -> Self:
        """Return a copy for one call: LangChain's cache key covers the object but not the call's arguments."""
        copy = self.model_copy()
        copy._of_the_call = {name: value for name, value in call.items() if name not in _OF_THE_RUN}
        return copy

    def generate(self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any) -> LLMResult:
        """Answer several texts, as in LangChain."""
        return super(BlendLLM, self._called_with(kwargs)).generate(prompts, stop, *args, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Like `generate`, off the event loop."""
        return await super(BlendLLM, self._called_with(kwargs)).agenerate(prompts, stop, *args, **kwargs)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "kvrag"
        params["ls_model_name"] = kwargs.get("model") or LLMSettings.of(self).model_name
        return params

    def _asked(self, stop: list[str] | None, call: dict[str, Any]) -> tuple[LLMSettings, dict[str, Any]]:
        if call.get("tools"):
            raise SettingError("BlendLLM supports text only: use ChatBlend for tools")
        return super()._asked(stop, call)

    def _call(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        settings, request = self._asked(stop, kwargs)
        engine = self._lazy.open(settings)
        return engine.generate(engine.as_prompt(prompt), **request).text

    async def _acall(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        settings, request = self._asked(stop, kwargs)
        engine = await asyncio.to_thread(self._lazy.open, settings)
        return (await engine.agenerate(engine.as_prompt(prompt), **request)).text

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        settings, request = self._asked(stop, kwargs)
        engine = self._lazy.open(settings)
        with closing(engine.stream(engine.as_prompt(prompt), **request)) as deltas:
            for delta in deltas:
                chunk = _chunk(delta)
                if run_manager:
                    run_manager.on_llm_new_token(delta.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        settings, request = self._asked(stop, kwargs)
        engine = await asyncio.to_thread(self._lazy.open, settings)
        async with aclosing(engine.astream(engine.as_prompt(prompt), **request)) as deltas:
            async for delta in deltas:
                chunk = _chunk(delta)
                if run_manager:
                    await run_manager.on_llm_new_token(delta.text, chunk=chunk)
                yield chunk


def _chunk(delta: Delta) -> GenerationChunk:
    if delta.report is None:
        return GenerationChunk(text=delta.text)
    info = {"kvrag": delta.report.to_dict(), "finish_reason": delta.finish_reason}
    return GenerationChunk(text=delta.text, generation_info=info)
