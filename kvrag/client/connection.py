"""HTTP to one server, by OpenAI's SDK. Failures are raised as kvrag's errors, with advice."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from kvrag.blocking import value_of
from kvrag.config import check_number, check_timeout
from kvrag.errors import (
    ContextWindowError,
    KvragError,
    PromptError,
    ServerError,
    SettingError,
    StoreFullError,
    needing,
)

KEY_VARIABLE = "KVRAG_API_KEY"

Body = dict[str, Any]
"""JSON of a request or a response."""

# in vLLM's messages, which have no code for it
_TOO_LONG = re.compile(r"maximum (context|model) length|max_model_len|context_length_exceeded", re.IGNORECASE)
_ABOUT_PROMPT = ("prompt", "messages", "input", "input_text", "input_tokens")
_ADVICE = {
    401: "pass the server's key as api_key= (--api-key)",
    403: "pass the server's key as api_key= (--api-key)",
    404: "see /v1/models for its models, and check base_url=",
    408: "retry, or send less",
    413: "send less at once, or raise the server's limit",
    429: "the server is busy: retry later, or raise max_retries=",
    500: "see the server's log",
    504: "request less, or raise the server's --timeout",
}


def root_of(base_url: str) -> str:
    """Return a server's URL without a trailing `/v1`; raise SettingError if it is not one."""
    parts = urlsplit(base_url) if isinstance(base_url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise SettingError(f"base_url must be the URL of a server such as http://localhost:8000, got {base_url!r:.200}")
    if parts.username or parts.password:
        raise SettingError("base_url must not contain a password: pass api_key=")
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


class Connection:
    """A server, and the SDK's clients for it: a blocking one, or one per event loop. Thread-safe.

    The coroutines of a blocking connection never suspend; see `kvrag.blocking`.
    """

    def __init__(
        self, base_url: str, api_key: str | None, timeout: float | None, max_retries: int | None, is_blocking: bool
    ) -> None:
        self._lock = threading.Lock()
        # by process and loop; None = the blocking one
        self._clients: dict[tuple[int, asyncio.AbstractEventLoop | None], Any] = {}
        self.root = root_of(base_url)  # without /v1
        check_timeout(timeout)
        if max_retries is not None:
            check_number("max_retries", max_retries, whole=True)
        with needing("kvrag[client]"):
            import openai
        self._openai = openai
        # the SDK would otherwise send the key of OpenAI's own service
        key = api_key or os.environ.get(KEY_VARIABLE) or "none"
        if not key.isascii():  # it is sent in a header
            raise SettingError("an API key must be non-empty ASCII without white space")
        options = {"timeout": timeout, "max_retries": max_retries}
        self._settings: Body = {name: value for name, value in options.items() if value is not None}
        self._settings |= {"base_url": f"{self.root}/v1", "api_key": key}
        self._is_blocking = is_blocking

    def _client(self) -> Any:
        loop = None if self._is_blocking else asyncio.get_running_loop()
        own = os.getpid(), loop  # two processes must not share a connection
        with self._lock:
            for process, other in list(self._clients):
                if process == os.getpid() and other is not None and other.is_closed():
                    del self._clients[process, other]
            if own not in self._clients:
                kind = self._openai.OpenAI if loop is None else self._openai.AsyncOpenAI
                self._clients[own] = kind(**self._settings)
            return self._clients[own]

    def close(self) -> None:
        """Close the connections of a blocking client."""
        with self._lock:
            client = self._clients.pop((os.getpid(), None), None)
        if client is not None:
            client.close()

    async def send(self, method: str, path: str, **arguments: Any) -> Body:
        """Return the JSON of a response. Further arguments are those of the SDK's `get`, `post` and `delete`."""
        return self._checked(await self._send(method, path, **arguments))

    async def answers(self, body: Body, seconds: float | None) -> AsyncGenerator[Body, None]:
        """Yield the response to a request for an answer; of a streamed answer, its events.

        Closing this ends the answer on the server. `seconds` = timeout; None = that of the connection.
        """
        options = {} if seconds is None else {"timeout": seconds}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        if not body.get("stream"):
            yield await self.send("post", path, body=body, options=options)
            return
        kind, step = (self._openai.Stream, next) if self._is_blocking else (self._openai.AsyncStream, anext)
        events = await self._send("post", path, body=body, options=options, stream=True, stream_cls=kind[object])
        try:
            while True:
                with self._as_our_errors():
                    event = await value_of(step(events, None))
                if event is None:
                    return
                yield self._checked(event)
        finally:
            await value_of(events.close())

    async def _send(self, method: str, path: str, **arguments: Any) -> Any:
        call = getattr(self._client(), method)
        if "body" in arguments:  # lone surrogates are escaped, as in JSON: the server says where they are
            arguments["body"] = json.dumps(arguments["body"], ensure_ascii=False).encode(errors="backslashreplace")
        with self._as_our_errors():
            return await value_of(call(f"{self.root}{path}", cast_to=object, **arguments))

    def _checked(self, response: Any) -> Body:
        if not isinstance(response, dict):  # the SDK returns what is not JSON as text
            raise self.not_a_server()
        return response

    # ---------------------------------------------------------------- errors

    def not_a_server(self) -> ServerError:
        """Return the error for responses that are not OpenAI's."""
        return ServerError(f"{self.root} does not answer as an OpenAI-compatible server: check base_url=")

    @contextmanager
    def _as_our_errors(self) -> Iterator[None]:
        openai = self._openai
        try:
            yield
        except openai.APITimeoutError as error:
            raise ServerError(f"{self.root} did not answer in time: raise timeout=, or request less") from error
        except openai.APIConnectionError as error:
            reason = error.__cause__ or error
            message = f"cannot reach {self.root} ({_line(reason)}): start the server, or check base_url="
            raise ServerError(message) from error
        except openai.APIError as error:  # without a status: an event of a stream
            raise self._refused(getattr(error, "status_code", None), error.body, error.message) from error
        except Exception as error:  # a response that is not JSON, or a connection that ends within an event
            raise ServerError(f"the response of {self.root} broke off or is damaged ({_line(error)}): retry") from error

    def _refused(self, status: int | None, content: object, message: str) -> KvragError:
        """Return the error for an error object of the server; `status` is None within a stream."""
        details: Mapping[str, Any] = content if isinstance(content, Mapping) else {"message": content}
        code, param = details.get("code"), details.get("param")
        text = _line(details.get("message") or details.get("detail") or message)
        if status is None:
            status = code if isinstance(code, int) else 400 if details.get("type") == "invalid_request_error" else None
        if code == "context_length_exceeded" or (status in (400, 422) and _TOO_LONG.search(text)):
            return ContextWindowError(text)
        if status in (400, 422):
            is_setting = param and re.split(r"[.\[]", str(param))[0] not in _ABOUT_PROMPT  # such as messages[0].role
            return SettingError(text) if is_setting else PromptError(text)
        if status == 507:
            return StoreFullError(f"{self.root}: {text}")
        advice = f": {_ADVICE[status]}" if status in _ADVICE else ""
        return ServerError(f"{self.root} refused the request ({status or 'in mid-stream'}: {text}){advice}", status)


def _line(error: object) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
