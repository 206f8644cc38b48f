"""RemoteEngine: the methods of BlendEngine, on a server."""

from __future__ import annotations

import functools
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import asdict, replace
from typing import Any, NoReturn, Unpack

from kvrag.blocking import iterate, run
from kvrag.client.connection import Body, Connection
from kvrag.client.servers import Server, find_server, warm
from kvrag.client.wire import deltas_of, messages_of
from kvrag.config import WarmOptions, check_names, check_namespace, checked_answer
from kvrag.errors import SettingError
from kvrag.progress import watched
from kvrag.scheduling.bridge import together
from kvrag.types import Answer, Delta, Messages, WarmReport, join


class RemoteEngine(AbstractContextManager["RemoteEngine"]):
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
            api_key: None = the environment variable KVRAG_API_KEY, if set.
            timeout: Seconds until a request fails without a response; None = 600.
            max_retries: Of requests that failed, or were refused because the server is busy; None = 2.
        """
        connect = functools.partial(Connection, base_url, api_key, timeout, max_retries)
        self._blocking, self._async = connect(is_blocking=True), connect(is_blocking=False)
        self._model = model
        self._found: Server | None = None

    @classmethod
    @functools.lru_cache(maxsize=64)
    def shared(cls, base_url: str, model: str | None = None, **settings: Any) -> RemoteEngine:
        """Like the constructor, but equal settings share one engine and its connections."""
        return cls(base_url, model, **settings)

    # ---------------------------------------------------------------- the server

    @property
    def model_name(self) -> str:
        """Name of the model on the server."""
        return self._served.name

    @property
    def context_window(self) -> int:
        """Size of the model's context window in tokens."""
        return self._served.window

    @property
    def _served(self) -> Server:
        return run(self._server(self._blocking))

    async def _server(self, connection: Connection) -> Server:
        if self._found is None:  # two threads may find the same
            self._found = await find_server(connection, self._model)
        return replace(self._found, connection=connection)

    # ---------------------------------------------------------------- ingestion

    def warm(
        self,
        texts: Iterable[str],
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[WarmOptions],
    ) -> WarmReport:
        """Encode every chunk that the server's store lacks; see `BlendEngine.warm`.

        Many texts are sent in several requests. `progress` is called with (texts done, texts to do) after each one, and
        every few seconds (`kvrag serve`). If a request fails, chunks encoded before are kept: call it again.
        """
        with watched(progress, "encoding", "texts") as update:
            return run(warm(self._served, texts, update, **options))

    async def awarm(self, texts: Iterable[str], **options: Unpack[WarmOptions]) -> WarmReport:
        """Like `warm`, without blocking the event loop. Cancelling it ends the encoding on the server."""
        return await warm(await self._server(self._async), texts, **options)

    def forget(self, document: str, *, namespace: str = "") -> int:
        """Delete a document's chunks unless another document has them; return how many were deleted."""
        if not document:
            raise SettingError("forget needs the name of a document")
        check_names(document)
        done = run(self._served.command("forget", check_namespace(namespace), document=document))
        return int(done.get("removed") or done.get("forgotten") or 0)

    def documents(self, prefix: str = "", *, namespace: str = "") -> list[str]:
        """Return the names of the documents that start with `prefix` and have chunks, sorted."""
        check_names(prefix)
        found = run(self._served.command("documents", check_namespace(namespace), prefix=prefix))
        return list(found.get("documents") or ())

    # ---------------------------------------------------------------- answers

    def stream(self, prompt: str | Messages, **options: Any) -> Generator[Delta, None, None]:
        """Stream an answer; arguments as in `BlendEngine.stream`. Closing the stream ends the work on the server.

        `timeout` is the time without a response, as in the constructor. A server that cannot be reached, refuses the
        request, or fails, is a ServerError.
        """
        return iterate(self._deltas(self._blocking, prompt, _checked(options), is_stream=True))

    def generate(self, prompt: str | Messages, **options: Any) -> Answer:
        """Return the complete answer; arguments as in `BlendEngine.stream`."""
        return join(iterate(self._deltas(self._blocking, prompt, _checked(options), is_stream=False)))

    def generate_batch(self, prompts: Sequence[str | Messages], **options: Any) -> list[Answer]:
        """Return the complete answers to several prompts, which are sent at the same time; see `BlendEngine`.

        After an error in one of the answers, those that have not begun are not requested.
        """
        given = _checked(options)
        answers: list[list[Delta]] = [[] for _ in prompts]
        streams = [iterate(self._deltas(self._blocking, prompt, given, is_stream=False)) for prompt in prompts]
        for number, delta in together(streams):
            answers[number].append(delta)
        return [join(answer) for answer in answers]

    def astream(self, prompt: str | Messages, **options: Any) -> AsyncGenerator[Delta, None]:
        """Like `stream`, without blocking the event loop."""
        return self._deltas(self._async, prompt, _checked(options), is_stream=True)

    async def agenerate(self, prompt: str | Messages, **options: Any) -> Answer:
        """Like `generate`, without blocking the event loop. Cancelling it ends the work on the server."""
        return join([delta async for delta in self._deltas(self._async, prompt, _checked(options), False)])

    async def _deltas(
        self, connection: Connection, prompt: str | Messages, options: Body, is_stream: bool
    ) -> AsyncGenerator[Delta, None]:
        server, tag = await self._server(connection), uuid.uuid4().hex if is_stream else ""
        responses = connection.answers(await server.body(prompt, options, tag), options["timeout"])
        is_forced = options["tool_choice"] not in (None, "auto", "none")
        deltas = deltas_of(responses, is_forced, functools.partial(server.report, tag=tag))
        async with aclosing(responses), aclosing(deltas):
            async for delta in deltas:
                yield delta

    def as_prompt(self, text: str) -> str | Messages:
        """Return a text as one user message, or unchanged if the model has no chat template."""
        return [{"role": "user", "content": text}] if self._served.has_chat_template else text

    def count_tokens(self, prompt: str | Messages, *, tools: Sequence[dict[str, Any]] | None = None) -> int:
        """Return the length of the prompt that `stream` would answer, in tokens."""
        body: Body = {"prompt": prompt} if isinstance(prompt, str) else {"messages": messages_of(prompt)}
        return len(run(self._served.tokenize(body | {"tools": list(tools)} if tools else body)))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text by the model's own tokenizer, without BOS."""
        return run(self._served.tokenize({"prompt": text, "add_special_tokens": False}))

    # ---------------------------------------------------------------- what needs the model

    def explain(self, *_: Any, **__: Any) -> NoReturn:
        """Raise SettingError: this needs the model."""
        raise SettingError(
            "explain, calibrate and verify need the model and its store: run it where they are, with the method of a "
            "BlendEngine or with `kvrag explain` or `kvrag verify`"
        )

    calibrate = reset_calibration = verify = explain

    def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        self._blocking.close()  # those of an event loop end with it

    def __deepcopy__(self, memo: object) -> RemoteEngine:
        return self  # copies of objects that hold an engine share it

    def __getstate__(self) -> Any:
        raise TypeError("an engine cannot be pickled: create one in each process, or pass base_url= instead")

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked(options: Mapping[str, Any]) -> Body:
    """Return the options of an answer, as in `BlendEngine.stream`, and defaults; raise SettingError if one is wrong."""
    given, _, sampling = checked_answer(options)
    if sampling.logprobs is not None:
        raise SettingError("logprobs are not read from servers: leave them out")
    return given | asdict(sampling)
