"""Thoughts of models that reason before they answer: split them from the text, and begin a grammar behind them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrag.backend.transformers.tokenizer import AnswerRegions, Tokenizer
from kvrag.errors import SettingError
from kvrag.generate.grammar import literal

_TAIL = 16  # tokens of a prompt that may have opened a thought
_ABSENT = "\0"  # occurs in no prompt
_NAMES = ("thinking", "reasoning", "reasoning_content")  # of the field, in tokenizers' response templates
_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates


@dataclass(frozen=True, slots=True)
class Kind:
    """How a model marks its thoughts.

    Attributes:
        signs: One of them is in the chat template, or a token of its own.
        open, close: Empty if they vary and are known as patterns only.
        after: Follows a thought; optional if it is white space.
        header: Precedes an answer that is not a call.
        fields: The thought in transformers' response templates.
    """

    signs: tuple[str, ...]
    open: str
    close: str
    after: str = "\n\n"
    header: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


def _at_start(open: str, close: str) -> Kind:
    pattern, end = rf"\A\s*{re.escape(open)}\s*", rf"\s*{re.escape(close)}\s*"
    return Kind((open, close), open, close, fields={_NAMES[0]: {"open_pattern": pattern, "close_pattern": end}})


_ANALYSIS = r"(?:<\|start\|>assistant)?<\|channel\|>analysis(?!\s*to=functions)[^<]*<\|message\|>\s*"
HARMONY = Kind(  # gpt-oss's
    ("<|channel|>",),
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|start|>assistant",
    "<|channel|>final<|message|>",
    {_NAMES[0]: {"open_pattern": _ANALYSIS, "close_pattern": r"\s*<\|end\|>"}},
)
_KINDS = (HARMONY, _at_start("<think>", "</think>"), _at_start("[THINK]", "[/THINK]"))


def kind_of(tokenizer: Tokenizer) -> Kind | None:
    """Return how the model marks its thoughts; None if it does not think."""
    source = str(tokenizer.hf.chat_template)  # all of them, if there are several
    for kind in _KINDS:
        if any(sign in source or sign in tokenizer.marks for sign in kind.signs):
            return kind
    if fields := own_fields(tokenizer):
        marks = next(iter(fields.values()))
        open, close = (marks[name] if isinstance(marks.get(name), str) else "" for name in ("open", "close"))
        return Kind((), open if close else "", close if open else "", fields=fields)
    return None


def own_fields(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the fields of thoughts in the tokenizer's own response template."""
    fields = (tokenizer.response_template or {}).get("fields", {})
    return {name: fields[name] for name in _NAMES if {"open", "open_pattern"} & set(fields.get(name, ()))}


def switch(tokenizer: Tokenizer, reasoning: bool | None, is_plain: bool) -> dict[str, bool]:
    """Return the variable of the chat template that turns thoughts on or off.

    Args:
        is_plain: The template does not render the prompt.

    Raises:
        SettingError: The template cannot do so.
    """
    if reasoning is None:
        return {}
    if not isinstance(reasoning, bool):
        raise SettingError(f"reasoning must be True, False or None, got {reasoning!r:.80}")
    if not is_plain and (name := tokenizer.find_switch(_SWITCHES)):
        return {name: reasoning}
    kind, source = kind_of(tokenizer), str(tokenizer.hf.chat_template)
    # a token alone is no sign: tokenizers of models that do not think have it too
    thinks = kind is not None and (not kind.signs or any(sign in source for sign in kind.signs))
    if reasoning and not thinks:
        raise SettingError("reasoning=True: this model does not think; leave reasoning out")
    if not reasoning and thinks:
        if is_plain:
            raise SettingError("reasoning=False needs a chat prompt: pass the prompt as a list of messages")
        if kind is HARMONY:
            raise SettingError("reasoning=False: this model always thinks; pass template={'reasoning_effort': 'low'}")
        raise SettingError("reasoning=False: the chat template has no switch for thoughts; leave reasoning out")
    return {}


