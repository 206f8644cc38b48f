"""Tool calling: put tools into a prompt, and parse calls from an answer.

Tools and `tool_choice` have OpenAI's form. A chat template with tool support renders them in the format that its model
was trained on. For any other template, they are described in the system message in the Hermes format.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from kvrag.backend.transformers.tokenizer import AnswerRegions, Tokenizer, is_token_ids
from kvrag.config import Grammar, check_json, check_type
from kvrag.errors import PromptError, SettingError
from kvrag.generate.dialects import CHANNELS, CLOSE, DIALECTS, HERMES, OPEN, Dialect, translate
from kvrag.generate.grammar import guarded, literal
from kvrag.generate.thoughts import HARMONY, kind_of, own_fields, switch
from kvrag.types import CallPiece, Delta, InvalidCall, Messages, TokenIds, ToolCall

_ABSENT = "\0"  # occurs in no prompt
_JSON = json.JSONDecoder(strict=False)
_AT_START = ("bare", "python")  # regions that begin an answer
_CALLS = (*_AT_START, "tagged", "named", "xml", "tool_calls")  # the last one in templates of tokenizers

# a call up to its arguments
_HEAD = re.compile(
    r'\s*\[?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?'
    r'"name"\s*:\s*"(?P<name>[\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MISTRAL_HEAD = re.compile(r"(?P<name>[\w.-]+)(?:\[ARGS\])?(?=\{)")

_INSTRUCTIONS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt with its tools, and the grammar that the answer must match.

    Attributes:
        template: Variables for the chat template.
        is_native: Calls have the format of the chat template, which renders the tools.
        forced: Names of the tools of which one must be called.
        dialect: Format of the calls.
        left_out: What the grammar does not enforce of the tools' schemas.
    """

    prompt: str | Messages | TokenIds
    template: dict[str, Any]
    grammar: Grammar | None
    tools: tuple[dict[str, Any], ...] = ()
    is_native: bool = False
    forced: tuple[str, ...] = ()
    dialect: Dialect = HERMES
    left_out: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """True for a string or token ids, which the chat template does not render."""
        return isinstance(self.prompt, str) or is_token_ids(self.prompt)

    def render(self, tokenizer: Tokenizer) -> list[int]:
        """Return the token ids of the prompt."""
        return tokenizer.render(self.prompt, **self.template)

    def parser(self, tokenizer: Tokenizer, ids: Sequence[int]) -> AnswerParser | None:
        """Return a parser for the answer to the prompt `ids`, without its thoughts; None if it is all text."""
        own, thoughts, kind = tokenizer.response_template, own_fields(tokenizer), kind_of(tokenizer)
        if own and (self.is_native if self.tools else kind and not kind.signs):
            fields = {name: field for name, field in own["fields"].items() if name not in thoughts}
            regions = AnswerRegions(
                {**own, "fields": fields},
                tokenizer.decode(ids, control_tokens=True),
                tools=list(self.tools),
            )
            return AnswerParser(regions, self.tools, self.forced, control_tokens=tokenizer.control_tokens())
        marks = CHANNELS if kind is HARMONY else {}
        if not self.tools and not marks:
            return None
        parser = call_parser(self.tools, self.forced, self.dialect, marks)
        # without their control tokens, calls of the other dialects are found as well
        if marks or self.dialect.keeps_json:
            parser.control_tokens = tokenizer.control_tokens({**marks, **self.dialect.fields})
        return parser


def prepare(
    tokenizer: Tokenizer,
    prompt: str | Messages | TokenIds,
    tools: Sequence[Mapping[str, Any]] | None = None,
    choice: str | Mapping[str, Any] | None = None,
    grammar: Grammar | None = None,
    template: Mapping[str, Any] | None = None,
    reasoning: bool | None = None,
) -> Prepared:
    """Put the tools into the prompt, and constrain the answer to required calls.

    Args:
        tools: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`.
        choice: "auto" or None = call or answer, "none" = answer, "required" or "any" = call one of them, a tool's name
            or `{"type": "function", "function": {"name": ...}}` or Anthropic's `{"type": "tool", "name": ...}` = call
            that one. A forced answer is exactly one call.
        grammar: Grammar of an answer without a call; with tools, a JSON schema only.
        template: Variables for the chat template.
        reasoning: Sets the chat template's switch for thoughts, unless `template` does.
    """
    is_plain = not isinstance(prompt, (list, tuple)) or is_token_ids(prompt)
    variables = {**switch(tokenizer, reasoning, is_plain), **(template or {})}
    listed = check_type("tools", tools, list | tuple | None, "a list of dicts") or ()
    known = tuple(_checked_tool(tool) for tool in listed)
    forced = _forced(choice, _names(known))
    if choice == "none":
        known = ()
    if is_plain:
        if known:
            raise PromptError("tools need a chat prompt: pass the prompt as a list of messages")
        return Prepared(cast(str | TokenIds, prompt), variables, grammar)
    form, is_rendered = _template_form(tokenizer, known)
    messages = [tokenizer.checked_message(message) for message in cast(Messages, prompt)]
    messages = _with_arguments(messages, form if form and is_rendered else HERMES)
    # a prompt is the same with and without a forced call, so that they share KV, even if that call has another format
    is_constrained = known and (forced or grammar is not None)
    is_native = is_rendered and (not is_constrained or (form is not None and form.call != ""))
    dialect = form if form and is_native else HERMES
    if not is_rendered:
        messages = _as_text(messages, known)
    if not known:
        return Prepared(messages, variables, grammar)
    left_out: tuple[str, ...] = ()
    if is_constrained:
        grammar, left_out = _call_grammar(tokenizer, dialect, known, forced, grammar)
    variables = {"tools": list(known), **variables} if is_rendered else variables
    return Prepared(messages, variables, grammar, known, is_native, forced, dialect, left_out)


