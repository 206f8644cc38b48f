"""Settings that every result depends on."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvrag.backend.transformers import Model

_BUSY = 0.15  # share of the CPU that other processes take


def run_settings(model: Model) -> dict[str, Any]:
    """Return the settings that a result depends on besides the benchmark's arguments."""
    return {
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "processor": processor(),
    }


def cpu() -> tuple[float, float, float]:
    """Return the machine's CPU time so far, in ticks: in all, idle, and of this process; zeros except on Linux."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
    except OSError:
        return 0, 0, 0
    return sum(ticks), sum(ticks[3:5]), time.process_time() * os.sysconf("SC_CLK_TCK")


def busy_note(start: Sequence[float], stop: Sequence[float]) -> list[str]:
    """Return a note if other processes slowed this one down between two results of `cpu`, else nothing."""
    total, idle, own = (after - before for before, after in zip(start, stop, strict=True))
    others, idle = (total - idle - own) / max(total, 1), idle / max(total, 1)
    note = f"Machine busy: other processes took {others:.0%} of the CPU, so times may not compare"
    return [note] if others > _BUSY and idle < 0.25 else []


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
