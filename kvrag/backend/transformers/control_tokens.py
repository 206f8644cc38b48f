"""Keep control tokens in messages as text, also on transformers before 5.20, which has no `sanitize_control_tokens`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

_START, _END = "\U000f0000", "\U000f0001"  # private use: not expected in any text


def apply_chat_template(hf: Any, messages: list[dict[str, Any]], **template: Any) -> list[int]:
    """Render and tokenise messages. Only control tokens written by the template itself become control tokens."""
    if "sanitize_control_tokens" in inspect.signature(hf.apply_chat_template).parameters:
        rendered = partial(hf.apply_chat_template, tokenize=True, return_dict=False, sanitize_control_tokens=True)
        return list(rendered(messages, **template))
    return _apply_marked(hf, messages, template)


def _apply_marked(hf: Any, messages: list[dict[str, Any]], template: Mapping[str, Any]) -> list[int]:
    """Mark the control tokens in the input, render, and encode the marked ones as text, like transformers 5.20."""
    source = hf.get_chat_template(tools=template.get("tools"))
    tokens = [
        token.content
        for token in hf.added_tokens_decoder.values()
        if token.special or (token.content in source and not token.content.isspace())
    ]
    longest_first = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)"
    chat, marked_template = _marked((messages, dict(template)), re.compile(longest_first))
    text = hf.apply_chat_template(chat, tokenize=False, **marked_template)
    return [token for piece in _pieces(hf, text, longest_first) for token in piece]


def _marked(value: Any, control: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        without_forged_marks = re.sub(f"[{_START}{_END}]", "", value)
        return control.sub(f"{_START}\\g<0>{_END}", without_forged_marks)
    if isinstance(value, Mapping):
        return {name: _marked(item, control) for name, item in value.items()}
    return [_marked(item, control) for item in value] if isinstance(value, (list, tuple)) else value


def _pieces(hf: Any, text: str, control: str) -> Iterator[list[int]]:
    """Yield the ids of the pieces between the marks. A lone mark, cut off by the template, is dropped."""
    pieces = re.split(f"{_START}({control}){_END}|[{_START}{_END}]", text)  # every second piece was marked
    yield hf.encode(pieces[0], add_special_tokens=False)
    newline = hf.encode("\n", add_special_tokens=False)
    for number, piece in enumerate(pieces[1:], start=1):
        if not piece:
            continue
        encode = partial(_encode_as_text, hf) if number % 2 else partial(hf.encode, add_special_tokens=False)
        # after a line break, so that SentencePiece adds no space before the piece
        ids = encode("\n" + piece)
        ids = ids[len(newline) :] if ids[: len(newline)] == newline else encode(piece)
        if number % 2 and hf.convert_tokens_to_ids(piece) in ids:
            raise ValueError(f"the tokenizer cannot encode {piece!r} as text")
        yield ids


def _encode_as_text(hf: Any, text: str) -> list[int]:
    """Return the ids of the text without recognising any added token."""
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None:
        return list(hf.encode(text, add_special_tokens=False, split_special_tokens=True))
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    words = [text]
    if backend.pre_tokenizer is not None:
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for word in words for token in backend.model.tokenize(word)]
