"""`python -m benchmarks edits`: the prompts before and after an edit, and what is measured about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.quality import edits
from benchmarks.quality.rows import QuestionRow
from kvrag import Model

PASSAGES = tuple(
    f"Passage {name} says that the {name} station opened near the river in 19{at}5."
    for at, name in enumerate(("amber", "birch", "cedar", "delta"))
)
ROW = QuestionRow("one", PASSAGES, "When did the delta station open?", ("1935",), documents=("x", "y", "y", "y"))
OTHER = QuestionRow("two", PASSAGES, "When did the amber station open?", ("1905",), documents=ROW.documents)


def _texts(messages: Any) -> list[str]:
    return [message["content"] for message in messages]


def test_an_edit_leaves_the_documents_and_asks_another_question() -> None:
    pairs = {kind: edits.edit(kind, ROW, OTHER, "Another passage.") for kind in edits.KINDS}
    earlier, edited = ({kind: _texts(pair[at]) for kind, pair in pairs.items()} for at in range(2))
    asked = "\n\n".join([*PASSAGES, f"Question: {ROW.question}"])
    assert all(edited[kind] == [asked] for kind in edits.KINDS if kind != "turns")
    assert all(texts[-1].endswith(OTHER.question) for texts in earlier.values())
    before = asked.replace(ROW.question, OTHER.question)
    assert earlier["removed"] == [f"Another passage.\n\n{before}"]
    assert earlier["system"][1:] == [before]
    assert earlier["replaced"] == [before.replace(PASSAGES[1], "Another passage.")], "document y states the answer"
    (swapped,) = earlier["order"]
    assert swapped != before
    assert sorted(swapped.split("\n\n")) == sorted(before.split("\n\n"))
    assert len(edited["turns"]) == 3
    assert edited["turns"][0] == earlier["turns"][0]
    assert len(edited["turns"][1]) < len(earlier["turns"][1])
    assert "".join(edited["turns"]).count("Passage") == len(PASSAGES)


def test_moved_and_stored_kv_are_compared_with_full_prefill(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Model, "from_pretrained", lambda *args, **kwargs: model)
    rows = [
        {
            "id": f"{context} {at}",
            "passages": [f"{context}: {text}" for text in PASSAGES],
            "question": question,
            "answers": ["1935"],
            "documents": ROW.documents,
        }
        for context in ("north", "south")
        for at, question in enumerate((ROW.question, OTHER.question))
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    argv = ["edits", "--data", str(data), "--max-tokens", "1", "--out", str(tmp_path / "out")]
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["samples"], list(result["kinds"])) == (2, list(edits.KINDS)), "one question about each context"
    for kind, cells in result["kinds"].items():
        full, *others = cells
        assert (full["kl"], full["moved"]) == (0.0, 0.0)
        plain, query, more, first, _, stored = others
        assert all(cell["kl"] > 0 for cell in others)
        assert all(
            cell["moved"] == plain["moved"] > (0.15 if kind == "turns" else 0.3) for cell in (query, more, first)
        )
        assert plain["recomputed"] == 0 < query["recomputed"] < more["recomputed"]
        assert stored["moved"] > 0.5
        assert full["em"]["value"] == 0, "a random model"

    monkeypatch.setattr(edits, "measure", None)  # all rows are stored
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("moved, query") for line in lines) == 2 * len(edits.KINDS)
