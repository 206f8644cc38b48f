"""Absurd arguments: every one is a KvragError in one line, or is accepted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blending import CHUNKS, messages

from kvrag import BlendConfig, BlendEngine, FileStore, KvragError, Model, SharedStore
from kvrag.config import AnswerOptions

ODD: list[Any] = [
    *(torch.tensor(3), torch.tensor([1, 2]), np.array([1, 2]), np.int64(5), np.float32(2)),
    *(1j, "x", "7", b"1", range(3), None, True, [], {}, object(), len, float),
    *(math.nan, math.inf, -math.inf, -1, 10**400, -(10**400), 1e300, 1 << 63, Decimal("NaN"), Decimal(3)),
    Fraction(1, 3),
]
PROMPT = messages(CHUNKS[0])
NUMBERS = ("count", "prompts")


@pytest.fixture(scope="module")
def odd_engine(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with BlendEngine(model, FileStore(tmp_path_factory.mktemp("odd"), min_free_bytes=0)) as engine:
        engine.warm(CHUNKS, document="a")
        yield engine


def _check(call: Callable[[Any], object], values: list[Any] = ODD) -> None:
    for value in values:
        try:
            call(value)
        except KvragError as error:
            lines = str(error).splitlines()
            if len(lines) > 1:
                pytest.fail(f"{value!r:.40}: {lines}")
        except Exception as error:
            pytest.fail(f"{value!r:.40}: {type(error).__name__}: {error}")


@pytest.mark.parametrize("name", ["set_budget", "namespace of set_budget", "gc", "max_bytes", "min_free_bytes", "path"])
def test_of_a_store(name: str, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "kv", min_free_bytes=0)
    calls: dict[str, Callable[[Any], object]] = {
        "set_budget": lambda value: store.set_budget("n", value),
        "namespace of set_budget": lambda value: store.set_budget(value, 10),
        "gc": lambda value: store.gc(value),
        "max_bytes": lambda value: FileStore(tmp_path / "kv", max_bytes=value).close(),
        "min_free_bytes": lambda value: FileStore(tmp_path / "kv", min_free_bytes=value).close(),
        "path": lambda value: FileStore(value if not isinstance(value, str) else tmp_path / value).close(),
    }
    _check(calls[name])
    store.close()


def test_of_a_shared_store(tmp_path: Path) -> None:
    url = "s3://bucket/x"
    _check(lambda value: SharedStore(value, tmp_path), [*ODD, "s3://[::1/x", "valkey://h/0/x", "s3://"])
    _check(lambda value: SharedStore(url, tmp_path, cache_bytes=value))
    _check(lambda value: SharedStore(url, tmp_path, min_free_bytes=value))
    _check(lambda value: SharedStore(url, value))


@pytest.mark.parametrize("name", BlendConfig.__dataclass_fields__)
def test_of_a_config(name: str) -> None:
    _check(lambda value: BlendConfig(**{name: value}))


@pytest.mark.parametrize(
    "name",
    [
        *(
            "ram_bytes",
            "conversation_bytes",
            "batch_bytes",
            "device_bytes",
            "codec",
            "learn",
            "check",
        ),
        *("config", "store"),
    ],
)
def test_of_an_engine(name: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    store = tmp_path / "kv"
    _check(lambda value: BlendEngine(model, **{"store": store, name: value}).close())


@pytest.mark.parametrize("name", AnswerOptions.__annotations__)
def test_of_an_answer(name: str, odd_engine: BlendEngine) -> None:
    _check(lambda value: odd_engine.generate(PROMPT, **{"max_new_tokens": 1, "ratio": 1.0, name: value}))


@pytest.mark.parametrize("name", NUMBERS)
def test_of_a_calibration(name: str, odd_engine: BlendEngine) -> None:
    settings: dict[str, Any] = {"prompts": [PROMPT]}
    _check(lambda value: odd_engine.calibrate(**{**settings, name: value}))


def test_of_the_other_methods(odd_engine: BlendEngine) -> None:
    engine = odd_engine
    calls: list[Callable[[Any], object]] = [
        lambda value: engine.generate(value, max_new_tokens=1, ratio=1.0),
        lambda value: engine.generate([value], max_new_tokens=1, ratio=1.0),
        lambda value: engine.generate_batch(value, max_new_tokens=1, ratio=1.0),
        lambda value: engine.generate_batch([PROMPT], each=value, max_new_tokens=1, ratio=1.0),
        lambda value: engine.generate_batch([PROMPT], each=[value], max_new_tokens=1, ratio=1.0),
        lambda value: engine.warm(value),
        lambda value: engine.warm([value]),
        lambda value: engine.warm(CHUNKS, document=value),
        lambda value: engine.warm(CHUNKS, sources=value),
        lambda value: engine.warm(CHUNKS, namespace=value),
        lambda value: engine.forget(value),
        lambda value: engine.forget("no", namespace=value),
        lambda value: engine.documents(value),
        lambda value: engine.explain(value),
        lambda value: engine.encode(value),
        lambda value: engine.count_tokens(value),
    ]
    for call in calls:
        _check(call)
