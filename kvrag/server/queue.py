"""The queue of a server: limits running and waiting requests, in fairness to all namespaces."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import count
from typing import TypeVar

from kvrag.scheduling.bridge import put_all
from kvrag.scheduling.waiting import is_cancelled
from kvrag.server.api_errors import ApiError

T = TypeVar("T")


class AdmissionQueue:
    """Admits a number of requests at a time, queues some more, and rejects the rest.

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
        self._threads = ThreadPoolExecutor(places, f"kvrag-{name}")  # for the work
        self._running: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []  # with their namespaces, the oldest first
        self._admissions = count(1)
        self._last: Counter[str] = Counter()  # number of each namespace's last admission
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
        admitted: Callable[[float], None] = lambda waited: None,
    ) -> AsyncGenerator[T, None]:
        """Run a generator to its end in a thread once it is admitted; yield its items, which are never None.

        It does not wait for the consumer, so that a slow one keeps no place. It has a copy of this context. Closing or
        cancelling this ends it at the next check of `is_cancelled`, and returns at once. The place is freed when it has
        ended.

        Args:
            limit: Time limit in seconds, waiting included.
            admitted: Called with the waiting time in seconds.

        Raises:
            ApiError: Too many requests wait, the queue is stopping, or the time limit is over.
        """
        loop, items = asyncio.get_running_loop(), asyncio.Queue[T | BaseException | None]()  # None = the end
        started, left, context = loop.time(), threading.Event(), copy_context()
        context.run(is_cancelled.set, left.is_set)
        too_long = f"the request took longer than {limit:g} s: request fewer tokens, or send less"
        late = ApiError(504, too_long, "timeout")

        def put(item: T) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        def end(working: asyncio.Future[None]) -> None:
            self._release(namespace)
            items.put_nowait(working.exception())

        try:
            async with asyncio.timeout(limit):
                await self._admit(namespace)
        except TimeoutError:
            raise late from None
        loop.run_in_executor(self._threads, context.run, lambda: put_all(work(), put)).add_done_callback(end)
        admitted(loop.time() - started)
        timer = loop.call_at(started + limit, items.put_nowait, late)
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            timer.cancel()
            left.set()

    async def stop(self) -> None:
        """Reject waiting and new requests; return when all admitted ones are done."""
        self.close()
        await asyncio.to_thread(self._threads.shutdown)

    def close(self) -> None:
        """Reject waiting and new requests."""
        self.is_stopping = True
        for _, admission in self._waiting:
            if not admission.done():
                admission.set_exception(_stopping())
        self._waiting.clear()

    async def _admit(self, namespace: str) -> None:
        if self.is_stopping:
            raise _stopping()
        if not self._has_place(namespace) and self.waiting(namespace) >= self._queue:
            raise ApiError(429, "too many requests are waiting: retry later", "queue_full")
        admission = asyncio.get_running_loop().create_future()
        self._waiting.append((namespace, admission))
        self._fill_places()
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

    def _fill_places(self) -> None:
        while able := [request for request in self._waiting if self._has_place(request[0])]:
            namespace, admission = min(able, key=lambda request: self._last[request[0]])
            self._waiting.remove((namespace, admission))
            if not admission.done():
                self._running[namespace] += 1
                self._last[namespace] = next(self._admissions)
                admission.set_result(None)

    def _release(self, namespace: str) -> None:
        self._running[namespace] -= 1
        self._fill_places()


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping: retry later", "stopping")
