"""The admission queue: limits running and waiting requests, and runs their work off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from itertools import count
from typing import TypeVar

from kvrag.scheduling.lock import is_left
from kvrag.server.api_errors import ApiError

T = TypeVar("T")


class AdmissionQueue:
    """Admits a number of requests at a time, queues some more, and rejects the rest with 429.

    A namespace that has a place gets another one only while a free place is left for each namespace that has none, at
    most half of all places: so no namespace holds the last place of two or more. A free place goes to the namespace
    whose last admission is longest ago, and there to the request that has waited longest. Call all methods on the event
    loop.
    """

    def __init__(self, places: int, queue: int, name: str, namespaces: int = 1) -> None:
        """Create an empty queue that admits `places` requests, while `queue` requests per namespace may wait.

        Args:
            name: Name of its threads.
            namespaces: Number of namespaces that send requests.
        """
        self._places, self._queue, self._namespaces = places, queue, namespaces
        self._running: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []  # with their namespaces, the oldest first
        self._admissions = count(1)
        self._last: Counter[str] = Counter()  # number of each namespace's last admission
        self._pool = ThreadPoolExecutor(places, thread_name_prefix=f"kvrag-{name}")
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_stopping = False

    def running(self, namespace: str) -> int:
        """Return the number of admitted requests of the namespace."""
        return self._running[namespace]

    def waiting(self, namespace: str) -> int:
        """Return the number of waiting requests of the namespace."""
        return sum(name == namespace for name, _ in self._waiting)

    async def run(
        self,
        work: Callable[[], Generator[T, None, None]],
        limit: float,
        namespace: str = "",
        admitted: Callable[[float], None] | None = None,
    ) -> AsyncGenerator[T, None]:
        """Run a generator in a thread once it is admitted, and yield its items.

        Closing or cancelling this stops the work at the next `check_left`, at the latest after its current step. The
        place is freed when the thread ends.

        Args:
            limit: Time limit in seconds, waiting included.
            admitted: Called with the waiting time in seconds.

        Raises:
            ApiError: 429 if too many requests wait, 503 if the server is stopping, 504 after the time limit.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        late = ApiError(504, f"the request took longer than {limit:g} s: request fewer tokens, or send less", "timeout")
        try:
            async with asyncio.timeout(limit):
                await self._admit(namespace)
        except TimeoutError:
            raise late from None
        pieces: asyncio.Queue[T | BaseException | None] = asyncio.Queue()  # None = the end
        abandoned = threading.Event()

        def pump() -> None:
            end: BaseException | None = None
            try:
                with closing(work()) as items:
                    for piece in items:
                        loop.call_soon_threadsafe(pieces.put_nowait, piece)
                        if abandoned.is_set():
                            break
            except BaseException as error:
                end = error
            loop.call_soon_threadsafe(pieces.put_nowait, end)
            loop.call_soon_threadsafe(self._release, namespace)

        context = copy_context()  # with the request's span
        context.run(is_left.set, abandoned.is_set)
        self._pool.submit(context.run, pump)
        if admitted is not None:
            admitted(loop.time() - started)
        timer = loop.call_at(started + limit, pieces.put_nowait, late)
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            timer.cancel()
            abandoned.set()

    async def stop(self) -> None:
        """Reject waiting and new requests; return when all admitted ones are done."""
        self.close()
        await self._idle.wait()
        self._pool.shutdown(wait=False)

    def close(self) -> None:
        """Reject waiting and new requests with 503."""
        self.is_stopping = True
        for _, admission in self._waiting:
            if not admission.done():
                admission.set_exception(_stopping())
        self._waiting.clear()

    async def _admit(self, namespace: str) -> None:
        if self.is_stopping:
            raise _stopping()
        if self._has_place(namespace):  # which all that wait lack
            self._take_place(namespace)
            return
        if self.waiting(namespace) >= self._queue:
            raise ApiError(429, "too many requests are waiting: retry later", "queue_full")
        admission = asyncio.get_running_loop().create_future()
        self._waiting.append((namespace, admission))
        try:
            await admission
        except BaseException:
            if (namespace, admission) in self._waiting:
                self._waiting.remove((namespace, admission))
            elif not admission.cancelled() and admission.exception() is None:
                self._release(namespace)  # admitted and cancelled at the same time
            raise

    def _has_place(self, namespace: str) -> bool:
        without = self._namespaces - sum(number > 0 for number in self._running.values())
        reserved = min(without, self._places // 2) if self._running[namespace] else 0
        return self._places - self._running.total() > reserved

    def _take_place(self, namespace: str) -> None:
        self._running[namespace] += 1
        self._last[namespace] = next(self._admissions)
        self._idle.clear()

    def _release(self, namespace: str) -> None:
        self._running[namespace] -= 1
        while able := [request for request in self._waiting if self._has_place(request[0])]:
            following, admission = min(able, key=lambda request: self._last[request[0]])
            self._waiting.remove((following, admission))
            if not admission.done():
                self._take_place(following)
                admission.set_result(None)
        if not self._running.total():
            self._idle.set()


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping: retry later", "stopping")
