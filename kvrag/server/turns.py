"""Who may use the engine, and the threads in which it works for them: the event loop never waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TypeVar

from kvrag.server.errors import ApiError

T = TypeVar("T")


class _End:
    """Comes after the last piece."""


class Turns:
    """Lets a number of requests work at a time; some more wait, first come, first served; the others are turned away.

    All methods are called on the event loop.
    """

    def __init__(self, places: int, queue: int, name: str) -> None:
        self._free, self._queue = places, queue
        self._places = places
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._pool = ThreadPoolExecutor(places, thread_name_prefix=f"kvrag-{name}")
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_stopping = False

    @property
    def running(self) -> int:
        """Requests at work."""
        return self._places - self._free

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    async def run(
        self,
        work: Callable[[], Generator[T, None, None]],
        limit: float,
        began: Callable[[float], None] = lambda waited: None,
    ) -> AsyncGenerator[T, None]:
        """Run a generator in a thread when its turn has come, and yield what it yields.

        Closing or cancelling this ends the work after its current step; the place is free when the thread is.

        Args:
            limit: Seconds that it may take, waiting included.
            began: Called with the seconds waited.

        Raises:
            ApiError: 429 if too many wait, 503 if the server is stopping, 504 if it took too long.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        with _told(limit):
            async with asyncio.timeout(limit):
                await self._take()
        pieces: asyncio.Queue[T | _End | BaseException] = asyncio.Queue()
        gone = threading.Event()

        def pump() -> None:
            end: _End | BaseException = _End()
            try:
                with closing(work()) as made:
                    for piece in made:
                        loop.call_soon_threadsafe(pieces.put_nowait, piece)
                        if gone.is_set():
                            break
            except BaseException as error:
                end = error
            loop.call_soon_threadsafe(pieces.put_nowait, end)
            loop.call_soon_threadsafe(self._release)

        self._pool.submit(pump)
        began(loop.time() - started)
        late = loop.call_at(started + limit, pieces.put_nowait, TimeoutError())
        try:
            with _told(limit):
                while not isinstance(piece := await pieces.get(), _End):
                    if isinstance(piece, BaseException):
                        raise piece
                    yield piece
        finally:
            late.cancel()
            gone.set()

    async def stop(self) -> None:
        """Turn away those who wait and those to come; returns when the others are done."""
        self.turn_away()
        await self._idle.wait()
        self._pool.shutdown(wait=False)

    def turn_away(self) -> None:
        """The first half of `stop`."""
        self.is_stopping = True
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(_stopping())
        self._waiting.clear()

    async def _take(self) -> None:
        if self.is_stopping:
            raise _stopping()
        if self._free and not self._waiting:
            self._take_place()
            return
        if len(self._waiting) >= self._queue:
            raise ApiError(429, "too many requests are waiting: try again later", "queue_full")
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif not turn.cancelled() and turn.exception() is None:
                self._release()  # it came at the same moment
            raise

    def _take_place(self) -> None:
        self._free -= 1
        self._idle.clear()

    def _release(self) -> None:
        self._free += 1
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                self._take_place()
                turn.set_result(None)
                return
        if self._free == self._places:
            self._idle.set()


@contextmanager
def _told(limit: float) -> Iterator[None]:
    """Tell that it took too long."""
    try:
        yield
    except TimeoutError:
        raise ApiError(504, f"the answer took longer than {limit:g} s", "timeout") from None


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping", "stopping")
