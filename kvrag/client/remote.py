"""RemoteEngine: the methods of BlendEngine, on a server."""

from __future__ import annotations

import asyncio
import functools
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import aclosing, closing
from dataclasses import fields
from typing import Any, NoReturn

from kvrag.client.answer import AnswerBuilder
from kvrag.client.connection import Body, Connection
from kvrag.client.servers import AnswerRequest, KvragServe, Server, Vllm, messages_of
from kvrag.client.texts import NamedTexts
from kvrag.config import (
    Grammar,
    Sampling,
    check_controller,
    check_names,
    check_namespace,
    check_policy,
    check_ratio,
    check_timeout,
)
from kvrag.errors import ServerError, SettingError
from kvrag.types import Answer, Delta, Messages, WarmReport


class RemoteEngine:
    """Answers prompts on a server: `kvrag serve`, or vLLM with kvrag's KV connector. Thread-safe.

    The methods are those of `BlendEngine`. Nothing is sent before the first call. The kind of the server is detected
    then. Needs the extra `kvrag[client]`.

    With `kvrag serve`, the namespace is that of the API key. Times in reports are the server's.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = None,
        max_retries: int | None = None,
    ) -> None:
        """Create an engine for a server.

        Args:
            base_url: Its URL, such as "http://localhost:8000"; a trailing "/v1" makes no difference.
            model: Name of the model on the server; None = the first one.
            api_key: Its API key; None = the environment variable KVRAG_API_KEY, if set.
            timeout: Seconds until a request fails without a response; None = 600.
            max_retries: Number of retries of requests that failed, or were refused because the server is busy;
                None = 2.

        Raises:
            SettingError: A value is out of range.
        """
        self._connection = Connection(base_url, api_key, timeout, max_retries)
        self._model = model
        self._lock = threading.Lock()
        self._known_server: Server | None = None

    @classmethod
    def shared(cls, base_url: str, model: str | None = None, **settings: Any) -> RemoteEngine:
        """Like the constructor, but equal settings share one engine and its connections."""
        return _shared(base_url, model, **settings)

    # ---------------------------------------------------------------- the server

    @property
    def model_name(self) -> str:
        """Name of the model."""
        return self._server().model

    @property
    def context_window(self) -> int:
        """Size of the model's context window in tokens."""
        return self._server().window

    @property
    def has_chat_template(self) -> bool:
        """True if the model answers messages."""
        return self._server().has_chat_template

    def _server(self) -> Server:
        with self._lock:
            if self._known_server is None:
                self._known_server = self._find()
            return self._known_server

    def _find(self) -> Server:
        connection = self._connection
        listed = connection.call("GET", "/v1/models")
        entries = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) and "id" in entry for entry in entries):
            raise connection.not_a_server()
        by_name = {entry["id"]: entry for entry in entries}
        name = next(iter(by_name), None) if self._model is None else self._model
        if name not in by_name:
            known = ", ".join(map(repr, by_name)) or "none"
            raise ServerError(f"unknown model {name!r:.280}: {connection.root} has {known}", 404)
        owner = by_name[name].get("owned_by")
        if owner == "kvrag":
            return KvragServe(connection, by_name[name])
        if owner == "vllm" or self._has_version():
            return Vllm(connection, by_name[name])
        raise ServerError(
            f"{connection.root} is neither kvrag serve nor vLLM (its models are owned by {owner!r}): use the class "
            "that your framework has for OpenAI's API"
        )

    def _has_version(self) -> bool:
        """Return whether it is a vLLM whose models have another owner, for example behind a gateway."""
        try:
            response = self._connection.call("GET", "/version")
        except ServerError:
            return False
        return isinstance(response, dict) and "version" in response

    # ---------------------------------------------------------------- ingestion

    def warm(
        self,
        texts: Iterable[str],
        *,
        document: str | Sequence[str] = "",
        sources: str | Sequence[str] | None = None,
        namespace: str = "",
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> WarmReport:
        """Encode every chunk that the server's store lacks; see `BlendEngine.warm`.

        Many texts are sent in several requests. If one of them fails, chunks encoded before are kept: call it again.

        Args:
            texts, document, sources, namespace: As in `BlendEngine.warm`.
            progress: Called with (texts done, texts to do) after each request.
        """
        named = NamedTexts.of(texts, document, sources)
        only = document if isinstance(document, str) else None
        return _sum(list(self._server().warm(named, only, check_namespace(namespace), progress)))

    def prefetch(self, texts: Iterable[str], *, namespace: str = "") -> None:
        """Do nothing: a server reads ahead the chunks that it retrieves itself."""

    def forget(self, document: str, *, namespace: str = "") -> int:
        """Delete a document's chunks unless another document has them; return how many were deleted."""
        if not document:
            raise SettingError("forget needs the name of a document")
        check_names(document)
        return self._server().forget(document, check_namespace(namespace))

    def documents(self, prefix: str = "", *, namespace: str = "") -> list[str]:
        """Return the names of the documents that start with `prefix` and have chunks, sorted."""
        check_names(prefix)
        return self._server().documents(prefix, check_namespace(namespace))

    async def awarm(
        self,
        texts: Iterable[str],
        *,
        document: str | Sequence[str] = "",
        sources: str | Sequence[str] | None = None,
        namespace: str = "",
    ) -> WarmReport:
        """Like `warm`, off the event loop."""
        return await asyncio.to_thread(self.warm, texts, document=document, sources=sources, namespace=namespace)

    # ---------------------------------------------------------------- answers

    def stream(self, prompt: str | Messages, **settings: Any) -> Generator[Delta, None, None]:
        """Stream an answer; arguments as in `BlendEngine.stream`. Closing the stream ends the work on the server.

        `timeout` is the time without a response, as in the constructor.

        Yields:
            Deltas; the last one has `finish_reason`, the report, and the number of tokens of the answer.

        Raises:
            PromptError, ContextWindowError, SettingError: The server refuses the prompt or a setting.
            ServerError: The server cannot be reached, refuses the request, or fails.
        """
        return self._stream(_question(prompt, **settings))

    def _stream(self, question: AnswerRequest) -> Generator[Delta, None, None]:
        builder, tag = AnswerBuilder(question.is_forced), uuid.uuid4().hex
        server, request = self._prepare(question, tag)
        with closing(self._connection.stream(request)) as events:
            for event in events:
                yield from _visible(builder.add(event))
        yield builder.last(server.report(builder.extras, builder.usage, tag))

    def generate(self, prompt: str | Messages, **settings: Any) -> Answer:
        """Return the complete answer; arguments as in `BlendEngine.stream`."""
        question = _question(prompt, **settings)
        server, request = self._prepare(question, "")
        builder = AnswerBuilder(question.is_forced)
        builder.add(self._connection.answer(request))
        return builder.answer(server.report(builder.extras, builder.usage, ""))

    async def astream(self, prompt: str | Messages, **settings: Any) -> AsyncGenerator[Delta, None]:
        """Like `stream`, without blocking the event loop."""
        question, tag = _question(prompt, **settings), uuid.uuid4().hex
        builder = AnswerBuilder(question.is_forced)
        server, request = await asyncio.to_thread(self._prepare, question, tag)
        async with aclosing(self._connection.astream(request)) as events:
            async for event in events:
                for delta in _visible(builder.add(event)):
                    yield delta
        yield builder.last(await asyncio.to_thread(server.report, builder.extras, builder.usage, tag))

    async def agenerate(self, prompt: str | Messages, **settings: Any) -> Answer:
        """Like `generate`, without blocking the event loop."""
        question = _question(prompt, **settings)
        server, request = await asyncio.to_thread(self._prepare, question, "")
        builder = AnswerBuilder(question.is_forced)
        builder.add(await self._connection.aanswer(request))
        return builder.answer(server.report(builder.extras, builder.usage, ""))

    def _prepare(self, question: AnswerRequest, tag: str) -> tuple[Server, Body]:
        server = self._server()
        limit: Body = {} if question.timeout is None else {"timeout": question.timeout}
        return server, {**server.request(question, tag), **limit}

    def as_prompt(self, text: str) -> str | Messages:
        """Return a text as one user message, or unchanged if the model has no chat template."""
        return [{"role": "user", "content": text}] if self.has_chat_template else text

    def count_tokens(self, prompt: str | Messages, *, tools: Sequence[dict[str, Any]] | None = None) -> int:
        """Return the length of the prompt that `stream` would answer, in tokens."""
        body: Body = {"prompt": prompt} if isinstance(prompt, str) else {"messages": messages_of(prompt)}
        if tools:
            body["tools"] = list(tools)
        return int(self._tokenize(body)["count"])

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text by the model's own tokenizer, without BOS."""
        return list(self._tokenize({"prompt": text, "add_special_tokens": False})["tokens"])

    def _tokenize(self, body: Body) -> Body:
        response = self._connection.call("POST", "/tokenize", {"model": self._server().model, **body})
        if not isinstance(response, dict) or "count" not in response:
            raise self._connection.not_a_server()
        return response

    # ---------------------------------------------------------------- what needs the model

    def explain(self, *_: Any, **__: Any) -> NoReturn:
        """Raise SettingError: this needs the model."""
        raise _needs_the_model("explain", "kvrag explain")

    def calibrate(self, *_: Any, **__: Any) -> NoReturn:
        """Raise SettingError: this needs the model."""
        raise _needs_the_model("calibrate", "kvrag calibrate")

    def reset_calibration(self) -> NoReturn:
        """Raise SettingError: this needs the store."""
        raise _needs_the_model("reset_calibration", "kvrag calibrate --reset")

    def verify(self) -> NoReturn:
        """Raise SettingError: this needs the model."""
        raise _needs_the_model("verify", "kvrag verify")

    def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        self._connection.close()

    def __deepcopy__(self, memo: object) -> RemoteEngine:
        return self  # copies of objects that hold an engine share it

    def __getstate__(self) -> Any:
        raise TypeError("an engine cannot be pickled: create one in each process, or pass base_url= instead")

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_shared = functools.lru_cache(maxsize=64)(RemoteEngine)

_SAMPLING = {row.name for row in fields(Sampling)} - {"stop", "logprobs"}


def _question(
    prompt: str | Messages,
    *,
    documents: Sequence[str] | None = None,
    namespace: str = "",
    ratio: float | None = None,
    policy: str | None = None,
    controller: str | None = None,
    stop: Sequence[str] = (),
    tools: Sequence[dict[str, Any]] | None = None,
    tool_choice: str | dict[str, Any] | None = None,
    grammar: Grammar | None = None,
    template: dict[str, Any] | None = None,
    timeout: float | None = None,
    **sampling: Any,
) -> AnswerRequest:
    """Return the arguments of `BlendEngine.stream`, checked."""
    if unknown := sorted(set(sampling) - _SAMPLING):
        raise SettingError(f"unknown setting {', '.join(unknown)}: stream() accepts {', '.join(sorted(_SAMPLING))}")
    if isinstance(stop, str):
        raise SettingError("stop must be a sequence of strings, not one string")
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise SettingError(f"tools must be a list of dicts, got {tools!r:.80}")
    check_timeout(timeout)
    blend: Body = {"ratio": ratio, "policy": policy, "controller": controller}
    for name, check in (("ratio", check_ratio), ("policy", check_policy), ("controller", check_controller)):
        if blend[name] is not None:
            check(blend[name])
    return AnswerRequest(
        prompt=prompt,
        sampling=Sampling(stop=tuple(stop), **sampling),
        documents=NamedTexts.of(documents or (), "", None).texts,
        namespace=check_namespace(namespace),
        blend=blend,
        tools=tools or (),
        tool_choice=tool_choice,
        grammar=grammar,
        template=template or {},
        timeout=timeout,
    )


def _visible(delta: Delta) -> Sequence[Delta]:
    return (delta,) if delta.text or delta.call_pieces or delta.tool_calls or delta.invalid_calls else ()


def _sum(reports: list[WarmReport]) -> WarmReport:
    if len(reports) == 1:
        return reports[0]
    names = [row.name for row in fields(WarmReport) if row.name != "warnings"]
    totals: dict[str, Any] = {name: sum(getattr(report, name) for report in reports) for name in names}
    return WarmReport(
        **totals, warnings=tuple(dict.fromkeys(warning for report in reports for warning in report.warnings))
    )


def _needs_the_model(method: str, command: str) -> SettingError:
    return SettingError(
        f"{method} needs the model and its store: run it where they are, with engine.{method}() or `{command}`"
    )
