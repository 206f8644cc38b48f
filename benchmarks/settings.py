"""Settings that every result depends on."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch

from kvrag.backend.transformers import Model
from kvrag.cli.demo import processor


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
