"""Request schemas of OpenAI's API, with kvrag's extensions.

Unknown fields are rejected, never ignored: they could change the answer. A field that is null is absent.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    create_model,
    model_validator,
)

from kvrag.config import ANSWER_SETTINGS, DECLARED, Grammar, check_depth, check_option, renamed
from kvrag.server.api_errors import ApiError, invalid
from kvrag.server.settings import ServerSettings

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

Many = Annotated[list[T], Field(fail_fast=True)]  # a million wrong items are one error
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")]
Verbosity = Literal["low", "medium", "high"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

_MOST_CHOICES = 128  # of a request, as by OpenAI

# options that the engine has under the same name
_OPTIONS = ("top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", *ANSWER_SETTINGS)


class Part(BaseModel):
    """Base of parts of requests: no conversion of JSON types, unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, sent: Any) -> Any:
        """Drop fields that are null."""
        if not isinstance(sent, dict):
            return sent
        return {name: value for name, value in renamed(sent).items() if value is not None}


class Body(Part):
    """Base of all requests: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


def _type_of(name: str) -> Any:
    """Return the type of an option that its own check accepts."""
    about = DECLARED[name].metadata["about"]
    return Annotated[Any, AfterValidator(partial(check_option, name)), Field(description=about)]


if TYPE_CHECKING:
    Tunable = Body
else:
    Tunable = create_model("Tunable", __base__=Body, **{name: (_type_of(name), None) for name in _OPTIONS})


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class Common(Tunable):
    """Shared fields of all requests for answers."""

    model: str
    stream: bool | None = False
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None  # with OpenAI's limits
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None

    # kvrag's extension
    chunks: Annotated[Many[str], Field(max_length=1000)] | None = None

    # accepted without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None


class Document(Body):
    """A chunk retrieved by the client."""

    text: str
    id: str = ""


class Retrieval(Body):
    """Settings of the server-side retrieval."""

    top_k: Annotated[int, Field(ge=1, le=100)] | None = None
    around: Annotated[int, Field(ge=0, le=10)] | None = None


class TemplateVariables(Body):
    """Chat template variables that a client may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Effort | None = None


class Contextual(Body):
    """Shared fields of requests with messages."""

    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    # kvrag's extensions
    documents: Annotated[Many[str | Document], Field(max_length=1000)] | None = None
    retrieval: Retrieval | None = None
    chat_template_kwargs: TemplateVariables | None = None


class AnswerFields(Common):
    """Shared fields of `/v1/chat/completions` and `/v1/completions`."""

    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logit_bias: dict[TokenId, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] = 1  # answers per prompt
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[Many[Stop], Field(max_length=16)] | None = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options require stream=true", "invalid_value", "stream_options")
        return self

    def options(self, settings: ServerSettings) -> dict[str, Any]:
        """Return the arguments of `BlendEngine.stream`, but for the seed."""
        wanted = getattr(self, "max_completion_tokens", None) or self.max_tokens or settings.max_tokens
        return {
            **{name: getattr(self, name) for name in ("top_p", *_OPTIONS)},
            "max_new_tokens": min(wanted, settings.token_limit),
            "temperature": settings.temperature if self.temperature is None else self.temperature,
            "logit_bias": {int(token): value for token, value in (self.logit_bias or {}).items()} or None,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop or [],
            "grammar": None if self.response_format is None else Grammar.of_response_format(self.response_format),
        }


class Message(Part):
    """A message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Many[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message in the form of chat templates."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.role == "assistant" and (thought := self.reasoning_content or self.reasoning):
            message["reasoning_content"] = thought
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        if self.role == "tool":
            names = {"tool_call_id": self.tool_call_id, "name": self.name}
            message |= {name: value for name, value in names.items() if value is not None}
        return message


class ChatRequest(AnswerFields, Contextual):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Many[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Effort | None = None
    modalities: Many[Literal["text"]] | None = None

    # accepted without effect
    verbosity: Verbosity | None = None
    prediction: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs require logprobs=true", "invalid_value", "top_logprobs")
        return self

    def options(self, settings: ServerSettings) -> dict[str, Any]:
        """See AnswerFields.options."""
        options = super().options(settings)
        if self.tools or self.tool_choice not in (None, "auto", "none"):
            options |= {"tools": self.tools, "tool_choice": self.tool_choice}
        options["parallel_tool_calls"] = self.parallel_tool_calls
        options["logprobs"] = self.top_logprobs or 0 if self.logprobs else None
        variables = (self.chat_template_kwargs or TemplateVariables()).model_dump(exclude_none=True)
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            options["reasoning"] = False
        return options | {"template": effort | variables}


class CompletionRequest(AnswerFields):
    """The body of `/v1/completions`. Prompts are used unchanged, control tokens included."""

    # a text or its token ids, or several
    prompt: str | Many[str] | Many[int] | Annotated[Many[Many[int]], Field(max_length=4096)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ApiError(400, "best_of must be equal to n: choose among the answers yourself", "unsupported_value")
        return self

    def options(self, settings: ServerSettings) -> dict[str, Any]:
        """See AnswerFields.options."""
        return super().options(settings) | {"logprobs": self.logprobs}

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts: texts or token ids."""
        prompts: list[Any] = [self.prompt]
        if isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int)):
            prompts = list(self.prompt)
        if not prompts or not all(prompts):
            raise ApiError(400, "the prompt is empty: send a text or token ids", "invalid_value", "prompt")
        if len(prompts) * self.n > _MOST_CHOICES:
            message = f"{len(prompts)} prompts with n={self.n} exceed {_MOST_CHOICES} answers per request"
            raise ApiError(400, f"{message}: send several requests", "invalid_value", "prompt")
        return prompts


class TokenizeRequest(Body):
    """The body of `/tokenize`, in vLLM's form."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    tools: Many[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "send either prompt or messages", "invalid_value", "prompt")
        if self.prompt is not None and self.tools:
            raise ApiError(400, "tools need messages", "invalid_value", "tools")
        return self


class NewChunks(Body):
    """The body of `POST /v1/chunks`; see `BlendEngine.warm`."""

    texts: Many[str]
    document: str | Many[str] = ""
    sources: str | Many[str] | None = None
    skip_invalid: bool = False


def parse(content: bytes, kind: type[M]) -> M:
    """Return the model that JSON describes; raise ApiError if it is not valid."""
    try:
        sent = json.loads(content, parse_float=_number, parse_constant=_number)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON", "invalid_json") from None
    check_depth("the body", sent)
    try:
        return kind.model_validate(sent)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False)) from None


def _number(text: str) -> float:
    """Return a finite number; raise ValueError for NaN, an infinity, and what is one as a float."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number
