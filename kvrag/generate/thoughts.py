"""Thoughts of models that reason before they answer: split them from the text, and begin a grammar behind them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrag.backend.transformers.tokenizer import AnswerRegions, Tokenizer
from kvrag.errors import SettingError

_TAIL = 16  # tokens of a prompt that may have opened a thought
_ABSENT = "\0"  # occurs in no prompt
_NAMES = ("thinking", "reasoning", "reasoning_content")  # of the field, in tokenizers' response templates
SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that turn thoughts on and off."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Marks of a thought.

    Attributes:
        signs: One of them is in the chat template, or a token of its own, if the model thinks this way.
        open, close: In pieces: a token is a piece of its own.
        open_pattern: If the opening varies.
        after: Follows a thought; optional if it is white space.
        header: Precedes an answer that is not a call.
    """

    signs: tuple[str, ...]
    open: tuple[str, ...]
    close: str
    open_pattern: str = ""
    after: tuple[str, ...] = ("\n\n",)
    header: tuple[str, ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """The thought as a field of transformers' response templates; only a kind with channels has several."""
        pattern = self.open_pattern or rf"\A\s*{re.escape(''.join(self.open))}"
        space = "" if self.header else r"\s*"
        return {_NAMES[0]: {"open_pattern": rf"{pattern}\s*", "close_pattern": rf"\s*{re.escape(self.close)}{space}"}}


HARMONY = Kind(
    ("<|channel|>",),
    ("<|channel|>", "analysis", "<|message|>"),
    "<|end|>",
    r"(?:<\|start\|>assistant)?<\|channel\|>analysis(?!\s*to=functions)[^<]*<\|message\|>",
    ("<|start|>", "assistant"),
    ("<|channel|>", "final", "<|message|>"),
)
_KINDS = (
    HARMONY,
    Kind(("<think>", "</think>"), ("<think>",), "</think>"),
    Kind(("[THINK]", "[/THINK]"), ("[THINK]",), "[/THINK]"),
)


def kind_of(tokenizer: Tokenizer) -> Kind | None:
    """Return how the model marks its thoughts, if it does in a known way."""
    source = tokenizer.template_text()

    def is_known(sign: str) -> bool:
        return sign in source or tokenizer.added_token(sign) is not None

    return next((kind for kind in _KINDS if any(map(is_known, kind.signs))), None)


def own_fields(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the fields of thoughts in the tokenizer's own response template."""
    template: Mapping[str, Any] = tokenizer.response_template or {}
    fields = template.get("fields", {})
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
    if not is_plain and (name := tokenizer.find_switch(SWITCHES)):
        return {name: reasoning}
    kind, source = kind_of(tokenizer), tokenizer.template_text()
    # a token alone is no sign: tokenizers of models that do not think have it too
    thinks = bool(own_fields(tokenizer)) or (kind is not None and any(sign in source for sign in kind.signs))
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

    def __init__(self, tokenizer: Tokenizer, kind: Kind | None, tail: str) -> None:
        """Begin an answer to a prompt that ends with `tail`. Without a kind, the response template has the fields."""
        self._tokenizer, self._kind = tokenizer, kind
        marks = (re.escape("".join(kind.open)), re.escape(kind.close)) if kind else (_ABSENT, _ABSENT)
        self._is_open, self._is_closed = (re.search(rf"{mark}\s*\Z", tail) is not None for mark in marks)
        self._in_header = kind is HARMONY and tail.endswith("<|message|>") and not self._is_open
        if kind:
            anchor, fields = {"start_anchor": _ABSENT}, kind.fields
            tail = "".join(kind.open) if self._is_open else ""
        else:
            template = tokenizer.response_template or {}
            anchor = {name: template[name] for name in template if name.startswith("start_anchor")}
            fields = own_fields(tokenizer)
        self._fields = fields
        self._regions = AnswerRegions({**anchor, "fields": {"content": {}, **fields}}, tail)
        self.control_tokens = tokenizer.control_tokens(fields)
        self._new, self._is_later, self._num_held, self._num_new = "", False, 0, 0

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: Sequence[int]) -> Thoughts | None:
        """Return those of an answer to this prompt; None for a model that does not think."""
        kind = kind_of(tokenizer)
        if kind is None and not own_fields(tokenizer):
            return None
        return cls(tokenizer, kind, tokenizer.decode(ids[-_TAIL:], control_tokens=True))

    def push(self, text: str, num_tokens: int = 1) -> str:
        """Add the text of tokens; return the text outside thoughts that is now final."""
        return self._take(self._regions.feed(text), num_tokens)

    def end(self) -> str:
        """Return the text held back, at the end of the answer."""
        return self._take(self._regions.end(), 0)

    def _take(self, events: Sequence[Mapping[str, Any]], num_tokens: int) -> str:
        text, self._num_held = "", self._num_held + num_tokens
        is_thought = self._regions.field in self._fields
        for event in events:
            inside = event["field"] in self._fields
            if inside and event["type"] == "region_open":
                self._new += "\n\n" if self._is_later else ""
                self._is_later = is_thought = True
            elif event["type"] == "region_chunk":
                is_thought = is_thought or inside
                if inside:
                    self._new += event["text"]
                else:
                    text += event["text"]
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
        kind = self._kind
        if kind is None:
            return ""
        term = self._term
        close, after = term(kind.close), " ".join(map(term, kind.after))
        is_token = close.startswith("<")
        thought = rf"(/(.|\n)+/)? {close}" if is_token else "thought"
        thought += f" ({after})?" if not kind.header else f" {after}"
        header = "" if has_calls or self._in_header else " ".join(map(term, kind.header))
        if self._is_open:
            before = thought
        elif self._is_closed or self._in_header or any(template.get(name) is False for name in SWITCHES):
            before = ""
        else:
            before = f"({' '.join(map(term, kind.open))} {thought})?"
        rule = "" if is_token else f"\nthought[suffix={close}]: /(.|\\n)*/"
        return f"start: {before} {header} @answer{rule if before else ''}" if before or header else ""

    def _term(self, text: str) -> str:
        token = self._tokenizer.added_token(text)
        return json.dumps(text) if token is None else f"<[{token}]>"
