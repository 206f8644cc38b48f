"""Progress of work that takes a while, on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm
from tqdm.auto import tqdm as widget  # in a notebook; without ipywidgets, text

_REDRAW_S, _LINE_S = 0.1, 10.0  # seconds between lines of progress, on a terminal and without one
_KNOWN = 0.05  # of the work, after which the time left is estimated


class _Bar(tqdm):  # type: ignore[misc]
    """Progress on stderr: a bar on a terminal, else lines."""

    monitor_interval = 0  # its thread would outlive a fork

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, or print a line."""
        if self.fp.isatty():
            return bool(super().display(msg, pos))
        if msg is None:
            print(self, file=self.fp, flush=True)
        return False  # nothing to clear at the end


def _columns() -> int:
    """Return the width of stderr; tqdm would draw nothing on a terminal that does not know it, as in containers."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")  # a notebook's kernel has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


@contextmanager
def progress(title: str, quiet: bool = False, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr, updated with (done, total): a bar on a terminal, else a line every ten seconds.

    The time left is shown once a part is done: the first steps include start-up costs.

    Args:
        quiet: Show nothing.
        unit: What is counted: progress is shown from 0 % on, with the number per second.
    """
    bar: tqdm | None = None  # from the first update on: what precedes it does not count

    def update(done: int, total: int) -> None:
        nonlocal bar
        if quiet or not total:
            return
        is_terminal = sys.stderr.isatty() or _in_notebook()
        meter = "{desc}: {percentage:.0f}%" + "|{bar}| {elapsed}" * is_terminal
        if bar is not None:
            new = done - bar.initial
            meter += ", {rate_noinv_fmt}" * bool(unit and new > 0)
            meter += ", about {remaining} left" * (new >= _KNOWN * (total - bar.initial))
            bar.total, bar.bar_format = total, meter
            bar.update(done - bar.n)
            return
        interval = _REDRAW_S if is_terminal else _LINE_S
        shown = {"mininterval": interval, "delay": 0 if unit or is_terminal else interval, "bar_format": meter}
        options = {"initial": done, "total": total, "unit": f" {unit}", "unit_scale": True, "smoothing": 0}
        options |= {"desc": title, "leave": False, "miniters": 0}
        if _in_notebook():
            bar = widget(**options, **shown)
        else:
            bar = _Bar(file=sys.stderr, ncols=_columns() - 1, nrows=20, **options, **shown)

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
    if given is not None or not (sys.stderr.isatty() or _in_notebook()):
        yield given
        return
    with progress(title, unit=unit) as update:
        yield update
