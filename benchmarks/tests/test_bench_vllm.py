"""`python -m benchmarks vllm`, without the servers, which `make test-vllm` tests."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.speed import vllm
from benchmarks.speed.vllm import _Answer, _load, percentile


def test_without_vllm_the_error_names_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for missing in ("vllm", "vllm_kvrag"):
        monkeypatch.setattr(vllm, "find_spec", lambda name, missing=missing: None if name == missing else object())
        assert main(["vllm"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"kvrag: {missing} cannot be imported")
        assert "pip install vllm" in line


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 5), (0.9, 9), (0.99, 10), (1.0, 10)])
def testpercentiles_are_measured_values(share: float, value: int) -> None:
    assert percentile([float(each) for each in range(10, 0, -1)], share) == value


def test_a_load_has_the_times_of_the_clients() -> None:
    answers = [_Answer(10.0, [11.0, 11.5, 12.0], 100), _Answer(10.0, [13.0, 13.1, 15.0], 200)]
    report: dict[str, Any] = {"prompt_tokens": 150, "reused_tokens": 90, "recomputed_tokens": 9, "fresh_tokens": 60}
    load = _load("x", answers, 5.0, [report, report])
    assert (load.ttft_p50_s, load.ttft_p99_s, load.requests_per_s) == (1.0, 3.0, 0.4)
    assert (load.itl_p50_s, load.itl_p99_s) == (0.5, pytest.approx(1.9))
    assert (load.prompt_tokens, load.reused, load.computed) == (150, 90, 69)
    alone = _load("x", [_Answer(10.0, [11.0], 100)], 1.0, [])
    assert math.isnan(alone.itl_p50_s)
    assert alone.computed is None
