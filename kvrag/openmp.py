"""OpenMP threads of torch, ended when the calling thread no longer needs them.

Every thread that runs a parallel operation of torch on the CPU gets a team of OpenMP threads, and keeps it. As soon as
a process has more of them than processors, libgomp no longer lets them spin between two operations: they sleep, and
waking them takes as long as many operations of a small model. Blending in one thread took 1.8 times as long because
another thread had loaded the model.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SOFT = 1  # omp_pause_soft


@contextmanager
def own_team() -> Iterator[None]:
    """Release the calling thread's OpenMP threads at the end; also a decorator."""
    try:
        yield
    finally:
        if not sys.is_finalizing():
            release_team()


def release_team() -> None:
    """End the OpenMP threads of the calling thread; its next parallel operation starts new ones."""
    if (release := _release()) is not None:
        release()


def _before_fork() -> None:
    if "torch" in sys.modules:
        release_team()  # the child would wait for them for ever


os.register_at_fork(before=_before_fork)


@functools.cache
def _release() -> Callable[[], object] | None:
    """Return a function that ends the calling thread's team; None without libgomp, which alone needs it."""
    import torch

    no_load = getattr(os, "RTLD_NOLOAD", None)
    if no_load is None:
        return None
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        with suppress(OSError, AttributeError):  # a library that is not loaded, or older than OpenMP 5.0
            library = ctypes.CDLL(str(path), mode=no_load)
            return functools.partial(library.omp_pause_resource, _SOFT, library.omp_get_initial_device())
    return None
