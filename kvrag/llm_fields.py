"""Pydantic fields of the frameworks' LLM classes."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, field_validator, model_validator

from kvrag.config import renamed
from kvrag.engine import BlendEngine
from kvrag.llm import AnswerSettings, LazyEngine, LLMBase, LLMSettings


def _or_default(max_tokens: Any) -> Any:
    return AnswerSettings.max_tokens if max_tokens is None else max_tokens  # as in the frameworks' other classes


class LLMFields(BaseModel, LLMBase):
    """The fields of `kvrag.LLMSettings`, validated.

    Creating an object is cheap: the model is loaded on the first answer and shared by all objects with equal settings.

    A framework's class inherits from the framework's class first and from this one second, and implements `_text` and
    `_source`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    engine: BlendEngine | None = Field(default=None, exclude=True, repr=False)
    timeout: float | None = Field(default=None, exclude=True)
    max_retries: int | None = Field(default=None, exclude=True)
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)

    _lazy: LazyEngine = PrivateAttr(default_factory=LazyEngine)
    _plain = field_validator("model", "store", "dtype", mode="before")(LLMSettings.plain)
    _length = field_validator("max_tokens", mode="before")(_or_default)

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, given: Any) -> Any:
        return renamed(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        self._lazy.settings_of(self)
        return self
