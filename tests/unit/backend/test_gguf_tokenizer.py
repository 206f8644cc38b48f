"""Tokenizers of GGUF files: the ids are llama.cpp's, and what the file says of its tokenizer is honoured or refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers", minversion="5.24")

from families import build
from gguf_files import needs_library, write_gguf
from transformers import AutoTokenizer

from kvrag import BlendEngine, Model, UnsupportedModelError
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


def spm(text: str) -> list[str]:
    """Tokens as llama.cpp finds them: join the neighbours whose token has the best score, the first of equal ones."""
    parts = list(f" {text}".replace(" ", S)) if text else []
    while pairs := [(-WORDS[a + b], n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in WORDS]:
        at = min(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return [token for part in parts for token in ([part] if part in WORDS else [BYTES[b] for b in part.encode()])]


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


def test_random_texts_have_the_tokens_of_the_reference(load: Load) -> None:
    hf, random = load(), Random(0)
    for _ in range(300):
        text = "".join(random.choices(["a", "b", "c", "=", " ", "  ", "é", "\n", "ü"], k=random.randrange(1, 30)))
        if "   " not in text:
            assert tokens(hf, text) == spm(text), text


def test_a_text_behind_a_control_token_begins_with_a_space(load: Load) -> None:
    assert tokens(load(), "<s>a</s>a<unk> a") == ["<s>", S + "a", "</s>", S + "a", "<unk>", S + S, "a"]


def test_without_space_prefix_texts_begin_as_they_are(load: Load) -> None:
    hf = load(tokenizer__ggml__add_space_prefix=False)
    assert tokens(hf, "a</s>a") == ["a", "</s>", "a"]
    assert tokens(hf, " a") == [S + "a"]
    assert hf.decode(hf.encode(" a", add_special_tokens=False)) == " a"


@pytest.mark.parametrize(
    ("architecture", "name", "strips"),
    [("phi3", "Phi 3 Mini 4k Instruct", True), ("llama", "Phi-3 mini", True), ("llama", "tiny", False)],
)
def test_control_tokens_of_phi3_take_the_white_space_behind_them(
    architecture: str, name: str, strips: bool, load: Load
) -> None:
    hf = load(architecture, general__name=name)
    said = hf.apply_chat_template([{"role": "user", "content": " a"}], tokenize=False)
    if strips:
        assert tokens(hf, said) == ["<s>", "<|user|>", S + "a", "<|end|>"]
        assert tokens(hf, "<s> a") == ["<s>", S + S, "a"]
    else:
        assert tokens(hf, said).count("<0x0A>") == 2


def test_unknown_characters_without_bytes_are_one_unknown_token(load: Load) -> None:
    plain = {"tokens": [f"word{n}" if text in BYTES else text for n, text in enumerate(SPM["tokens"])]}
    kinds = [1 if kind == 6 else kind for kind in SPM["token_type"]]
    hf = load(tokenizer__ggml__tokens=plain["tokens"], tokenizer__ggml__token_type=kinds)
    assert tokens(hf, "aüöa") == [S + "a", "<unk>", "a"]


def test_control_tokens_are_made_of_no_text(load: Load) -> None:
    words = ["<|", "end", "|>", "<|end", "e", "n", "d", "en", "<", "|", ">"]
    hf = load(
        tokenizer__ggml__tokens=[*SPM["tokens"], *words],
        tokenizer__ggml__token_type=[*SPM["token_type"], *[1] * len(words)],
        tokenizer__ggml__scores=[*SPM["scores"], *map(float, range(-100, -100 - len(words), -1))],
    )
    assert tokens(hf, "<|end|>", split_special_tokens=True) == [S, "<|end", "|>"]


def test_a_file_with_placeholders_for_scores_has_the_order_in_its_merges(load: Load) -> None:
    merges = ["a b", f"{S} ab", f"{S} a", "b c"]
    hf = load(tokenizer__ggml__scores=[0.0] * len(SPM["tokens"]), tokenizer__ggml__merges=merges)
    assert tokens(hf, "abc") == [S + "ab", "c"]


def test_scores_come_before_merges(load: Load) -> None:
    assert tokens(load(tokenizer__ggml__merges=["a b"]), "abc") == [S + "a", "bc"]


def test_tokens_that_overlap_with_the_same_score_are_refused(load: Load) -> None:
    scores = [-1.0 if text in ("ab", "bc") else score for text, score in zip(SPM["tokens"], SPM["scores"], strict=True)]
    assert tokens(load(tokenizer__ggml__scores=scores), "abc") == [S + "ab", "c"]  # in this order in the file
    swap = {"ab": "bc", "bc": "ab"}
    other = [swap.get(text, text) for text in SPM["tokens"]]
    with pytest.raises(UnsupportedModelError, match="'ab' and 'bc' of its tokenizer overlap and have the same score"):
        load(tokenizer__ggml__scores=scores, tokenizer__ggml__tokens=other)


def test_special_tokens_outside_the_vocabulary_are_ignored(load: Load) -> None:
    wide = dict.fromkeys((f"tokenizer__ggml__{name}_token_id" for name in ("bos", "eos", "padding", "eot")), 1 << 20)
    hf = load(**wide)
    assert (hf.bos_token, hf.eos_token, hf.pad_token) == ("<s>", "</s>", None)  # the defaults of these vocabularies


@needs_library
def test_a_model_whose_end_token_is_outside_the_vocabulary(tmp_path: Path, tokenizer: Any) -> None:
    wide = {"tokenizer__ggml__eos_token_id": 1 << 20}
    model = Model.from_pretrained(write_gguf(tmp_path / "tiny.gguf", "llama", build("llama"), tokenizer, **wide))
    assert model.tokenizer.hf.eos_token is None
    assert model.eos_ids == set()


@needs_library
def test_a_model_with_special_tokens_outside_the_vocabulary(tmp_path: Path, tokenizer: Any) -> None:
    wide = {f"tokenizer__ggml__{name}_token_id": 1 << 20 for name in ("bos", "padding", "eot")}
    model = Model.from_pretrained(write_gguf(tmp_path / "tiny.gguf", "llama", build("llama"), tokenizer, **wide))
    assert model.eos_ids == {1}
    assert model.hf.generation_config.bos_token_id is None
    assert model.hf.generation_config.pad_token_id is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ggml__unheard_of", 7),
        ("ggml__normalizer__lowercase", True),
        ("ggml__remove_extra_whitespaces", True),
        ("ggml__precompiled_charsmap", [0, 1]),
        ("ggml__added_tokens", ["a"]),
        ("ggml__suppress_tokens", [7]),
        ("ggml__add_sep_token", True),
        ("rwkv__world", "a"),
    ],
)
def test_an_unknown_setting_is_refused_by_name(key: str, value: Any, load: Load) -> None:
    name = key.replace("__", ".")
    with pytest.raises(UnsupportedModelError, match=f"its setting tokenizer.{name} would be lost"):
        load(**{f"tokenizer__{key}": value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ggml__fim_pre_token_id", 7),
        ("ggml__mask_token_id", 7),
        ("ggml__seperator_token_id", 7),
        ("ggml__token_type_count", 2),
        ("ggml__remove_extra_whitespaces", False),
        ("ggml__add_unknown_token", False),
        ("huggingface__json", "{}"),
    ],
)
def test_a_setting_that_changes_no_prompt_is_accepted(key: str, value: Any, load: Load) -> None:
    hf = load(**{f"tokenizer__{key}": value})
    assert tokens(hf, "abc") == [S + "a", "bc"]


@pytest.mark.parametrize("change", [{"model": "t5"}, {"tokens": ["a"] * len(SPM["tokens"])}])
def test_another_kind_of_vocabulary_is_refused(change: dict[str, Any], load: Load) -> None:
    with pytest.raises(UnsupportedModelError, match="is not read"):
        load(**{f"tokenizer__ggml__{key}": value for key, value in change.items()})


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
    assert len(hf) == len(hf.backend_tokenizer.get_vocab())
    assert "<\uff5cUser\uff5c>" not in tokens(hf, "<\uff5cUser\uff5c>", split_special_tokens=True)
    assert hf.decode(hf.encode("<\uff5cUser\uff5c> é", add_special_tokens=False)) == "<\uff5cUser\uff5c> é"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", "Ġ1234", "ĠABC", "!!"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "ĠABC", "!!"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "ĠABC", "!!"]),
        ("stablelm2", ["It", "'s", "Ġ", "1", "2", "3", "4", "ĠABC", "!!"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "ĠABC", "!!"]),
        (None, ["It", "'", "s", "Ġ", "123", "4", "ĠABC", "!!"]),
        ("default", ["It", "'", "s", "Ġ", "123", "4", "ĠABC", "!!"]),
        ("deepseek-coder", ["It", "'", "s", "Ġ", "1", "2", "3", "4", "ĠABC", "!!"]),
    ],
)
def test_texts_are_split_as_the_file_says(pre: str | None, words: list[str], byte_level: Load) -> None:
    hf = byte_level({}, tokenizer__ggml__pre=pre)
    found = hf.backend_tokenizer.pre_tokenizer.pre_tokenize_str("It's 1234 ABC!!")
    assert [word for word, _ in found] == words


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


# ---------------------------------------------------------------- what Ollama adds to a file

MODEL = "a" * 64


@pytest.fixture
def pull(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Make a model of Ollama with these layers, and return its name."""

    def model_with(layers: dict[str, str], **more: Any) -> str:
        monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
        manifest = tmp_path / "manifests/registry.ollama.ai/library/tiny/latest"
        (tmp_path / "blobs").mkdir()
        manifest.parent.mkdir(parents=True)
        write_gguf(tmp_path / "blobs" / f"sha256-{MODEL}", "llama", build("llama"), tokenizer, **more)
        rows = [("model", MODEL)]
        for number, (kind, text) in enumerate(layers.items()):
            rows.append((kind, f"{number:064}"))
            (tmp_path / "blobs" / f"sha256-{number:064}").write_text(text)
        made = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{d}"} for kind, d in rows]
        manifest.write_text(json.dumps({"layers": made}))
        return "ollama:tiny"

    return model_with


