"""`python -m benchmarks` on small models: the speed of agents, frameworks, decoding, chats, servers and codecs."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blending import CHUNKS

from benchmarks import peers
from benchmarks.__main__ import main
from benchmarks.shapes import random_model
from benchmarks.speed import serve
from kvrag import Model, SettingError
from kvrag.config import CODECS


def test_decode(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())  # answers of full length
    monkeypatch.setattr("benchmarks.speed.decode.random_model", lambda *_: model)
    sizes = ["--rows", "3", "--prompt-tokens", "9", "--answer-tokens", "6", "--repeats", "1"]
    assert main(["decode", *sizes, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["together_to_alone"] == result["together"] / result["alone"] > 0
    assert result["settings"]["rows"] == 3


def test_chat(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.speed.chat.random_model", lambda *_: model)
    sizes = ["--turns", "3", "--chunks", "2", "--chunk-tokens", "20", "--question-tokens", "9", "--answer-tokens", "7"]
    assert main(["chat", *sizes, "--repeats", "1", "--conversations", "20", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    prompts = [row["prompt_tokens"] for row in result["rows"]]
    assert [later - earlier for earlier, later in itertools.pairwise(prompts)] == pytest.approx([60, 60], abs=5)
    kept = [row["conversation_tokens"] for row in result["rows"]]
    assert kept[0] == 0
    assert all(prompt - 5 < later < prompt for prompt, later in zip(prompts, kept[1:], strict=False))
    assert result["conversations"] == 20
    assert min(result["keep_s"], result["find_s"], result["growth"]) > 0
    assert result["growth"] == result["rows"][2]["ttft_s"] / result["rows"][1]["ttft_s"]
    with pytest.raises(SystemExit):
        main(["chat", "--turns", "1"])
    assert "at least 2" in capsys.readouterr().err


def test_agents(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.speed.agents.random_model", lambda *_: model)
    monkeypatch.setattr("benchmarks.speed.agents._SYSTEM", 60)
    sizes = ["--turns", "4", "--question-tokens", "10", "--answer-tokens", "50", "--thought-tokens", "20"]
    sizes += ["--result-tokens", "80", "--compact-at", "500", "--instruction-tokens", "200", "--tools-tokens", "300"]
    assert main(["agents", *sizes, "--repeats", "1", "--json"]) == 0
    traces = json.loads(capsys.readouterr().out)["traces"]
    edits = {trace["name"]: [row["turn"] for row in trace["rows"] if row["is_edited"]] for trace in traces}
    assert edits == {"thoughts": [2, 3, 4], "trimmed": [4], "compacted": [4], "date": [2, 3, 4], "tools": []}
    for trace in traces:
        for row in trace["rows"]:
            blend, exact, prefix = (row["costs"][way] for way in ("blend", "exact", "prefix cache"))
            assert exact["computed"] == prefix["computed"] == row["prompt_tokens"] - prefix["conversation"]
            # 15 % of what is moved is recomputed, or all where choosing costs more
            saved = blend["computed"] + blend["moved"] + blend["conversation"] - row["prompt_tokens"]
            assert saved == pytest.approx(0.15 * blend["moved"], abs=1) or saved == blend["moved"]
            assert (blend["moved"] > 0) == row["is_edited"]
            assert blend["conversation"] >= exact["conversation"]
        for sums in (trace["all"], trace["edited"]):
            if sums["prompts"]:
                assert sums["fewer"] == {"blend": sums["computed"]["prefix cache"] / sums["computed"]["blend"]}
                assert sums["sooner"] == {"blend": sums["ttft_s"]["prefix cache"] / sums["ttft_s"]["blend"]}
    thoughts, trimmed, compacted, date, tools = traces
    assert [row["costs"]["prefix cache"]["computed"] for row in thoughts["rows"]] == [70, 60, 60, 60]
    assert trimmed["edited"]["fewer"]["blend"] > 2
    assert compacted["rows"][-2]["prompt_tokens"] == 60 + 200 + 2 * (10 + 50 + 500 // 8 + 50) + 10
    assert date["edited"]["fewer"]["blend"] > 3
    assert date["all"]["fewer"]["blend"] < date["edited"]["fewer"]["blend"]
    second = tools["rows"][2:]
    assert [row["turn"] for row in second] == [1, 2]
    assert [row["costs"]["blend"]["computed"] for row in second] == [10, 10]
    assert set(tools["first_to_follow_up"]) == {"blend", "exact", "prefix cache"}
    assert main(["agents", *sizes, "--repeats", "2", "--traces", "tools"]) == 0
    out = capsys.readouterr().out
    assert "first prompt of the second agent" in out
    assert "behind an edit (" not in out


def test_agents_are_compared_with_engines_of_another_environment(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With transformers in the place of vLLM: without a cache, and with one like that of `agents` itself."""
    monkeypatch.setattr("benchmarks.speed.agents.random_model", lambda *_: model)
    monkeypatch.setattr("benchmarks.speed.agents._SYSTEM", 60)
    monkeypatch.setattr("benchmarks.speed.agents.VLLM", "full")
    monkeypatch.setattr("benchmarks.speed.agents.CONNECTOR", "transformers")
    monkeypatch.setattr("benchmarks.speed.agents.PAIRS", {"blend": "prefix cache", "transformers": "full"})
    given: dict[str, Any] = {}
    running = peers.running

    def recorded(folder: Path, chunks: list[list[int]], *more: Any) -> Any:
        given.update(lengths=list(map(len, chunks)), window=more[1], blend=more[2])
        given["stored"] = len(list((folder / "kv").rglob("*.safetensors")))
        return running(folder, chunks, *more)

    monkeypatch.setattr("benchmarks.peers.running", recorded)
    sizes = ["--turns", "4", "--question-tokens", "10", "--answer-tokens", "50", "--thought-tokens", "20"]
    sizes += ["--result-tokens", "80", "--instruction-tokens", "200", "--traces", "thoughts", "trimmed", "date"]
    assert main(["agents", *sizes, "--repeats", "1", "--json", "--vllm", sys.executable]) == 0
    traces = json.loads(capsys.readouterr().out)["traces"]
    longest = max(row["prompt_tokens"] for trace in traces for row in trace["rows"])
    assert given["lengths"] == [80] * 4 + [200]  # the results and the instructions
    assert given["stored"] == 5
    assert given["window"] > longest
    assert given["blend"] == {"controller": "off", "ratio": 0.15}
    for trace in traces:
        for row in trace["rows"]:
            costs = row["costs"]
            assert costs["full"]["computed"] == row["prompt_tokens"]
            assert costs["transformers"]["computed"] == costs["prefix cache"]["computed"]
            assert costs["transformers"]["ttft_s"] > 0
            assert costs["transformers"]["cpu_s"] is None
        sums = trace["edited"]
        assert sums["fewer"]["transformers"] == sums["computed"]["full"] / sums["computed"]["transformers"]
        assert set(sums["cpu_s"]) == {"blend", "exact", "prefix cache"}


