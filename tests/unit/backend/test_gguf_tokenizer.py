"""Tokenizers of GGUF files: llama.cpp's, with the methods of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers", minversion="5.24")

from blending import messages
from families import build
from gguf_files import needs_library, write_gguf
from transformers import AutoTokenizer

from kvrag import BlendEngine, Grammar, Model, ModelLoadError
from kvrag.backend.transformers.gguf import read_header, tokenizer_of
from kvrag.backend.transformers.loading import reader_path
from kvrag.backend.transformers.tokenizer import Tokenizer

S = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = {  # with scores: the best is joined first
    **{S: -40.0, "a": -41.0, "b": -42.0, "c": -43.0, "=": -44.0, "é": -45.0, S + S: -0.5, S + "a": -3.0},
    **{"ab": -2.0, "bc": -1.0, "abc": -8.0, S + "ab": -7.0, "==": -5.0, "===": -6.0},
}
ADDED = {"<extra>": 4, "   ": 4, "<|user|>": 3, "<|end|>": 3}
SPM = {
    "model": "llama",
    "pre": "default",
    "tokens": ["<unk>", "<s>", "</s>", *BYTES, *WORDS, *ADDED],
    "token_type": [2, 3, 3, *[6] * 256, *[1] * len(WORDS), *ADDED.values()],
    "scores": [0.0] * 259 + [*WORDS.values()] + [-1000.0] * len(ADDED),
    **dict.fromkeys(("merges", "padding_token_id")),
    **{"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
}
TEMPLATE = "{{ bos_token }}{% for row in messages %}<|user|>\n{{ row.content }}<|end|>\n{% endfor %}"

Load = Callable[..., Any]

pytestmark = needs_library


@pytest.fixture
def load(tmp_path: Path, tokenizer: Any) -> Load:
    """The tokenizer of a file whose vocabulary is SentencePiece's, with other metadata."""

    def tokenizer_with(architecture: str = "llama", **more: Any) -> Any:
        given = {f"tokenizer__ggml__{key}": value for key, value in SPM.items()}
        own = {"tokenizer__chat_template": TEMPLATE, "general__name": "tiny"}
        path = tmp_path / "tiny.gguf"
        write_gguf(path, architecture, build(architecture), tokenizer, **(given | own | more))
        return tokenizer_of(read_header(str(path)))  # type: ignore[arg-type]

    return tokenizer_with


def tokens(hf: Any, text: str, **settings: Any) -> list[str]:
    return list(hf.convert_ids_to_tokens(hf.encode(text, add_special_tokens=False, **settings)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("a", [S + "a"]),
        (" a", [S + S, "a"]),
        (" ", [S + S]),
        ("  ", [S + S, S]),
        ("abc", [S + "a", "bc"]),
        ("====", [S, "==", "=="]),
        ("é\n", [S, "é", "<0x0A>"]),
        ("a\u00fc", [S + "a", "<0xC3>", "<0xBC>"]),
        ("<s>a", [S, *(BYTES[b] for b in b"<s>"), "a"]),
        ("b<extra> a", [S, "b", "<extra>", S + S, "a"]),
        ("a   a", [S + "a", "   ", S + "a"]),
    ],
)
def test_a_sentencepiece_text(text: str, expected: list[str], load: Load) -> None:
    hf = load()
    assert tokens(hf, text, split_special_tokens=True) == expected
    assert hf.decode(hf.encode(text, add_special_tokens=False), skip_special_tokens=False).replace(" ", "") == (
        text.replace(" ", "")
    )


def test_a_text_behind_a_control_token_begins_with_a_space(load: Load) -> None:
    assert tokens(load(), "<s>a</s>a<unk> a") == ["<s>", S + "a", "</s>", S + "a", "<unk>", S + S, "a"]


def test_without_space_prefix_texts_begin_as_they_are(load: Load) -> None:
    hf = load(tokenizer__ggml__add_space_prefix=False)
    assert tokens(hf, "a</s>a") == ["a", "</s>", "a"]
    assert tokens(hf, " a") == [S + "a"]
    assert hf.decode(hf.encode(" a", add_special_tokens=False)) == " a"


