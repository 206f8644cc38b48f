"""`python -m benchmarks` on small models: the speed of decoding, the first token and servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from families import build
from gguf_files import needs_library, write_gguf

from benchmarks.__main__ import main
from benchmarks.shapes import random_model
from benchmarks.speed import clients, serve
from kvrag import BlendEngine, Model, SettingError


@needs_library
def test_decode_beside_llama_cpp(tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", build("llama", max_position_embeddings=2048), tokenizer, "F16")
    sizes = ["--prompt-tokens", "20", "--answer-tokens", "4"]
    assert main(["decode", "--gguf", str(path), *sizes, "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert min(measured["step"], measured["call"], measured["step_to_call"]) > 0
    assert main(["decode", "--gguf", str(path), *sizes]) == 0
    assert "llama_decode and its logits" in capsys.readouterr().out


def test_decode(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())  # answers of full length
    monkeypatch.setattr("benchmarks.speed.decode.random_model", lambda *_: model)
    sizes = ["--rows", "3", "--prompt-tokens", "9", "--answer-tokens", "6", "--repeats", "1"]
    assert main(["decode", *sizes, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["together_to_alone"] == result["together"] / result["alone"] > 0
    assert result["settings"]["rows"] == 3


def test_every_client_asks_its_own_questions(model: Model, tmp_path: Path) -> None:
    with BlendEngine(model, tmp_path) as engine:
        asked = list[str]()
        generate = engine.generate
        engine.generate = lambda prompt, **options: asked.append(prompt) or generate(prompt, **options)  # type: ignore[method-assign, func-returns-value]
        found = clients.load(engine, ["one", "two", "three", "four", "five"], 2, {"policy": "full"})
    assert sorted(asked) == ["five", "four", "one", "three", "two"]
    assert (found["answers"], found["requests_per_s"]) == (5, 5 / found["seconds"])


def test_host_times_each_step_until_the_first_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["host", "--tokens", "2048", "--repeats", "2"]
    assert main([*argv, "--json", "--profile", str(tmp_path / "profile")]) == 0
    result = json.loads(capsys.readouterr().out)
    steps = result["milliseconds"]
    in_all, _ = steps.pop("in all"), steps.pop("other threads")
    assert all(steps[step] > 0 for step in ("render", "tokenise", "match", "open", "plan", "rotations", "stitch"))
    assert sum(steps.values()) <= in_all
    assert result["settings"]["chunks"] == 4
    assert (tmp_path / "profile").stat().st_size > 0
    assert main(argv) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[::3] == ["in", "ms"]


@pytest.mark.parametrize("tier", [["--ram-bytes", str(1 << 30)], ["--cold"]], ids=["ram", "cold"])
def test_ttft_reports_what_computing_and_loading_take_alone(
    tier: list[str], model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dropped: list[str] = []
    advise = os.posix_fadvise

    def note(descriptor: int, *arguments: int) -> None:
        dropped.append(Path(f"/proc/self/fd/{descriptor}").resolve().suffix)
        advise(descriptor, *arguments)

    monkeypatch.setattr(os, "posix_fadvise", note)
    monkeypatch.setattr("benchmarks.speed.ttft.random_model", lambda *_: model)
    sizes = ["--chunks", "3", "--chunk-tokens", "40", "--question-tokens", "20", "--repeats", "1"]
    argv = ["ttft", *sizes, *tier, "--policies", "none", "first_k"]
    assert main([*argv, "--json"]) == 0
    full, prefix, *blended = json.loads(capsys.readouterr().out)["rows"]
    assert set(dropped) == ({".safetensors"} if tier == ["--cold"] else set())
    assert full["load_stall_s"] is prefix["load_stall_s"] is None
    # two chunks are inexact; 15 % of them
    assert blended[1]["computed_tokens"] - blended[0]["computed_tokens"] == round(0.15 * 2 * 40)
    assert "rows_s" not in full
    assert "hidden" not in prefix
    assert [row["name"] for row in blended] == ["none", "first_k"]
    for row in blended:
        assert row["rows_share"] == row["rows_s"] / row["ttft_s"]
        assert 0 <= row["hidden"] <= 1
        assert row["load_alone_s"] > 0
    assert main(argv) == 0
    *_, heads, _, _, _, row = capsys.readouterr().out.splitlines()
    assert heads.split() == ["TTFT", "speed-up", "bound", "share", "of", "rows", "loading", "stall", "hidden"]
    assert row.startswith("first_k")


@pytest.mark.parametrize("settings", [{}, {"rate": 500.0}, {"kill": 3}], ids=["clients", "rate", "kill"])
def test_no_prompt_of_a_load_begins_like_another(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the KV of an earlier prompt would be continued, and no chunk reused."""
    begins: list[str] = []

    async def ask(http: object, body: dict[str, Any], num_events: int | None = None) -> serve.StreamedAnswer:
        begins.append(body["messages"][0]["content"])
        await asyncio.sleep(0.001)
        return serve.StreamedAnswer("text", 1, 0.001)

    ticks = itertools.count()  # the clock moves when it is read
    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 1000))
    monkeypatch.setattr(serve, "ask", ask)
    result = asyncio.run(serve.load("http://test", clients=2, seconds=0.1, model="m", prompts=2, **settings))
    assert result.complete > 4
    assert len(begins) > 6
    assert len(set(begins)) == len(begins)


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(SettingError, match=r"unknown shape 'large'; choose one of qwen2\.5-0\.5b, qwen2\.5-1\.5b"):
        random_model("large")
