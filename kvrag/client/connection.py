"""HTTP to one server, by OpenAI's SDK. Failures are raised as kvrag's errors, with advice."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from kvrag.config import check_timeout
from kvrag.errors import (
    ContextWindowError,
    KvragError,
    PromptError,
    ServerError,
    SettingError,
    StoreFullError,
)

KEY_VARIABLE = "KVRAG_API_KEY"

Body = dict[str, Any]
"""JSON of a request or a response."""

# in vLLM's messages, which have no code for it
_TOO_LONG = re.compile(r"maximum (context|model) length|max_model_len|context_length_exceeded", re.IGNORECASE)
_ABOUT_PROMPT = ("prompt", "messages", "input", "input_text", "input_tokens")


def root_of(base_url: str) -> str:
    """Return a server's URL without a trailing `/v1`.

    Raises:
        SettingError: It is not the URL of a server.
    """
    parts = urlsplit(base_url) if isinstance(base_url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise SettingError(f"base_url must be the URL of a server such as http://localhost:8000, got {base_url!r:.200}")
    if parts.username or parts.password:
        raise SettingError("base_url must not contain a password: pass api_key=")
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


class Connection:
    """A server, and the SDK's clients for it. Thread-safe.

    Attributes:
        root: The server's URL, without `/v1`.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout: float | None, max_retries: int | None) -> None:
        self.root = root_of(base_url)
        check_timeout(timeout)
        if max_retries is not None and not (isinstance(max_retries, int) and max_retries >= 0):
            raise SettingError(f"max_retries must be an integer of at least 0, got {max_retries!r}")
        try:
            import openai
        except ImportError:
            raise KvragError("openai is not installed: pip install 'kvrag[client]'") from None
        self._openai = openai
        # the SDK would otherwise send the key of OpenAI's own service
        key = api_key or os.environ.get(KEY_VARIABLE) or "none"
        self._settings: dict[str, Any] = {"base_url": f"{self.root}/v1", "api_key": key}
        options = {"timeout": timeout, "max_retries": max_retries}
        self._settings |= {name: value for name, value in options.items() if value is not None}
        self._lock = threading.Lock()
        self._client: Any = None
        self._async_clients: dict[asyncio.AbstractEventLoop, Any] = {}

    def close(self) -> None:
        """Close the connections of synchronous calls; those of an event loop end with it."""
        with self._lock:
            client, self._client = self._client, None
            self._async_clients.clear()
        if client is not None:
            client.close()

    # ---------------------------------------------------------------- requests

    def call(self, method: str, path: str, body: Body | None = None, params: Mapping[str, str] | None = None) -> Any:
        """Send a request to an endpoint that OpenAI does not have; return the JSON of the response.

        Args:
            path: Path under the root.
        """
        client, url = self._sync(), f"{self.root}{path}"
        with self._as_our_errors():
            if method == "GET":
                return client.get(url, cast_to=object, options={"params": dict(params or {})})
            if method == "DELETE":
                return client.delete(url, cast_to=object)
            return client.post(url, cast_to=object, body=body)

    def answer(self, request: Body) -> Body:
        """Return the response to a request for an answer; with `messages` to the chat endpoint."""
        client = self._sync()
        with self._as_our_errors():
            return self._plain(_endpoint(client, request).create(**request))

    async def aanswer(self, request: Body) -> Body:
        """Like `answer`, without blocking the event loop."""
        client = self._async()
        with self._as_our_errors():
            return self._plain(await _endpoint(client, request).create(**request))

    def stream(self, request: Body) -> Generator[Body, None, None]:
        """Yield the events of a streamed answer. Closing this ends the answer on the server."""
        client = self._sync()
        with self._as_our_errors():
            events = _endpoint(client, request).create(**request)
        with events:
            iterator = iter(events)
            while True:
                with self._as_our_errors():
                    event = next(iterator, None)
                if event is None:
                    return
                yield self._plain(event)

    async def astream(self, request: Body) -> AsyncGenerator[Body, None]:
        """Like `stream`, without blocking the event loop."""
        client = self._async()
        with self._as_our_errors():
            events = await _endpoint(client, request).create(**request)
        async with events:
            iterator = aiter(events)
            while True:
                with self._as_our_errors():
                    event = await anext(iterator, None)
                if event is None:
                    return
                yield self._plain(event)

    def _sync(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._openai.OpenAI(**self._settings)
            return self._client

    def _async(self) -> Any:
        """Return the client of the running event loop: connections cannot be used in another one."""
        loop = asyncio.get_running_loop()
        with self._lock:
            for other in [other for other in self._async_clients if other.is_closed()]:
                del self._async_clients[other]
            if loop not in self._async_clients:
                self._async_clients[loop] = self._openai.AsyncOpenAI(**self._settings)
            return self._async_clients[loop]

    def _plain(self, response: Any) -> Body:
        if not hasattr(response, "to_dict"):  # the SDK returns what is not JSON as text
            raise self.not_a_server()
        return dict(response.to_dict())

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
        except openai.APIStatusError as error:
            raise self._refused(error.status_code, error.body, error.message) from error
        except openai.APIError as error:  # an event of a stream
            raise self._refused(None, error.body, error.message) from error
        except KvragError:
            raise
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
        advice = {
            401: "pass the server's key as api_key=",
            403: "pass the server's key as api_key=",
            404: f"see {self.root}/v1/models for its models, and check base_url=",
            408: "retry, or send less",
            413: "send less at once, or raise the server's limit",
            429: "the server is busy: retry later, or raise max_retries=",
            500: "see the server's log",
            504: "request less, or raise the server's --timeout",
        }
        suffix = f": {advice[status]}" if status in advice else ""
        return ServerError(f"{self.root} refused the request ({status or 'in mid-stream'}: {text}){suffix}", status)


def _endpoint(client: Any, request: Body) -> Any:
    return client.chat.completions if "messages" in request else client.completions


def _line(error: object) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