def test_a_vocabulary_without_tokens_for_bytes_is_refused(load: Load) -> None:
    texts = [f"word{number}" if text in BYTES else text for number, text in enumerate(SPM["tokens"])]
    with pytest.raises(ModelLoadError, match="no tokens for bytes"):
        load(tokenizer__ggml__tokens=texts)


def test_a_token_has_its_bytes(load: Load) -> None:
    tokenizer = Tokenizer(hf := load(), "tiny")
    found = [tokenizer.token_text(hf.convert_tokens_to_ids(text)) for text in (S + "a", "<0xC3>", "é", "<|end|>")]
    assert found == [(" a", b" a"), ("\ufffd", b"\xc3"), ("é", "é".encode()), ("<|end|>", b"<|end|>")]


def test_special_tokens_outside_the_vocabulary_are_ignored(load: Load) -> None:
    wide = dict.fromkeys((f"tokenizer__ggml__{name}_token_id" for name in ("bos", "eos", "padding", "eot")), 1 << 20)
    hf = load(**wide)
    assert (hf.bos_token, hf.eos_token, hf.pad_token) == ("<s>", "</s>", None)  # the defaults of these vocabularies


def test_a_model_with_special_tokens_outside_the_vocabulary(tmp_path: Path, tokenizer: Any) -> None:
    wide = {f"tokenizer__ggml__{name}_token_id": 1 << 20 for name in ("bos", "padding", "eot")}
    model = Model.from_pretrained(write_gguf(tmp_path / "tiny.gguf", "llama", build("llama"), tokenizer, **wide))
    assert model.eos_ids == {1}
    assert model.hf.generation_config.bos_token_id is None
    assert model.hf.generation_config.pad_token_id is None


@pytest.fixture
def byte_level(tmp_path: Path, tokenizer: Any) -> Load:
    """The tokenizer of a file whose vocabulary is byte-level, with these tokens in place of its last ones."""

    def tokenizer_with(added: dict[str, int], **more: Any) -> Any:
        vocab = tokenizer.get_vocab()
        texts, num_kept = sorted(vocab, key=vocab.__getitem__), len(vocab) - len(added)
        state = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
        pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in state]
        gone = {*texts[num_kept:]}
        merges = [f"{left} {right}" for left, right in pairs if gone.isdisjoint({left, right, left + right})]
        kinds = [3 if token in tokenizer.all_special_tokens else 1 for token in texts[:num_kept]]
        path = write_gguf(
            tmp_path / "tiny.gguf",
            "llama",
            build("llama"),
            tokenizer,
            tokenizer__ggml__tokens=[*texts[:num_kept], *added],
            tokenizer__ggml__token_type=[*kinds, *added.values()],
            tokenizer__ggml__merges=merges,
            **more,
        )
        return tokenizer_of(read_header(str(path)))  # type: ignore[arg-type]

    return tokenizer_with


def test_control_tokens_of_any_characters_are_found(byte_level: Load) -> None:
    hf = byte_level({"<\uff5cUser\uff5c>": 3, "<think>": 4, "   ": 4})
    assert tokens(hf, "<\uff5cUser\uff5c><think>   <think>") == ["<\uff5cUser\uff5c>", "<think>", "   ", "<think>"]
    assert "<\uff5cUser\uff5c>" not in tokens(hf, "<\uff5cUser\uff5c>", split_special_tokens=True)
    assert hf.decode(hf.encode("<\uff5cUser\uff5c> é", add_special_tokens=False)) == "<\uff5cUser\uff5c> é"


def test_bos_is_added_as_the_file_or_its_kind_says(byte_level: Load) -> None:
    ways = {("gpt-2", None): False, ("llama-bpe", None): True, ("tekken", None): True, ("tekken", False): False}
    for (pre, flag), adds in ways.items():
        hf = byte_level({}, tokenizer__ggml__pre=pre, tokenizer__ggml__add_bos_token=flag)
        assert (hf("a")["input_ids"][0] == hf.bos_token_id) is adds, pre