def test_frameworks(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.speed.agent_frameworks._load", lambda *_: model)
    argv = ["frameworks", "--frameworks", "langgraph", "--turns", "1", "--max-tokens", "100"]
    assert main([*argv, "--json"]) == 0
    [conversation] = json.loads(capsys.readouterr().out)["conversations"]
    assert conversation["calls"] == {"off": 1, "exact": 1, "blend": 1}
    off, exact, blend = (turns[0] for turns in conversation["turns"].values())
    assert off["kept"] == exact["moved"] == 0
    assert exact["kept"] > 100
    assert blend["computed"] <= exact["computed"] < off["prompt"]
    assert main(argv) == 0
    assert "langgraph, tool calls: {'off': 1, 'exact': 1, 'blend': 1}" in capsys.readouterr().out


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
    monkeypatch.setattr("benchmarks.speed.first_token.random_model", lambda *_: model)
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


def test_codec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(len(CHUNKS))]
    for path, chunk in zip(paths, CHUNKS, strict=True):
        path.write_text(chunk)
    settings = ["--prompts", "2", "--chunks", "2"]
    assert main(["codec", *map(str, paths), *settings, "--json"]) == 0
    native, int8, int4 = json.loads(capsys.readouterr().out)["rows"]
    assert [row["codec"] for row in (native, int8, int4)] == list(CODECS)
    assert native["keys"] == native["values"] == native["attention"] == native["kl"] == 0
    for name in ("smaller", "keys", "values", "attention", "kl"):
        assert 0 <= native[name] < int8[name] < int4[name], name
    assert main(["codec", str(paths[0]), *settings]) == 1
    assert "1 long enough files are too few for 2 prompts of 2" in capsys.readouterr().err


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
