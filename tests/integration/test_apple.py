"""Apple's GPUs have no float64: no pass, no policy and no draw computes in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from blending import CHUNKS, messages
from torch.utils._python_dispatch import TorchDispatchMode

from kvrag import BlendEngine, Model


class _Refusing(TorchDispatchMode):
    """Raises where an operation returns float64."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        rows = result if isinstance(result, (list, tuple)) else [result]
        wide = [row for row in rows if isinstance(row, torch.Tensor) and row.dtype == torch.float64]
        assert not wide, f"{operation} returns float64"
        return result


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "query", "ratio": 0.15},
        {"policy": "hkvd", "ratio": 0.15, "temperature": 0.7, "top_p": 0.9, "seed": 3},
        {"policy": "random", "ratio": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"margin": 1e6, "temperature": 0},
        {"temperature": 0, "logprobs": 2},
    ],
)
@pytest.mark.parametrize("codec", ["native", "int8"])
def test_no_answer_needs_float64(settings: dict[str, Any], codec: str, model: Model, tmp_path: Path) -> None:
    with _Refusing(), BlendEngine(model, tmp_path, codec=codec) as engine:
        engine.warm(CHUNKS)
        answer = engine.generate(messages(*reversed(CHUNKS)), max_new_tokens=6, **settings)
    assert answer.token_ids
    with pytest.raises(AssertionError, match="returns float64"), _Refusing():
        torch.ones(1).double()