def test_a_template_for_tools_is_used_for_tools(byte_level: Load) -> None:
    plain, tools = "{{ messages[0].content }}", "tools: {{ messages[0].content }}"
    hf = byte_level({}, tokenizer__chat_template=plain, tokenizer__chat_template__tool_use=tools)
    assert Tokenizer(hf, "tiny").template_text() == plain
    assert Tokenizer(hf, "tiny").template_text([{}]) == tools


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_prompt_does_not_end_with_eos(adds_bos: bool, tmp_path: Path) -> None:
    tuned = AutoTokenizer.from_pretrained(reader_path())
    tuned.add_eos_token, tuned.add_bos_token = True, adds_bos
    tuned.save_pretrained(tmp_path)
    hf = AutoTokenizer.from_pretrained(tmp_path)
    assert hf("The end")["input_ids"][-1] == hf.eos_token_id
    ids = hf.encode("The end", add_special_tokens=False)
    assert Tokenizer(hf, "tuned").render("The end") == [hf.bos_token_id] * adds_bos + ids
    written = Tokenizer(hf, "tuned").render(f"The end{hf.eos_token}")
    assert written == [hf.bos_token_id] * adds_bos + ids + [hf.eos_token_id]


def test_a_prompt_from_a_file_with_add_eos_does_not_end_with_eos(load: Load) -> None:
    hf = load(tokenizer__ggml__add_eos_token=True)
    assert hf.convert_ids_to_tokens(Tokenizer(hf, "tiny").render("a")) == ["<s>", S + "a"]
    assert hf.convert_ids_to_tokens(Tokenizer(hf, "tiny").render("a</s>")) == ["<s>", S + "a", "</s>"]


@pytest.fixture
def model(tmp_path: Path, tokenizer: Any) -> Model:
    hf = build("llama", vocab_size=len(SPM["tokens"]))
    given = {f"tokenizer__ggml__{key}": value for key, value in SPM.items()}
    path = write_gguf(tmp_path / "tiny.gguf", "llama", hf, tokenizer, tokenizer__chat_template=TEMPLATE, **given)
    return Model.from_pretrained(path)


def test_tokens_that_end_answers_are_found_by_their_text(model: Model) -> None:
    assert model.eos_ids == {2, SPM["tokens"].index("<|end|>")}


@pytest.mark.parametrize("form", [{"regex": "(ab+ c|b)é!"}, {"json_schema": {"enum": ["abc", "ü"]}}])
def test_an_answer_keeps_to_a_grammar(form: dict[str, Any], model: Model, tmp_path: Path) -> None:
    with BlendEngine(model, tmp_path / "kv") as engine:
        answers = [engine.generate("ab", grammar=Grammar(**form), max_new_tokens=40, seed=n).text for n in range(4)]
    assert all(re.fullmatch('(ab+ c|b)é!|"(abc|ü)"', text) for text in answers), answers


def test_a_forced_call_has_its_marks(model: Model, tmp_path: Path) -> None:
    tool = {
        "type": "function",
        "function": {"name": "a", "parameters": {"type": "object", "properties": {"b": {"enum": [1]}}}},
    }
    with BlendEngine(model, tmp_path / "kv") as engine:
        [call] = engine.generate(messages("ab"), tools=[tool], tool_choice="a", max_new_tokens=200).tool_calls
    assert (call.name, call.arguments) in [("a", {}), ("a", {"b": 1})]


def test_normal_tokens_stay_text_though_a_role_has_them(load: Load) -> None:
    hf = load(tokenizer__ggml__padding_token_id=SPM["tokens"].index("b"))
    assert tokens(hf, "ab") == [S + "ab"]
    assert hf.pad_token is None


def test_an_end_token_is_found_though_the_file_calls_it_normal(load: Load) -> None:
    kinds = [
        1 if text in ("</s>", "<|end|>") else kind for text, kind in zip(SPM["tokens"], SPM["token_type"], strict=True)
    ]
    hf = load(tokenizer__ggml__token_type=kinds)
    assert tokens(hf, "a<|end|></s>") == [S + "a", "<|end|>", "</s>"]
    assert hf.decode(hf.encode("a<|end|></s>", add_special_tokens=False), skip_special_tokens=True) == "a"
