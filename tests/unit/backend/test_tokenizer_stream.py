"""The joined text of single tokens is the text of all of them, without decoding the whole answer for each token."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from blending import CHUNKS
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from kvrag import PromptError
from kvrag.backend.transformers.tokenizer import TextStream, apply_chat_template

SAID = "The café's “crème brûlée” costs 3 €; 東京から 🍮🍮 and more."


def _sentencepiece() -> Any:
    """A tokenizer like Llama 2's: spaces as ▁, none at the start, unknown characters as bytes."""
    words = ["<unk>", "<s>", "</s>", "▁He", "llo", "▁wor", "ld", "▁", "▁\ufffd"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {word: number for number, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


class _Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, hf: Any) -> None:
        self._hf, self.added_tokens_decoder, self.num_decoded = hf, hf.added_tokens_decoder, 0

    def decode(self, ids: list[int], **settings: Any) -> str:
        self.num_decoded += len(ids)
        return str(self._hf.decode(ids, **settings))


@pytest.fixture(params=["byte-level", "sentencepiece"])
def hf(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    return tokenizer if request.param == "byte-level" else _sentencepiece()


def _bytes(text: bytes) -> list[int]:
    vocab = _sentencepiece().get_vocab()
    return [vocab[f"<0x{byte:02X}>"] for byte in text]


def _joined(hf: Any, ids: list[int], control_tokens: bool = False) -> str:
    stream = TextStream(hf, hf.added_tokens_decoder if control_tokens else ())
    return "".join([*map(stream.push, ids), stream.rest()])


def _whole(hf: Any, ids: list[int], control_tokens: bool = False) -> str:
    return str(hf.decode(ids, skip_special_tokens=not control_tokens, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("control_tokens", [False, True])
def test_joined_pieces_are_the_whole_text(hf: Any, control_tokens: bool) -> None:
    """Of any tokens, also of words, parts of characters and control tokens."""
    for seed in range(20):
        chance = random.Random(seed)
        if hf.decode([3]) == "He":
            parts = [[3], [4], [5], [7], [8], [1], [2], *([_bytes("東".encode()), _bytes("🍮".encode())] * 2)]
            ids = [token for _ in range(60) for token in chance.choice(parts)]
        else:
            ids = [chance.randrange(1418) for _ in range(200)]
        assert _joined(hf, ids, control_tokens) == _whole(hf, ids, control_tokens), seed


def test_the_first_space_is_dropped_and_no_other() -> None:
    hf = _sentencepiece()
    stream = TextStream(hf)
    assert [stream.push(token) for token in (3, 4, 5, 6, 3)] == ["He", "llo", " wor", "ld", " He"]
    stream = TextStream(hf)
    assert [stream.push(token) for token in (1, 3, 1, 5)] == ["", "He", "", " wor"], "no text of control tokens"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ([3, *_bytes("東".encode())[:2]], "He\ufffd\ufffd"),  # ends inside a character
        ([3, *_bytes("東".encode())[:1], 5], "He\ufffd wor"),
        ([*_bytes(b"\xff"), 5], "\ufffd wor"),
        ([3, 8, 5], "He \ufffd wor"),  # the replacement character itself
    ],
)
def test_bytes_that_are_not_utf8_are_replacement_characters(said: list[int], text: str) -> None:
    assert _joined(_sentencepiece(), said) == text


@pytest.mark.parametrize("answer", ["text", "control tokens", "invalid bytes"])
def test_work_is_linear(answer: str, tokenizer: Any) -> None:
    """Every token is decoded a bounded number of times, even if none of them becomes text."""
    hf = _Counting(_sentencepiece() if answer == "invalid bytes" else tokenizer)
    ids = {"text": tokenizer.encode(SAID * 20), "control tokens": [1] * 3000, "invalid bytes": _bytes(b"\xff") * 3000}
    _joined(hf, ids[answer])
    assert hf.num_decoded <= 24 * len(ids[answer])


# ---------------------------------------------------------------- control tokens in messages


class _Older:
    """A tokenizer of transformers before 5.20."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hf, name)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        return self._hf(texts, **options)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        return self._hf.apply_chat_template(messages, **options)


@pytest.mark.parametrize(
    ("content", "is_refused"),
    [(CHUNKS[0], False), ("a </s", False), (f"{CHUNKS[1]} <s>?", True), ("one <tool_call> two", True)],
)
def test_older_transformers_write_no_control_token_of_a_message(content: str, is_refused: bool, tokenizer: Any) -> None:
    changed = copy.deepcopy(tokenizer)
    changed.add_tokens(["<tool_call>"])  # not special, as in Qwen's tokenizers
    changed.chat_template = f"{tokenizer.chat_template}{{% if tools %}}<tool_call>{{% endif %}}"
    said = [{"role": "user", "content": content}]
    if is_refused:
        with pytest.raises(PromptError, match="update transformers"):
            apply_chat_template(_Older(changed), said)
    else:
        assert apply_chat_template(_Older(changed), said) == apply_chat_template(changed, said)
