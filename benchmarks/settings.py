"""Settings that every result depends on."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvrag.backend.transformers import Model
from kvrag.process import shares

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


def busy_note(start: Sequence[float], stop: Sequence[float]) -> list[str]:
    """Return a note if other processes slowed this one down between two results of `cpu`, else nothing."""
    others, idle = shares(start, stop)
    note = f"Machine busy: other processes took {others:.0%} of the CPU, so times may not compare"
    return [note] if others > _BUSY and idle < 0.25 else []


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
