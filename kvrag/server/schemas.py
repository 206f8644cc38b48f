"""Request schemas of OpenAI's API, with kvrag's extensions.

Unknown fields are rejected, never ignored: they could change the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from kvrag.config import CONTROLLERS, POLICIES, Grammar
from kvrag.server.errors import ApiError
from kvrag.server.settings import ServerSettings

Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Request(BaseModel):
    """Base of all requests: no conversion of JSON types, unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class StreamOptions(Request):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class Answering(Request):
    """Shared fields of `/v1/chat/completions` and `/v1/completions`."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    response_format: dict[str, Any] | None = None

    # kvrag's extensions
    ratio: Annotated[Number, Field(ge=0, le=1)] | None = None
    policy: Literal[POLICIES] | None = None  # type: ignore[valid-type]
    controller: Literal[CONTROLLERS] | None = None  # type: ignore[valid-type]
    chunks: Annotated[list[str], Field(max_length=1000)] | None = None

    # accepted with their default values only
    n: int | None = None
    logprobs: bool | int | None = None
    logit_bias: dict[str, Any] | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None

    # accepted without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def check(self) -> None:
        """Raise ApiError for a known but unsupported option."""
        wrong = {
            "n": self.n not in (None, 1),
            "logprobs": self.logprobs not in (None, False, 0),
            "logit_bias": bool(self.logit_bias),
            "frequency_penalty": bool(self.frequency_penalty),
            "presence_penalty": bool(self.presence_penalty),
        }
        ways = {"n": "send one request per answer", "frequency_penalty": "use repetition_penalty"}
        ways["presence_penalty"] = ways["frequency_penalty"]
        for name in (name for name, is_wrong in wrong.items() if is_wrong):
            message = f"{name}={getattr(self, name)!r:.80} is not supported: {ways.get(name, 'leave it out')}"
            raise ApiError(400, message, "unsupported_value", name)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options require stream=true", "invalid_value", "stream_options")

    def sampling(self, settings: ServerSettings) -> dict[str, Any]:
        """Return the arguments of `BlendEngine.stream`.

        Raises:
            ApiError, SettingError: A value is out of range.
        """
        wanted = self.longest() or settings.max_tokens
        if wanted > settings.token_limit:
            message = f"{wanted} tokens exceed this server's limit of {settings.token_limit}: request fewer"
            raise ApiError(400, message, "invalid_value", "max_tokens")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        format_ = self.response_format
        return {
            "max_new_tokens": wanted,
            "temperature": settings.temperature if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
            "seed": None if self.seed is None else self.seed % (1 << 64),  # OpenAI allows negative seeds
            "stop": stop,
            "ratio": self.ratio,
            "policy": self.policy,
            "controller": self.controller,
            "grammar": None if format_ is None else Grammar.of_response_format(format_),
        }

    def longest(self) -> int | None:
        """Return the requested maximum number of tokens, or None."""
        return self.max_tokens


class Message(BaseModel):
    """A message; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message in the form of chat templates."""
        said: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        said["content"] = self.content or ""
        if self.tool_calls:
            said["tool_calls"] = self.tool_calls
        if self.role == "tool":
            said |= {name: value for name in ("tool_call_id", "name") if (value := getattr(self, name)) is not None}
        return said


class Document(Request):
    """A chunk retrieved by the client."""

    text: str
    id: str = ""


class Retrieval(Request):
    """Settings of the server-side retrieval."""

    top_k: Annotated[int, Field(ge=1, le=100)] | None = None
    around: Annotated[int, Field(ge=0, le=10)] | None = None


class TemplateVariables(Request):
    """Chat template variables that a client may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Literal["minimal", "low", "medium", "high"] | None = None


class ChatRequest(Answering):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None

    # kvrag's extensions
    documents: Annotated[list[str | Document], Field(max_length=1000)] | None = None
    retrieval: Retrieval | None = None
    chat_template_kwargs: TemplateVariables | None = None

    def longest(self) -> int | None:
        """See Answering.longest."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Answering):
    """The body of `/v1/completions`. The prompt is used unchanged, control tokens included."""

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None

    def text(self) -> str:
        """Return the prompt."""
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if len(prompts) != 1 or not isinstance(prompts[0], str):
            raise ApiError(400, "prompt must be one string: send one request per prompt", "unsupported_value", "prompt")
        return prompts[0]


class TokenizeRequest(Request):
    """The body of `/tokenize`, in vLLM's form."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        """Raise ApiError unless there is either a prompt or messages."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "send either prompt or messages", "invalid_value", "prompt")
        if self.prompt is not None and self.tools:
            raise ApiError(400, "tools need messages", "invalid_value", "tools")


class EmbeddingRequest(Request):
    """The body of `/v1/embeddings`."""

    model: str
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None

    def texts(self) -> list[str]:
        """Return the texts to embed."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        if not texts or len(texts) > 2048 or any(not isinstance(text, str) or not text for text in texts):
            raise ApiError(
                400,
                "input must be 1 to 2048 non-empty strings; token ids are not supported "
                "(in LangChain: check_embedding_ctx_length=False)",
                "invalid_value",
                "input",
            )
        return [text for text in texts if isinstance(text, str)]


class NewDocument(Request):
    """The body of `POST /v1/corpus`."""

    text: str
    id: str | None = None


class NewChunks(Request):
    """The body of `POST /v1/chunks`; see `BlendEngine.warm`."""

    texts: list[str]
    document: str | list[str] = ""
    sources: str | list[str] | None = None
