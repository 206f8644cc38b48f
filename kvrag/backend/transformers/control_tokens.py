"""Keep control tokens in messages as text, also on transformers before 5.20, which has no `sanitize_control_tokens`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

_START, _END = "\U000f0000", "\U000f0001"  # private use: not expected in any text


def apply_chat_template(hf: Any, messages: list[dict[str, Any]], **template: Any) -> list[int]:
    """Render and tokenise messages. Only control tokens written by the template itself become control tokens."""
    if "sanitize_control_tokens" in inspect.signature(hf.apply_chat_template).parameters:
        template |= {"tokenize": True, "return_dict": False, "sanitize_control_tokens": True}
        return list(hf.apply_chat_template(messages, **template))
    return _apply_marked(hf, messages, template)


def _apply_marked(hf: Any, messages: list[dict[str, Any]], template: Mapping[str, Any]) -> list[int]:
    """Mark the control tokens in the input, render, and encode the marked ones as text."""
    tokens = sorted((token.content for token in hf.added_tokens_decoder.values() if token.special), key=len)
    control = "|".join(map(re.escape, reversed(tokens))) or "(?!)"  # the longest first
    chat, variables = _marked((messages, dict(template)), re.compile(control))
    pieces = re.split(f"{_START}({control}){_END}", hf.apply_chat_template(chat, tokenize=False, **variables))
    return [
        token
        for number, piece in enumerate(pieces)  # every second one was marked
        for token in hf.encode(piece, add_special_tokens=False, split_special_tokens=number % 2 == 1)
    ]


def _marked(value: Any, control: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        without_forged_marks = re.sub(f"[{_START}{_END}]", "", value)
        return control.sub(f"{_START}\\g<0>{_END}", without_forged_marks)
    if isinstance(value, Mapping):
        return {name: _marked(item, control) for name, item in value.items()}
    return [_marked(item, control) for item in value] if isinstance(value, (list, tuple)) else value