class Thoughts:
    """Splits one streamed answer into thoughts and text.

    Attributes:
        control_tokens: Those that must stay in the text.
    """

    def __init__(self, tokenizer: Tokenizer, kind: Kind, tail: str) -> None:
        """Begin an answer to a prompt that ends with `tail`."""
        self._tokenizer, self._kind = tokenizer, kind
        self.control_tokens = tokenizer.control_tokens(kind.fields)
        # what the prompt has already opened, or closed as it does without a thought
        self._is_open, self._is_closed, self._in_header = (
            re.search(rf"{re.escape(mark or _ABSENT)}\s*\Z", tail) is not None
            for mark in (kind.open, kind.close, kind.header)
        )
        anchor: dict[str, Any] = {"start_anchor": _ABSENT}
        if kind.signs:
            tail = kind.open if self._is_open else ""
        else:
            template = tokenizer.response_template or {}
            anchor = {name: template[name] for name in template if name.startswith("start_anchor")}
        self._regions = AnswerRegions({**anchor, "fields": {"content": {}, **kind.fields}}, tail)
        self._new, self._is_later, self._num_held, self._num_new = "", False, 0, 0

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: Sequence[int]) -> Thoughts | None:
        """Return those of an answer to this prompt; None for a model that does not think."""
        kind = kind_of(tokenizer)
        return cls(tokenizer, kind, tokenizer.decode(ids[-_TAIL:], control_tokens=True)) if kind else None

    def push(self, text: str, num_tokens: int = 1) -> str:
        """Add the text of tokens; return the text outside thoughts that is now final."""
        return self._take(self._regions.feed(text), num_tokens)

    def end(self) -> str:
        """Return the text held back, at the end of the answer."""
        return self._take(self._regions.end(), 0)

    def _take(self, events: Sequence[Mapping[str, Any]], num_tokens: int) -> str:
        text, is_thought = "", self._regions.field in self._kind.fields
        for event in events:
            is_inside = event["field"] in self._kind.fields
            if event["type"] == "region_chunk" and not is_inside:
                text += event["text"]
            elif event["type"] == "region_chunk":
                self._new, is_thought = self._new + event["text"], True
            elif event["type"] == "region_open" and is_inside:
                self._new += "\n\n" if self._is_later else ""
                self._is_later = is_thought = True
        self._num_held += num_tokens  # tokens of which it is not known yet whether they begin a thought
        if is_thought:
            self._num_new, self._num_held = self._num_new + self._num_held, 0
        elif not self._regions.is_pending:
            self._num_held = 0
        return text

    def take(self) -> dict[str, Any]:
        """Return `reasoning` and `reasoning_tokens` of a Delta: the thought since the last call."""
        new, num_new, self._new, self._num_new = self._new, self._num_new, "", 0
        return {"reasoning": new, "reasoning_tokens": num_new}

    def grammar(self, template: Mapping[str, Any], has_calls: bool) -> str:
        """Return what may or must precede a constrained answer, in Lark's form; "" for nothing.

        Args:
            template: Variables of the chat template, which may turn thoughts off.
            has_calls: The grammar is one of calls, with their headers.
        """
        open, close, after, header = (
            literal(self._tokenizer, text)
            for text in (self._kind.open, self._kind.close, self._kind.after, self._kind.header)
        )
        header = "" if has_calls or (self._in_header and not self._is_open) else header
        is_off = self._is_closed or self._in_header or any(template.get(name) is False for name in _SWITCHES)
        if not close or (is_off and not self._is_open):
            return f"start: {header} @answer" if header else ""
        after = after if self._kind.after.strip() else f"({after})?"
        thought = f"thought {after}" if self._is_open else f"({open} thought {after})?"
        is_token = close.startswith("<")  # then a text cannot contain it
        rule = rf"thought: (/(.|\n)+/)? {close}" if is_token else rf"thought[suffix={close}]: /(.|\n)*/"
        return f"start: {thought} {header} @answer\n{rule}"
