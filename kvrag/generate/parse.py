"""Parse a streamed answer: thoughts, tool calls, and the text outside of them, in the formats of many models."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvrag.backend.transformers.tokenizer import AnswerRegions, Tokenizer
from kvrag.generate.grammar import literal
from kvrag.types import Delta, InvalidCall, ToolCall, arguments_of

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


_ABSENT = "\0"  # occurs in no prompt
_JSON = json.JSONDecoder(strict=False)
_AT_START = ("bare", "python")  # regions that begin an answer
_PARSED = ("xml", "python", "tool_calls")  # by transformers; the last one in templates of tokenizers
_CALLS = (*_AT_START, "tagged", "named", *_PARSED)

# a call up to its arguments
_HEAD = re.compile(
    r'\s*\[?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?'
    r'"name"\s*:\s*"(?P<name>[\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MISTRAL_HEAD = re.compile(r"(?P<name>[\w.-]+)(?:\[ARGS\])?(?=\{)")


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
        is_off = self._is_closed or self._in_header or any(template.get(name) is False for name in SWITCHES)
        if not close or (is_off and not self._is_open):
            return f"start: {header} @answer" if header else ""
        after = after if self._kind.after.strip() else f"({after})?"
        thought = f"thought {after}" if self._is_open else f"({open} thought {after})?"
        is_token = close.startswith("<")  # then a text cannot contain it
        rule = rf"thought: (/(.|\n)+/)? {close}" if is_token else rf"thought[suffix={close}]: /(.|\n)*/"
        return f"start: {thought} {header} @answer\n{rule}"


def call_regions(
    tools: Sequence[Mapping[str, Any]], dialect: Dialect = HERMES, marks: Mapping[str, Any] = {}
) -> AnswerRegions:
    """Return the regions of calls of these tools; the default dialect covers Hermes, Qwen, Llama 3 and Mistral.

    In Llama's and Mistral's, an answer consists of calls of known tools only. Anything else is text.

    Args:
        marks: More regions, without text.
    """
    known = "|".join(re.escape(tool["function"]["name"]) for tool in tools)
    fields = {
        name: {**field, "open_pattern": field["open_pattern"].replace("NAMES", known)}
        for name, field in (dialect.fields if tools else {}).items()
    }
    template = {"start_anchor": _ABSENT, "fields": {"content": {}, **marks, **fields}}
    return AnswerRegions(template, "", tools)


class AnswerParser:
    """Separates the text of one streamed answer from its tool calls; may need control tokens in the text.

    A call is invalid if it was cut off, or if it is malformed after its arguments have begun.
    """

    def __init__(
        self,
        regions: AnswerRegions,
        tools: Sequence[Mapping[str, Any]],
        forced: Sequence[str] = (),
        control_tokens: Collection[int] = (),
        has_one_call: bool = False,
    ) -> None:
        self.control_tokens, self.has_one_call = control_tokens, has_one_call
        self._regions, self._forced = regions, forced
        self._names = {tool["function"]["name"] for tool in tools}
        self._raw = ""  # of the open region
        self._num_calls = 0
        self._calls: list[ToolCall | InvalidCall] = []  # of the current delta

    def parse(self, delta: Delta) -> Delta:
        """Return the delta with the calls that end in it and with the text that cannot be part of a call."""
        text = "".join(map(self._outside, self._regions.feed(delta.text)))
        if delta.finish_reason is not None:
            is_cut = delta.finish_reason == "length"
            text += "".join(self._outside(event, is_cut) for event in self._regions.end())
            if self._num_calls:
                text = text.rstrip()
            elif self._forced:
                text = ""  # the beginning of a call
                self._fail("", None)
        calls, self._calls = self._calls, []
        valid = tuple(call for call in calls if isinstance(call, ToolCall))
        invalid = tuple(call for call in calls if isinstance(call, InvalidCall))
        return replace(delta, text=text, tool_calls=valid, invalid_calls=invalid)

    def _outside(self, event: Mapping[str, Any], is_cut: bool = False) -> str:
        """Process an event; return its text outside calls. `is_cut`: the answer was cut off before it."""
        kind, field = event["type"], event["field"]
        if field not in _CALLS:
            return str(event["text"]) if kind == "region_chunk" else ""
        if kind == "region_open":
            self._raw = ""
        elif kind == "region_chunk":
            self._raw += event["text"]
        else:
            return self._close(event, is_cut and not event["ended_by"])
        return ""

    def _close(self, event: Mapping[str, Any], is_cut: bool) -> str:
        """End a region with its calls, or with an invalid one; return its text if it has none."""
        field, captures = event["field"], event["captures"]
        text = translate(field, self._raw, is_complete=not is_cut)
        head = _HEAD.match(text) or (_MISTRAL_HEAD.match(text) if field == "bare" else None)
        if field not in _PARSED:
            calls = _calls(text)
        else:  # transformers would complete all but Python
            calls = [] if is_cut and field != "python" else _calls_in(event["value"])
        if field in _AT_START:
            calls = [] if any(call.name not in self._names for call in calls) else calls
            head = head if head and head["name"] in self._names else None
        opening = captures.get("open", "")
        if calls:
            for call in calls:
                self._add(call)
        elif head or (is_cut and (field != "bare" or opening.strip())):
            self._fail(text, head, captures.get("name", ""))
        else:
            return opening + self._raw + ("" if field == "tool_calls" else event["ended_by"])
        return ""

    def _fail(self, text: str, head: re.Match[str] | None, name: str = "") -> None:
        """Add an invalid call with this text, which are arguments if the name is known."""
        only = self._forced[0] if len(self._forced) == 1 else ""
        name, start = (head["name"], head.end()) if head else (name or only, 0 if name else len(text))
        arguments = None
        if head:
            try:
                value, end = _JSON.raw_decode(text, start)
                arguments = None if text[end:].strip("}] \n") else arguments_of(value)
            except (ValueError, RecursionError):
                pass
        # where the arguments are complete, only closing marks are missing
        self._add(InvalidCall(name, text[start:], "") if arguments is None else ToolCall(name, arguments, ""))

    def _add(self, call: ToolCall | InvalidCall) -> None:
        self._num_calls += 1
        if self._num_calls == 1 or not self.has_one_call:
            self._calls.append(replace(call, id=uuid.uuid4().hex[:9]))


def _calls(text: str) -> list[ToolCall]:
    """Return the calls that the text consists of; none if it contains anything else."""
    calls: list[ToolCall] = []
    rest = text.strip()
    try:
        while rest:
            head = _MISTRAL_HEAD.match(rest)
            value, end = _JSON.raw_decode(rest, head.end() if head else 0)
            found = _calls_in({"name": head["name"], "arguments": value} if head else value)
            if not found:
                return []
            calls += found
            rest = rest[end:].lstrip(" \n;")
    except (ValueError, RecursionError):
        return []
    return calls


def _calls_in(value: Any) -> list[ToolCall]:
    """Return the calls in a value of JSON, without ids; none if it contains anything else."""
    calls = []
    for item in value if isinstance(value, list) else [value]:
        function = item.get("function", item) if isinstance(item, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            return []
        arguments = arguments_of(function.get("arguments", function.get("parameters")))
        if arguments is None:
            return []
        calls.append(ToolCall(name, arguments, ""))
    return calls
