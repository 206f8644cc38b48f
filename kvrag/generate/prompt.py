"""Prompts with tools and thoughts: what a chat template gets, and the grammar that the answer must match.

Tools and `tool_choice` have OpenAI's form. A chat template with tool support renders them in the format that its model
was trained on. For any other template, they are described in the system message in the Hermes format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from kvrag.backend.transformers.tokenizer import AnswerRegions, Tokenizer, is_token_ids
from kvrag.config import AnswerOptions, BlendConfig, Grammar, Sampling, check_json, check_type, checked_answer
from kvrag.errors import PromptError, SettingError
from kvrag.generate.grammar import guarded, literal
from kvrag.generate.parse import (
    CHANNELS,
    CLOSE,
    DIALECTS,
    HARMONY,
    HERMES,
    KINDS,
    OPEN,
    SWITCHES,
    THOUGHT_FIELDS,
    AnswerParser,
    Dialect,
    Kind,
    Thoughts,
    call_regions,
)
from kvrag.types import Messages, Prompt, arguments_of

_TAIL = 16  # tokens of a prompt that may have opened a thought

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
        has_one_call: Calls after the first are left out of the answer.
    """

    prompt: Prompt
    template: dict[str, Any]
    grammar: Grammar | None
    tools: tuple[dict[str, Any], ...] = ()
    is_native: bool = False
    forced: tuple[str, ...] = ()
    dialect: Dialect = HERMES
    left_out: tuple[str, ...] = ()
    has_one_call: bool = False

    @property
    def is_plain(self) -> bool:
        """True for a string or token ids, which the chat template does not render."""
        return isinstance(self.prompt, str) or is_token_ids(self.prompt)

    def render(self, tokenizer: Tokenizer) -> list[int]:
        """Return the token ids of the prompt."""
        return tokenizer.render(self.prompt, **self.template)

    def thoughts(self, tokenizer: Tokenizer, ids: Sequence[int]) -> Thoughts | None:
        """Return what splits the answer to the prompt `ids` from its thoughts; None if the model does not think."""
        kind = kind_of(tokenizer)
        return Thoughts(tokenizer, kind, tokenizer.decode(ids[-_TAIL:], control_tokens=True)) if kind else None

    def parser(self, tokenizer: Tokenizer, ids: Sequence[int]) -> AnswerParser | None:
        """Return a parser for the answer to the prompt `ids`, without its thoughts; None if it is all text."""
        kind, own, thoughts = kind_of(tokenizer), tokenizer.response_template, own_fields(tokenizer)
        marks, control_tokens = CHANNELS if kind is HARMONY else {}, frozenset[int]()
        if own and (self.is_native if self.tools else kind and not kind.signs):
            fields = {name: field for name, field in own["fields"].items() if name not in thoughts}
            prompt = tokenizer.decode(ids, control_tokens=True)
            regions = AnswerRegions({**own, "fields": fields}, prompt, self.tools)
            control_tokens = tokenizer.control_tokens()
        elif self.tools or marks:
            regions = call_regions(self.tools, self.dialect, marks)
            # without their control tokens, calls of the other dialects are found as well
            if marks or self.dialect.keeps_json:
                control_tokens = tokenizer.control_tokens({**marks, **self.dialect.fields})
        else:
            return None
        return AnswerParser(regions, self.tools, self.forced, control_tokens, self.has_one_call)


@dataclass(frozen=True)
class Question:
    """A question and the settings of its answer."""

    prepared: Prepared  # the prompt, with tools and grammar
    documents: Sequence[str]  # chunks in the prompt; those not stored are encoded first
    namespace: str  # of the chunks and conversations to reuse
    config: BlendConfig
    sampling: Sampling

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompt: Prompt, config: BlendConfig, overrides: AnswerOptions) -> Question:
        """Return the question that a prompt and its options ask; raises the errors of `BlendEngine.stream`."""
        options, config, sampling = checked_answer(overrides, config)
        names = ("tools", "tool_choice", "grammar", "template", "reasoning")
        prepared = prepare(tokenizer, prompt, **{name: options[name] for name in names})
        prepared = replace(prepared, has_one_call=options["parallel_tool_calls"] is False)
        return cls(prepared, options["documents"], options["namespace"], config, sampling)


