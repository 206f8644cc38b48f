"""`python -m benchmarks decode`, `chat` and `codec`, on small models."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from blending import CHUNKS

from benchmarks.__main__ import main
from kvrag import Model
from kvrag.config import CODECS


def test_decode(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())  # answers of full length
    monkeypatch.setattr("kvrag.bench.decode.random_model", lambda *_: model)
    sizes = ["--rows", "3", "--prompt-tokens", "9", "--answer-tokens", "6", "--repeats", "1"]
    assert main(["decode", *sizes, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["together_to_alone"] == result["together"] / result["alone"] > 0
    assert result["settings"]["rows"] == 3


def test_chat(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.speed.chat.random_model", lambda *_: model)
    sizes = ["--turns", "3", "--chunks", "2", "--chunk-tokens", "20", "--question-tokens", "9", "--answer-tokens", "7"]
    assert main(["chat", *sizes, "--repeats", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    prompts = [row["prompt_tokens"] for row in result["rows"]]
    assert [later - earlier for earlier, later in itertools.pairwise(prompts)] == pytest.approx([60, 60], abs=5)
    kept = [row["conversation_tokens"] for row in result["rows"]]
    assert kept[0] == 0
    assert all(prompt - 5 < later < prompt for prompt, later in zip(prompts, kept[1:], strict=False))
    assert result["growth"] > 0
    assert result["growth"] == result["rows"][2]["ttft_s"] / result["rows"][1]["ttft_s"]
    with pytest.raises(SystemExit):
        main(["chat", "--turns", "1"])
    assert "at least 2" in capsys.readouterr().err


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
