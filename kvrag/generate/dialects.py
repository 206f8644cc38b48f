"""Formats of tool calls and thoughts: how to recognise a model's by its chat template, and where calls are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrag.backend.transformers.tokenizer import AnswerRegions

OPEN, CLOSE = "<tool_call>", AnswerRegions.tag

THOUGHT_FIELDS = ("thinking", "reasoning", "reasoning_content")  # of the field, in tokenizers' response templates
SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates

# regions of an answer, in transformers' template of responses; `bare` and `python` ones begin it
_TAGGED = r"(?P<open>\s*<tool_call>\s*)(?=[\[{]|\Z)"
_BARE = r'(?P<open>\A\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)?\s*)(?=\[?\s*\{\s*"|(?:NAMES)(?:\[ARGS\])?\{|\Z)'
_XML = r"(?P<open>\s*(?:<tool_call>\s*)?<function=(?P<name>[\w.-]+)>)"
_PYTHON = r"(?P<open>\A\s*(?:<\|python_start\|>)?\s*)(?=\[\s*(?P<name>NAMES)\s*\()"
_BEGIN, _CALL, _SEP, _END, _ENDS = (
    f"<\uff5ctool▁{name}\uff5c>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
_RECIPIENT = (
    r"(?P<open>(?:<\|start\|>assistant|\A)\s*to=functions\."
    r"|(?:<\|start\|>assistant)?<\|channel\|>(?:commentary|analysis)\s*to=functions\.)"
)
# what gpt-oss writes between its messages
_CHANNEL = (
    r"(?:<\|start\|>assistant)?<\|channel\|>\w*+(?!\s*to=functions)[^<]*(?:<\|constrain\|>[^<]*)?(?:<\|message\|>|\Z)"
    r"|<\|start\|>(?:assistant)?|<\|(?:end|return|call)\|>"
)


def _region(pattern: str, **more: Any) -> dict[str, Any]:
    return {"open_pattern": pattern, "transform": "{open}", **more}


def _mark(pattern: str) -> dict[str, dict[str, Any]]:
    """Return a region without text."""
    return {"mark": {"open_pattern": pattern, "close_pattern": ""}}


CHANNELS = _mark(_CHANNEL)
"""The marks in gpt-oss's answers."""

_HERMES = {"tagged": _region(_TAGGED, close=CLOSE), "bare": _region(_BARE)}
_DEEPSEEK = {
    "named": _region(rf"(?P<open>\s*{_BEGIN}\s*(?:{_CALL}|\Z)|\s*{_CALL})", close=_END),
    **_mark(rf"(?<={_END})\s*{_ENDS}"),
}
_PYTHON_CALL = {"name": "{name}", "arguments": "{arguments}"}
_PYTHON_LIST = {
    "python": _region(_PYTHON, content="python-call-list", transform=_PYTHON_CALL, transform_each=True),
}
_XML_CALL = {"function": {"name": "{name}", "arguments": "{content}"}}
_XML_PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
_CODER = {
    "xml": _region(
        _XML,
        close="</function>",
        content="xml-inline",
        content_args={"tag_pattern": _XML_PARAMETER},
        transform=_XML_CALL,
    ),
    **_mark(r"(?<=</function>)\s*</tool_call>"),
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """A format of tool calls.

    Attributes:
        has, lacks: Texts that the chat template has and lacks.
        call: A call of NAME with ARGUMENTS, to force one; empty if calls cannot be forced.
        fields: Regions of calls in an answer; NAMES stands for a pattern of the tools' names.
        keeps_json: The chat template takes the arguments of earlier calls as JSON.
    """

    has: str
    call: str
    fields: Mapping[str, Mapping[str, Any]]
    lacks: str = "\0"  # occurs in no template
    keeps_json: bool = False


HERMES = Dialect(OPEN, f'{OPEN}\n{{"name": "NAME", "arguments": ARGUMENTS}}\n{CLOSE}', _HERMES, lacks="<function=")
_LLAMA_CALL = '{"name": "NAME", "parameters": ARGUMENTS}'
_GPT_CALL = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS"
_R1_CALL = f"{_BEGIN}{_CALL}function{_SEP}NAME\n```json\nARGUMENTS\n```{_END}{_ENDS}"
_V31_CALL = f"{_BEGIN}{_CALL}NAME{_SEP}ARGUMENTS{_END}{_ENDS}"
DIALECTS = (
    HERMES,
    Dialect("[ARGS]", "[TOOL_CALLS]NAME[ARGS]ARGUMENTS", _HERMES),
    Dialect("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS}]', _HERMES),
    Dialect('{"name": function name, "parameters":', _LLAMA_CALL, {**_HERMES, **_PYTHON_LIST}),
    Dialect("func_name1(", "", _PYTHON_LIST),  # Llama 4
    Dialect("<parameter=", "", _CODER),  # Qwen3-Coder
    Dialect("<|channel|>", _GPT_CALL, {"named": _region(_RECIPIENT, close=["<|call|>", "<|end|>"])}),
    Dialect(_SEP, _V31_CALL, _DEEPSEEK, lacks="```json", keeps_json=True),
    Dialect(_SEP, _R1_CALL, _DEEPSEEK, keeps_json=True),
)


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
    return Kind((open, close), open, close, fields={THOUGHT_FIELDS[0]: {"open_pattern": pattern, "close_pattern": end}})


_ANALYSIS = r"(?:<\|start\|>assistant)?<\|channel\|>analysis(?!\s*to=functions)[^<]*<\|message\|>\s*"
HARMONY = Kind(  # gpt-oss's
    ("<|channel|>",),
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|start|>assistant",
    "<|channel|>final<|message|>",
    {THOUGHT_FIELDS[0]: {"open_pattern": _ANALYSIS, "close_pattern": r"\s*<\|end\|>"}},
)
KINDS = (HARMONY, _at_start("<think>", "</think>"), _at_start("[THINK]", "[/THINK]"))

_NAMED_HEAD = re.compile(
    rf"\s*(?:function{_SEP})?(?P<name>[\w.-]+)"
    rf"(?:{_SEP}|\s*```json\s*|[^<{{]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>\w*)?<\|message\|>)\s*(?=\{{)"
)


def translate(field: str, text: str, is_complete: bool) -> str:
    """Return the text of a region of calls as JSON; not `is_complete` = it was cut off."""
    head = _NAMED_HEAD.match(text) if field == "named" else None
    if head is None:
        return text
    arguments = text[head.end() :].rstrip("` \n")
    return f'{{"name": {json.dumps(head["name"])}, "arguments": {arguments}{"}" if is_complete else ""}'