def prepare(
    tokenizer: Tokenizer,
    prompt: Prompt,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    grammar: Grammar | None = None,
    template: Mapping[str, Any] | None = None,
    reasoning: bool | None = None,
) -> Prepared:
    """Put the tools into the prompt, and constrain the answer to required calls.

    Args:
        tools: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`.
        tool_choice: "auto" or None = call or answer, "none" = answer, "required" or "any" = call one of them, a tool's
            name or `{"type": "function", "function": {"name": ...}}` or Anthropic's `{"type": "tool", "name": ...}` =
            call that one. A forced answer is exactly one call.
        grammar: Grammar of an answer without a call; with tools, a JSON schema only.
        template: Variables for the chat template.
        reasoning: Sets the chat template's switch for thoughts, unless `template` does.
    """
    is_plain = not isinstance(prompt, (list, tuple)) or is_token_ids(prompt)
    variables = {**switch(tokenizer, reasoning, is_plain), **(template or {})}
    known = tuple(_checked_tool(tool) for tool in tools or ())
    forced = _forced(tool_choice, tuple(tool["function"]["name"] for tool in known))
    if tool_choice == "none":
        known = ()
    if is_plain:
        if known:
            raise PromptError("tools need a chat prompt: pass the prompt as a list of messages")
        return Prepared(prompt, variables, grammar)
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
    arguments = arguments_of(given)
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


# ---------------------------------------------------------------- thoughts


def kind_of(tokenizer: Tokenizer) -> Kind | None:
    """Return how the model marks its thoughts; None if it does not think."""
    source = str(tokenizer.hf.chat_template)  # all of them, if there are several
    for kind in KINDS:
        if any(sign in source or sign in tokenizer.marks for sign in kind.signs):
            return kind
    if fields := own_fields(tokenizer):
        marks = next(iter(fields.values()))
        open, close = (marks[name] if isinstance(marks.get(name), str) else "" for name in ("open", "close"))
        return Kind((), open if close else "", close if open else "", fields=fields)
    return None


def thinks(tokenizer: Tokenizer) -> bool:
    """Return whether the model thinks. A token alone is no sign: tokenizers of models that do not have it, too."""
    kind, source = kind_of(tokenizer), str(tokenizer.hf.chat_template)
    return kind is not None and (not kind.signs or any(sign in source for sign in kind.signs))


def own_fields(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the fields of thoughts in the tokenizer's own response template."""
    fields = (tokenizer.response_template or {}).get("fields", {})
    return {name: fields[name] for name in THOUGHT_FIELDS if {"open", "open_pattern"} & set(fields.get(name, ()))}


def switch(tokenizer: Tokenizer, reasoning: bool | None, is_plain: bool) -> dict[str, bool]:
    """Return the variable of the chat template that turns thoughts on or off.

    Args:
        is_plain: The template does not render the prompt.

    Raises:
        SettingError: The template cannot do so.
    """
    if reasoning is None:
        return {}
    if not is_plain and (name := tokenizer.find_switch(SWITCHES)):
        return {name: reasoning}
    is_thinking = thinks(tokenizer)
    if reasoning and not is_thinking:
        raise SettingError("reasoning=True: this model does not think; leave reasoning out")
    if not reasoning and is_thinking:
        if is_plain:
            raise SettingError("reasoning=False needs a chat prompt: pass the prompt as a list of messages")
        if kind_of(tokenizer) is HARMONY:
            raise SettingError("reasoning=False: this model always thinks; pass template={'reasoning_effort': 'low'}")
        raise SettingError("reasoning=False: the chat template has no switch for thoughts; leave reasoning out")
    return {}


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
