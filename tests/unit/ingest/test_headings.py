"""The title and the headings above a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrag import BlendConfig, BlendEngine, Model, SettingError
from kvrag.fingerprint import text_key
from kvrag.ingest.headings import headings_after, title


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/data/handbook/Pumps.md", "Pumps"),
        ("https://example.org/wiki/Torvik/", "Torvik"),
        ("C:\\docs\\report.2024.docx", "report.2024"),
        ("Release 1.2", "Release 1.2"),
        ("Register of vessels, part 7", "Register of vessels, part 7"),
    ],
)
def test_the_title_is_the_name_of_the_source(source: str, name: str) -> None:
    assert title(source) == name


def test_a_heading_replaces_those_of_its_level_and_below() -> None:
    path = headings_after(["Pumps"], "# Pumps\n\nText.\n\n## Care\n\n### Oil\n\nText with # and #hash.")
    assert path == ["Pumps", "# Pumps", "## Care", "### Oil"]
    assert headings_after(path, "More.\n\n## Parts\n\nText.") == ["Pumps", "# Pumps", "## Parts"]
    assert headings_after(path, "# Index") == ["Pumps", "# Index"]
    assert headings_after(path, "Nothing new.") == path


def test_a_comment_in_code_is_no_heading() -> None:
    assert headings_after(["a"], "```sh\n# install\nmake\n```\n\n## Use") == ["a", "## Use"]


TEXTS = (
    "# Pumps\n\nEvery pump of the house has a number that is painted on its lid in white letters.",
    "## Care\n\nClean the filter of the pump every month, and the lid of it twice in every year.",
    "Never use oil for that, because it eats the rubber seal and the paint on the lid of the pump.",
)


def test_parts_of_a_document_get_the_contexts_they_would_get_at_once(model: Model, tmp_path: Path) -> None:
    config = BlendConfig(context="headings")
    with BlendEngine(model, tmp_path / "once", config) as once, BlendEngine(model, tmp_path / "parts", config) as parts:
        once.warm(TEXTS, document="docs/Pumps.md")
        before: dict[str, list[int]] = {}
        for text in TEXTS:
            parts._ingestion.warm([text], "docs/Pumps.md", mode="add", before=before)
        assert model.tokenizer.decode(before["docs/Pumps.md"]) == "Pumps\n\n# Pumps\n\n## Care"
        assert parts.warm(TEXTS, document="docs/Pumps.md").new == 0, "the same contexts"


def test_texts_without_a_source_and_without_contexts_are_encoded_alone(model: Model, tmp_path: Path) -> None:
    with BlendEngine(model, tmp_path, BlendConfig(context="headings")) as engine:
        engine.warm(TEXTS)
        assert _contexts(engine) == {0}
        engine.warm(TEXTS, document="Pumps.md")
    with BlendEngine(model, tmp_path / "none", BlendConfig(context="headings", context_tokens=0)) as engine:
        engine.warm(TEXTS, document="Pumps.md")
        assert _contexts(engine) == {0}
    with BlendEngine(model, tmp_path / "few", BlendConfig(context="headings", context_tokens=5)) as engine:
        engine.warm(TEXTS, document="Pumps of the old house by the river.md")
        assert _contexts(engine) == {5}, "at most the given number of tokens"


def _contexts(engine: BlendEngine) -> set[int]:
    keys = [text_key("", engine.model.tokenizer.encode(text)) for text in TEXTS]
    return {tokens for state in engine.store.look_up(keys).values() for tokens in state.variants.values()}


def test_an_unknown_context_is_refused() -> None:
    with pytest.raises(SettingError, match="unknown context 'title'; choose one of text, headings"):
        BlendConfig(context="title")
