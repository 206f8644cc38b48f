"""Formats of tool calls and thoughts: how to recognise a model's by its chat template, and to read its calls as JSON.

A call that is not JSON is translated while it is streamed: the translation of a longer text begins with that of a
shorter one.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kvrag.backend.transformers.tokenizer import AnswerRegions

OPEN, CLOSE = "<tool_call>", AnswerRegions.tag

THOUGHT_FIELDS = ("thinking", "reasoning", "reasoning_content")  # of the field, in tokenizers' response templates
SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates

# regions of an answer, in transformers' template of responses; `bare` and `python` ones begin it
_TAGGED = r"(?P<open>\s*<tool_call>\s*)(?=[\[{]|\Z)"
_BARE = r'(?P<open>\A\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)?\s*)(?=\[?\s*\{\s*"|(?:NAMES)(?:\[ARGS\])?\{|\Z)'
_XML = r"(?P<open>\s*<tool_call>\s*)(?=<|\Z)|(?P<open>\s*)(?=<function=)"
_PYTHON = r"(?P<open>\A\s*(?:<\|python_start\|>)?\s*)(?=\[\s*(?:NAMES)\s*\()"
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


def _region(pattern: str, **end: Any) -> dict[str, Any]:
    return {"open_pattern": pattern, "transform": "{open}", **end}


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
_PYTHON_LIST = {"python": _region(_PYTHON)}
_CODER = {"xml": _region(_XML, close="</function>"), **_mark(r"(?<=</function>)\s*</tool_call>")}


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
_PYTHON_HEAD = re.compile(r"\s*\[\s*([\w.-]+)\s*\(")
_XML_HEAD = re.compile(r"\s*<function=([\w.-]+)>\s*")
_XML_PARAMETER, _XML_END = re.compile(r"\s*<parameter=([^>\n]+)>\n?"), "</parameter>"
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_KINDS: dict[str, Callable[[Any], bool]] = {
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: type(value) is int or (type(value) is float and value.is_integer()),
    "number": lambda value: type(value) is int or (type(value) is float and math.isfinite(value)),
    "null": lambda value: value is None,
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
}


def translate(field: str, text: str, end: str, tools: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of a region of calls as JSON as far as it is complete.

    Args:
        end: "complete" or "cut" at the end of the region, else "".
        tools: JSON schemas of the tools' parameters, by name; they give the types of values in XML.
    """
    if field == "named":
        return _from_named(text, end)
    if field == "xml":
        return _from_xml(text, end == "complete", tools)
    return _from_python(text, end) if field == "python" else text


def _from_named(text: str, end: str) -> str:
    head = _NAMED_HEAD.match(text)
    if head is None:
        return text
    arguments = text[head.end() :].rstrip("` \n") if end else text[head.end() :]
    return f"{_call_head(head['name'])}{arguments}{'}' if end == 'complete' else ''}"


def _call_head(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": '


def _from_xml(text: str, is_complete: bool, tools: Mapping[str, Mapping[str, Any]]) -> str:
    head = _XML_HEAD.match(text)
    if head is None:
        return text
    properties = tools.get(head[1], {}).get("properties", {})
    arguments, end = [], head.end()
    while parameter := _XML_PARAMETER.match(text, end):
        schema, stop = properties.get(parameter[1], {}), text.find(_XML_END, parameter.end())
        if stop < 0:
            break
        value = _json(_typed(text[parameter.end() : stop].removesuffix("\n"), schema))
        end = stop + len(_XML_END)
        arguments.append(f"{_json(parameter[1])}: {value}")
    tail = "" if not is_complete else text[end:].strip() or "}}"
    return f"{_call_head(head[1])}{{{', '.join(arguments)}{tail}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _types(schema: Any) -> set[str]:
    """Return the types that a schema names."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type", [])
    types = {declared} if isinstance(declared, str) else set(declared)
    types |= {"object", "array"} if "$ref" in schema else set()
    return types.union(*(_types(part) for name in ("anyOf", "oneOf") for part in schema.get(name, ())))


def _typed(text: str, schema: Any) -> Any:
    """Return the value that the text is by its schema; the text itself where the schema does not say or it is wrong."""
    others = _types(schema) - {"string"}
    try:
        value = _WORDS[text.strip()] if text.strip() in _WORDS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if any(kind in _KINDS and _KINDS[kind](value) for kind in others) else text


def _from_python(text: str, end: str) -> str:
    """Return the calls in a list, `[look(where="up", far=True)]`; of one that was cut off, the beginning."""
    if end and (calls := _parsed(text.strip())) is not None:
        return f"[{', '.join(calls)}]"
    if end == "cut" and (head := _PYTHON_HEAD.match(text)):
        return f"{_call_head(head[1])}{{{text[head.end() :]}"
    return text


def _parsed(text: str) -> list[str] | None:
    """Return the calls of a Python list as JSON; None if it is no such list."""
    try:
        tree = ast.parse(text, mode="eval").body
        return [_parsed_call(call) for call in tree.elts] if isinstance(tree, ast.List) else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _parsed_call(call: ast.expr) -> str:
    if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
        raise ValueError("not a call with named arguments")
    arguments = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
    return f"{_call_head(ast.unparse(call.func))}{_json(arguments)}}}"


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, in which `true`, `false` and `null` may occur."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(node.keys):
        items = zip(cast(list[ast.expr], node.keys), node.values, strict=True)
        return {ast.literal_eval(key): _literal(value) for key, value in items}
    return ast.literal_eval(node)
