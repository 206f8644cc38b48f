"""Calibration of a server's engine, in the background while answers continue."""

from __future__ import annotations

import threading
from typing import Any

from kvrag.engine import BlendEngine
from kvrag.errors import AbandonedError
from kvrag.scheduling.waiting import check_left, is_left
from kvrag.server.api_errors import describe, log
from kvrag.server.corpus import Corpus


class Calibrator:
    """Runs `BlendEngine.calibrate` in a thread, on prompts made from the stored chunks. Thread-safe."""

    def __init__(self, engine: BlendEngine, namespace: str, corpus: Corpus | None, chunks: int) -> None:
        """Measure nothing yet.

        Args:
            corpus: Its index retrieves the chunks of a prompt; None = by the rare words that they share.
            chunks: Number of chunks per prompt.
        """
        self._engine, self._namespace, self._corpus, self._chunks = engine, namespace, corpus, max(2, chunks)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._done = (0, 0)
        self._end = ("", "")  # status and text of the last run, unless its result was stored

    def start(self) -> None:
        """Begin to measure, or go on where the last run ended; nothing if one is in progress."""
        with self._lock:
            if self._is_measuring:
                return
            self._stopping.clear()
            self._done, self._end = (0, 0), ("", "")
            self._thread = threading.Thread(target=self._measure, name="kvrag-calibration", daemon=True)
            self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the run, within a prefill; what was measured is kept."""
        self._stopping.set()
        if thread := self._thread:
            thread.join(timeout)

    def status(self) -> dict[str, Any]:
        """Return the status as plain JSON types.

        `status` is "none", "measuring", "unfinished" (it can go on), "failed" or "stored".
        `done` and `total` are prefills of the run in progress. `text` is the result in a sentence, or the error.
        """
        if self._is_measuring:  # first: a run that has ended has set its end
            status, text = "measuring", ""
        elif self._end[0]:
            status, text = self._end
        else:
            stored = self._engine.calibration
            status, text = ("stored", "; ".join([stored.verdict, *stored.notes])) if stored else ("none", "")
        done, total = self._done
        return {"object": "calibration", "status": status, "done": done, "total": total, "text": text}

    @property
    def _is_measuring(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _measure(self) -> None:
        is_left.set(self._stopping.is_set)
        try:
            found = self._engine.calibrate(
                namespace=self._namespace,
                chunks=self._chunks,
                search=self._search if self._corpus and len(self._corpus.index) else None,
                progress=self._note,
            )
            if not found.is_usable:
                done, total = self._done
                self._end = "unfinished" if done < total else "failed", found.notes[-1]
        except AbandonedError:
            self._end = "unfinished", "stopped: run it again to go on"
        except Exception as error:
            log(error)
            self._end = "failed", describe(error)[1]["error"]["message"]

    def _note(self, done: int, total: int) -> None:
        self._done = done, total

    def _search(self, query: str, k: int) -> list[str]:
        assert self._corpus is not None
        check_left()
        return [hit.text for hit in self._corpus.search(query, k, 0)]