@needs_library
def test_ollamas_system_message_is_the_default(pull: Load) -> None:
    tokenizer = Model.from_pretrained(pull({"system": "Answer like a pirate.", "license": "MIT"})).tokenizer
    own, user = ({"role": role, "content": "Hello"} for role in ("system", "user"))
    system = {"role": "system", "content": "Answer like a pirate."}
    assert tokenizer.render([user]) == tokenizer.render([system, user])
    assert "pirate" not in tokenizer.decode(tokenizer.render([own, user]))
    assert "pirate" not in tokenizer.decode(tokenizer.render([{**own, "role": "developer"}, user]))


@needs_library
def test_ollamas_parameters_are_defaults(pull: Load, tmp_path: Path) -> None:
    params = {"temperature": 0.25, "top_k": 7, "top_p": 0.75, "min_p": 0.125, "repeat_penalty": 1.5}
    model = Model.from_pretrained(pull({"params": json.dumps(params | {"stop": ["<pad>", "e"]})}))
    config = model.hf.generation_config
    assert (
        config.temperature,
        config.do_sample,
        config.top_k,
        config.top_p,
        config.min_p,
        config.repetition_penalty,
    ) == (*(0.25, True, 7, 0.75, 0.125, 1.5),)
    assert model.tokenizer.hf.convert_tokens_to_ids("<pad>") in model.eos_ids
    with BlendEngine(model, tmp_path / "kv") as engine:
        assert "e" not in engine.generate("The", max_new_tokens=20).text


