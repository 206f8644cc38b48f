"""Pydantic fields of the frameworks' LLM classes."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, field_validator, model_validator

from kvrag.engine import BlendEngine
from kvrag.llm import LazyEngine, LLMBase, LLMSettings


class LLMFields(BaseModel, LLMBase):
    """An engine, or a model and a store to create one, and the settings of its answers, validated.

    The settings are the fields of `kvrag.LLMSettings`. Creating an object is cheap: the model is loaded on the first
    answer and shared by all objects with equal settings.

    A framework's class inherits from the framework's class first and from this one second, and implements `_text` and
    `_source`.

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
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)

    _lazy: LazyEngine = PrivateAttr(default_factory=LazyEngine)
    _plain = field_validator("model", "store", "dtype", mode="before")(LLMSettings.plain)
    _length = field_validator("max_tokens", mode="before")(LLMSettings.length)

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        LLMSettings.of(self)
        return self
