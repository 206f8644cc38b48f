"""Progress of work that takes a while, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.asyncio import tqdm as text
from tqdm.auto import tqdm as bar_or_widget  # in a notebook, a widget

_REDRAW_S, _LINE_S = 0.1, 10.0  # seconds between lines of progress, where they are watched and elsewhere
_IN_NOTEBOOK = bar_or_widget is not text


class _Bar(bar_or_widget):  # type: ignore[misc]
    """Progress on stderr: a bar on a terminal and in a notebook, else lines."""

    monitor_interval = 0  # its thread would outlive a fork

    def display(self, msg: str | None = None, *args: object, **options: object) -> bool:
        """Draw the bar, or print a line."""
        if _is_watched():
            return bool(super().display(msg, *args, **options))
        if msg is None:
            print(self, file=self.fp, flush=True)
        return False  # nothing to clear at the end


def _is_watched() -> bool:
    return sys.stderr.isatty() or _IN_NOTEBOOK


@contextmanager
def progress(title: str, quiet: bool = False, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr, updated with (done, total): a bar on a terminal, else a line every ten seconds.

    Args:
        quiet: Show nothing.
        unit: What is counted.
    """
    bar: _Bar | None = None  # from the first update on: what precedes it does not count

    def update(done: int, total: int) -> None:
        nonlocal bar
        if quiet or not total:
            return
        if bar is None:
            interval, delay = (_REDRAW_S, 0.0) if _is_watched() else (_LINE_S, _LINE_S)
            # tqdm draws nothing on a terminal that does not know its size, as in containers
            size = {} if _IN_NOTEBOOK else {"ncols": 80, "nrows": 20, "file": sys.stderr}
            options = {"initial": done, "total": total, "unit": f" {unit}", "unit_scale": True, "smoothing": 0}
            options |= {"mininterval": interval, "miniters": 0, "delay": delay, "leave": False}
            bar = _Bar(desc=title, **options, **size)
        bar.total = total
        bar.update(done - bar.n)

    try:
        yield update
    finally:
        if bar is not None:
            bar.close()


@contextmanager
def watched(
    given: Callable[[int, int], None] | None, title: str, unit: str = ""
) -> Iterator[Callable[[int, int], None] | None]:
    """Yield `given`; without it, `progress` on a terminal and in a notebook, and None elsewhere."""
    with progress(title, quiet=given is not None or not _is_watched(), unit=unit) as update:
        yield given or (update if _is_watched() else None)