@needs_library
def test_a_temperature_of_zero_is_greedy(pull: Load) -> None:
    model = Model.from_pretrained(pull({"params": '{"temperature": 0}'}))
    assert not model.hf.generation_config.do_sample


@needs_library
def test_what_ollama_says_and_kvrag_leaves_out_is_one_line(pull: Load, caplog: pytest.LogCaptureFixture) -> None:
    layers = {"template": "{{ .Prompt }}", "messages": "[]", "params": '{"num_ctx": 4096, "temperature": 1}'}
    with caplog.at_level(logging.WARNING, "kvrag"):
        Model.from_pretrained(pull(layers))
    said = [record.getMessage() for record in caplog.records if record.name == "kvrag"]
    assert said == [
        "ollama:tiny: of its Modelfile, not applied: TEMPLATE, MESSAGES, num_ctx; "
        "a chat template is read from its GGUF file only"
    ]


@needs_library
def test_ollamas_system_message_is_left_out_without_a_chat_template(
    pull: Load, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvrag"):
        model = Model.from_pretrained(pull({"system": "Be brief."}, tokenizer__chat_template=None))
    assert "not applied: SYSTEM;" in caplog.text
    assert "brief" not in model.tokenizer.decode(model.tokenizer.render("Hello"))


@needs_library
def test_a_model_of_ollama_of_which_all_is_applied_says_nothing(pull: Load, caplog: pytest.LogCaptureFixture) -> None:
    template = "{{ messages[0].content }}"
    layers = {"system": "Be brief.", "template": template, "params": '{"temperature": 1}', "license": "MIT"}
    with caplog.at_level(logging.WARNING, "kvrag"):
        Model.from_pretrained(pull(layers, tokenizer__chat_template=template))
    assert not [record for record in caplog.records if record.name == "kvrag"]


@needs_library
def test_tokens_that_end_answers_are_found_by_their_text(tmp_path: Path, tokenizer: Any) -> None:
    hf = build("llama", vocab_size=len(SPM["tokens"]))
    given = {f"tokenizer__ggml__{key}": value for key, value in SPM.items()}
    path = write_gguf(tmp_path / "tiny.gguf", "llama", hf, tokenizer, tokenizer__chat_template=TEMPLATE, **given)
    model = Model.from_pretrained(path)
    assert model.eos_ids == {2, SPM["tokens"].index("<|end|>")}


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