def _template_form(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> tuple[Dialect | None, bool]:
    """Return the dialect of the chat template, if it is a known one, and whether the template renders tools."""
    source = tokenizer.template_text(tools or None)
    form = next((form for form in DIALECTS if form.has in source and form.lacks not in source), None)
    return form, (form is not None or tokenizer.response_template is not None) and tokenizer.renders_tools()


def _names(tools: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(tool["function"]["name"] for tool in tools)


def _checked_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise SettingError(
            'a tool is {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}, '
            f"got {tool!r:.120}"
        )
    name, parameters = function["name"], function.get("parameters") or {"type": "object", "properties": {}}
    if not re.fullmatch(r"[\w.-]+", name):
        raise SettingError(f"a tool's name may have letters, digits, '_', '-' and '.' only, got {name!r}")
    check_type(f"the parameters of tool {name}", parameters, Mapping, "a JSON schema")
    check_json(f"tool {name}", tool)
    return {"type": "function", "function": {**function, "parameters": dict(parameters)}}


def _forced(choice: str | Mapping[str, Any] | None, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the tools of which one must be called."""
    if choice in (None, "auto", "none"):
        return ()
    name: Any = choice
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)  # Anthropic's form has the name beside the type
        name = function.get("name") if isinstance(function, Mapping) else None
    if name in ("required", "any") and names:
        return names
    if name not in names:
        raise SettingError(
            f"tool_choice must be auto, none, required, any or a tool's name ({', '.join(names) or 'no tools given'}), "
            f"got {choice!r:.120}"
        )
    return (name,)


# ---------------------------------------------------------------- prompt


def _with_arguments(messages: Messages, form: Dialect) -> Messages:
    """Return the messages with the arguments of calls as the template expects them; clients send dicts and JSON.

    A call that was cut off or is malformed, as an answer may have it, becomes text in the template's format, and its
    result becomes text, too.
    """
    prepared: Messages = []
    malformed: list[Any] = []  # ids
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in malformed:
            message = _message_as_text(message)
        elif given := message.get("tool_calls"):
            parsed = [_parsed_call(call, form) for call in given]
            malformed = [call.get("id") for call, row in zip(given, parsed, strict=True) if isinstance(row, str)]
            calls = [row for row in parsed if not isinstance(row, str)]
            texts = [message.get("content"), *(row for row in parsed if isinstance(row, str))]
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message |= {"content": "\n".join(filter(None, texts))} if malformed else {}
            message |= {"tool_calls": calls} if calls else {}
        prepared.append(message)
    return prepared


def _parsed_call(call: Any, form: Dialect) -> dict[str, Any] | str:
    """Return a call for the template, or its text if it has no name or its arguments are not a JSON object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        function = {"name": None, "arguments": None}
    name, given = function.get("name") or "", function.get("arguments")
    arguments = _arguments(given)
    if isinstance(name, str) and name and arguments is not None:
        written = json.dumps(arguments, ensure_ascii=False) if form.keeps_json else arguments
        return {"type": "function", **call, "function": {**function, "arguments": written}}
    if isinstance(name, str) and isinstance(given, str):
        before, between, _ = re.split("NAME|ARGUMENTS", form.call or HERMES.call)
        return f"{before}{name}{between}{given}" if name else given
    raise PromptError(
        'a tool call is {"type": "function", "id": ..., "function": {"name": ..., "arguments": {...}}}, '
        f"got {call!r:.120}"
    )


def _as_text(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> Messages:
    """Return the messages for a template without tool support: tools, calls and results become text."""
    texts = [_message_as_text(message) for message in messages]
    if not tools:
        return texts
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(signatures=signatures)
    first = texts[0] if texts else {}
    if first.get("role") == "system" and first.get("content") is not None:
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *texts[1:]]
    return [{"role": "system", "content": instructions}, *texts]


def _message_as_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    functions = [{name: call["function"][name] for name in ("name", "arguments")} for call in message["tool_calls"]]
    calls = [f"{OPEN}\n{json.dumps(function, ensure_ascii=False)}\n{CLOSE}" for function in functions]
    return {"role": message["role"], "content": "\n".join([content, *calls] if content else calls)}


# ---------------------------------------------------------------- grammar


def _call_grammar(
    tokenizer: Tokenizer,
    dialect: Dialect,
    tools: Sequence[Mapping[str, Any]],
    forced: Sequence[str],
    answer: Grammar | None,
) -> tuple[Grammar, tuple[str, ...]]:
    """Return the grammar of one call of a forced tool, and what it does not enforce of the schemas.

    If no tool is forced, it is the grammar of one call of a tool or of the answer.
    """
    if forced and answer is not None:
        raise SettingError("a forced tool_choice and a grammar exclude each other: leave out one of them")
    before, between, after = re.split("NAME|ARGUMENTS", dialect.call)
    rules, left_out = list[str](), dict[str, None]()
    for function in (tool["function"] for tool in tools if not forced or tool["function"]["name"] in forced):
        head = literal(tokenizer, before + function["name"] + between)
        # a separate schema, so that its $refs are resolved from its root
        schema, missing = guarded(function["parameters"])
        left_out |= dict.fromkeys(missing)
        rules.append(f"call_{len(rules)}: {head} %json {json.dumps(schema)} {literal(tokenizer, after)}")
    alternatives = [f"call_{number}" for number in range(len(rules))]
    if answer is not None:
        if answer.json_schema is None:
            raise SettingError("with tools, a grammar must be a json_schema: convert it, or leave out the tools")
        header = literal(tokenizer, kind.header if (kind := kind_of(tokenizer)) else "")
        schema, missing = guarded(answer.json_schema)
        left_out |= dict.fromkeys(missing)
        rules.append(f"answer: {header} %json {json.dumps(schema)}")
        alternatives.append("answer")
    return Grammar(lark="\n".join([f"start: {' | '.join(alternatives)}", *rules])), tuple(left_out)


# ---------------------------------------------------------------- answer


def call_parser(
    tools: Sequence[Mapping[str, Any]],
    forced: Sequence[str] = (),
    dialect: Dialect = HERMES,
    marks: Mapping[str, Any] | None = None,
) -> AnswerParser:
    """Return a parser of calls of these tools; the default dialect covers Hermes, Qwen, Llama 3 and Mistral.

    In Llama's and Mistral's, an answer consists of calls of known tools only. Anything else is text.

    Args:
        marks: More regions, without text.
    """
    known = "|".join(map(re.escape, _names(tools)))
    fields = {
        name: {**field, "open_pattern": field["open_pattern"].replace("NAMES", known)}
        for name, field in (dialect.fields if tools else {}).items()
    }
    template = {"start_anchor": _ABSENT, "fields": {"content": {}, **(marks or {}), **fields}}
    return AnswerParser(AnswerRegions(template, ""), tools, forced)


class _OpenCall:
    """A call whose arguments are being generated; `arguments` are those taken so far, as strict JSON."""

    def __init__(self, index: int, name: str, start: int) -> None:
        self.index, self.name, self.id, self.start = index, name, uuid.uuid4().hex[:9], start
        self.taken, self.arguments = 0, ""
        self._depth, self._in_string, self._is_escaped = 0, False, False

    @property
    def is_complete(self) -> bool:
        return self.taken > 0 and self._depth == 0

    def take(self, text: str) -> str:
        """Take the arguments from the call's text; return their new part."""
        more = ""
        for letter in text[self.start + self.taken :]:
            if self.is_complete:
                break
            self.taken += 1
            # models write line breaks into strings, which JSON forbids
            more += json.dumps(letter)[1:-1] if self._in_string and letter < " " else letter
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = letter == "\\", letter != '"'
            else:
                self._in_string = letter == '"'
                self._depth += {"{": 1, "}": -1}.get(letter, 0)
        self.arguments += more
        return more


class AnswerParser:
    """Separates the text of one streamed answer from its tool calls; may need control tokens in the text.

    A call is invalid if it was cut off, or if it is malformed after its arguments have begun.
    """

    def __init__(
        self,
        regions: AnswerRegions,
        tools: Sequence[Mapping[str, Any]],
        forced: Sequence[str],
        control_tokens: Collection[int] = (),
    ) -> None:
        self.control_tokens = control_tokens
        self._regions, self._forced = regions, forced
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._num_calls = 0
        self._raw = self._text = ""  # of the open region, as generated and as JSON
        self._open: _OpenCall | None = None  # pieces of it were sent
        self._pieces: dict[int, CallPiece] = {}  # by call
        self._valid: list[ToolCall] = []
        self._invalid: list[InvalidCall] = []

    def parse(self, delta: Delta) -> Delta:
        """Return the delta with its calls and with the text that cannot be part of a call."""
        text = "".join(map(self._outside, self._regions.feed(delta.text)))
        if delta.finish_reason is not None:
            is_cut = delta.finish_reason == "length"
            text += "".join(self._outside(event, is_cut) for event in self._regions.end())
            if self._num_calls:
                text = text.rstrip()
            elif self._forced:
                text = ""  # the beginning of a call
                self._fail("")
        pieces, valid, invalid = tuple(self._pieces.values()), tuple(self._valid), tuple(self._invalid)
        self._pieces, self._valid, self._invalid = {}, [], []
        return replace(delta, text=text, call_pieces=pieces, tool_calls=valid, invalid_calls=invalid)

    def _outside(self, event: Mapping[str, Any], is_cut: bool = False) -> str:
        """Process an event; return its text outside calls. `is_cut`: the answer was cut off before it."""
        kind, field = event["type"], event["field"]
        if field not in _CALLS:
            return str(event["text"]) if kind == "region_chunk" else ""
        if kind == "region_open":
            self._raw = self._text = ""
        elif kind == "region_chunk":
            self._raw += event["text"]
            self._stream(field, "")
        else:
            return self._close(field, event["value"], is_cut, event["ended_by"])
        return ""

    def _stream(self, field: str, end: str) -> None:
        """Send the new part of a call's arguments, once the text before them is complete."""
        self._text = translate(field, self._raw, end, self._schemas)
        if self._open is None:
            head = _HEAD.match(self._text) or (_MISTRAL_HEAD.match(self._text) if field == "bare" else None)
            if head is None or (field in _AT_START and head["name"] not in self._schemas):
                return
            self._open = self._begin(head["name"], head.end())
        self._send(self._open, self._open.take(self._text))

    def _close(self, field: str, value: Any, is_cut: bool, ended_by: str) -> str:
        """End a region with its calls, or with an invalid one; return its text if it has none."""
        opening = ""
        if field == "tool_calls":
            calls = [] if is_cut else _calls_in(value)  # transformers would complete the call
            ended_by = ""
        else:
            self._stream(field, "cut" if is_cut and not ended_by else "complete")
            calls, opening = _calls(self._text), value
        if field in _AT_START and any(call.name not in self._schemas for call in calls):
            calls = []
        if calls:
            self._end(calls)
        elif self._open or (is_cut and (field not in _AT_START or opening.strip())):
            self._fail(self._text)
        else:
            return opening + self._raw + ended_by
        return ""

    def _end(self, calls: Sequence[ToolCall]) -> None:
        """End these calls. The first is the streamed one, if there is one."""
        for call in calls:
            if self._open is None:
                self._open = self._begin(call.name)
                self._send(self._open, json.dumps(call.arguments, ensure_ascii=False))
            self._valid.append(replace(call, id=self._open.id))
            self._open = None

    def _fail(self, text: str) -> None:
        """End an invalid call with this text."""
        opened = self._open or self._begin(self._forced[0] if len(self._forced) == 1 else "", len(text))
        self._open, rest = opened, text[opened.start + opened.taken :]
        arguments = _arguments(opened.arguments) if opened.is_complete and not rest.strip("}] \n") else None
        if arguments is not None:  # only closing marks are missing
            self._end([ToolCall(opened.name, arguments, opened.id)])
            return
        self._send(opened, rest)
        self._invalid.append(InvalidCall(opened.name, opened.arguments + rest, opened.id))
        self._open = None

    def _begin(self, name: str, start: int = 0) -> _OpenCall:
        call = _OpenCall(self._num_calls, name, start)
        self._pieces[call.index] = CallPiece(call.index, "", name, call.id)
        self._num_calls += 1
        return call

    def _send(self, call: _OpenCall, arguments: str) -> None:
        if arguments:
            piece = self._pieces.get(call.index, CallPiece(call.index, ""))
            self._pieces[call.index] = replace(piece, arguments=piece.arguments + arguments)


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
        arguments = _arguments(function.get("arguments", function.get("parameters")))
        if arguments is None:
            return []
        calls.append(ToolCall(name, arguments, ""))
    return calls


def _arguments(value: Any) -> dict[str, Any] | None:
    """Return arguments, given as a dict or JSON, as a dict of plain JSON types; None if they are neither.

    Lone surrogates, which models may write as escapes and tokenizers reject, become U+FFFD.
    """
    try:
        if isinstance(value, str):
            value = json.loads(value, strict=False) if value.strip() else {}
        if value is not None and not isinstance(value, Mapping):
            return None
        text = json.dumps(dict(value or {}), ensure_ascii=False)
        return dict(json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")))
    except (TypeError, ValueError, RecursionError):
        return None
