"""Prompts are tokenised in pieces: the same ids as the whole text has, by tokenizers for which that is certain."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from kvrag.backend.transformers import tokenizer as module
from kvrag.backend.transformers.tokenizer import apply_chat_template

_LAST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
PATTERNS = {
    "gpt-4": rf"{_SUFFIX}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LAST}",
    "o200k": rf"{_WORD}{_UPPER}*{_LOWER}+{_SUFFIX}?|{_WORD}{_UPPER}+{_LOWER}*{_SUFFIX}?|\p{{N}}{{1,3}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LAST}",
}
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENDS = [
    ".",
    "a",
    "1",
    " ",
    "'",
    "\t",
    "\r",
    "\n",
    "é",
    "e\u0301",
    "\u00a0",
    "x /",
    "]",
    "日本",
    "\u2028",
    "--",
    "</s",
    "s'",
]
BEGINS = ["A", "b c", "Ёж", "ß", "각", "\u1100\u1161", "²", "Ⅷ", "\u0627", "s", "Don't", "re: x", "é", "1", " a"]
BEGINS += ["\n", "/", "'s", "\u0301", "日"]


def _with_pattern(tokenizer: Any, pattern: str, **byte_level: Any) -> Any:
    changed = copy.deepcopy(tokenizer)
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    letters = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": False} | byte_level)
    changed.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    return changed


def _pieces(hf: Any, text: str) -> list[str]:
    return module._pieces(hf, text)


def _words(hf: Any, text: str) -> list[str]:
    if normalizer := hf.backend_tokenizer.normalizer:
        text = normalizer.normalize_str(text)
    return [word for word, _ in hf.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 1)


@pytest.mark.parametrize("pattern", [None, *PATTERNS])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["", "NFC"])
def test_pieces_have_the_ids_of_the_whole(pattern: str | None, normalizer: Any, tokenizer: Any) -> None:
    hf = _with_pattern(tokenizer, PATTERNS[pattern]) if pattern else copy.deepcopy(tokenizer)
    hf.backend_tokenizer.normalizer = normalizer
    rng = random.Random(0)
    joints = [
        f"{end}{line}{begin}" for end, line, begin in itertools.product(ENDS, ["\n\n", "\n \n", "\n\n\n"], BEGINS)
    ]
    rng.shuffle(joints)
    text = "".join(joints)
    messages = [{"role": "system", "content": text[:200]}, {"role": "user", "content": text}]
    whole = hf.apply_chat_template(messages, return_dict=False, sanitize_control_tokens=True)
    assert apply_chat_template(hf, messages) == list(whole)
    pieces = _pieces(hf, text)
    assert "".join(pieces) == text
    assert len(pieces) > len(joints) / 4
    # this tokenizer merges little; another may merge all bytes of a word
    assert [word for piece in pieces for word in _words(hf, piece)] == _words(hf, text)


@pytest.mark.parametrize("token", ["</s>", "\U000f0000", "<extra>"])
def test_control_tokens_of_messages_stay_text(token: str, tokenizer: Any) -> None:
    hf = copy.deepcopy(tokenizer)
    hf.add_tokens(["<extra>"])
    hf.chat_control_tokens = ["<extra>"]
    messages = [{"role": "user", "content": f"One.\n\nTwo {token} three.\n\nFour"}]
    ids = apply_chat_template(hf, messages)
    assert ids == hf.apply_chat_template(messages, return_dict=False, sanitize_control_tokens=True)
    clean = apply_chat_template(hf, [{"role": "user", "content": "One."}])
    assert ids.count(hf.eos_token_id) == clean.count(hf.eos_token_id)
    assert hf.convert_tokens_to_ids("<extra>") not in ids


def test_long_pieces_are_few(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 100)
    pieces = _pieces(tokenizer, "A line of words.\n\n" * 100)
    assert {len(piece) for piece in pieces[:-1]} == {108}


def test_a_text_stays_whole_where_its_parts_may_depend_on_each_other(tokenizer: Any) -> None:
    whole = {
        "gpt-2": _with_pattern(tokenizer, GPT_2),  # looks at what follows line breaks
        "looks back": _with_pattern(tokenizer, rf"(?<=\n)\p{{L}}+|{PATTERNS['gpt-4']}"),
        "a space before each text": _with_pattern(tokenizer, PATTERNS["gpt-4"], add_prefix_space=True),
        "other": copy.deepcopy(tokenizer),
        "lower case": copy.deepcopy(tokenizer),
        "token with line breaks": copy.deepcopy(tokenizer),
        "token that strips": copy.deepcopy(tokenizer),
    }
    whole["other"].backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    whole["lower case"].backend_tokenizer.normalizer = normalizers.Lowercase()
    whole["token with line breaks"].add_tokens(["\n\nHuman"])
    whole["token that strips"].add_tokens([AddedToken("Human", lstrip=True)])
    text = "One.\n\nTwo.\n\nThree."
    for name, hf in whole.items():
        assert _pieces(hf, text) == [text], name
    assert len(_pieces(tokenizer, text)) == 3
