"""Text to token ids and back, as the model's own tokenizer does it."""

from __future__ import annotations

import inspect
import json
import logging
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, TypeGuard, cast
from weakref import WeakKeyDictionary

import xxhash
from cachetools import LRUCache, cached, cachedmethod
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS

from kvrag.config import check_text
from kvrag.errors import PromptError
from kvrag.types import Messages, Prompt, TokenIds

_LONGEST_CHARACTER = 8  # tokens: four bytes, with room for tokens without text
_TEMPLATES = 64  # kinds of prompts whose generation prompt is kept
_PREAMBLE_TOKENS = 8  # enough for a sink; longer preambles would include variable text, such as a template's date

_ROLES = ("system", "user", "assistant", "tool")  # known to all chat templates

_PROBES = (  # conversations, contents by role, whose prompts have only the beginning of the template in common
    {"user": "One."},
    {"user": "two"},
    {"system": "Three!", "user": "four"},
    {"system": "five", "user": "Six"},
)

# transformers warns about long texts even if they are only counted; check_window rejects long prompts
logging.getLogger("transformers.tokenization_utils_base").addFilter(
    lambda record: "sequence length is longer than" not in record.getMessage()
)


class Tokenizer:
    """A transformers tokenizer with the rules that reuse requires.

    Attributes:
        preamble: Token ids in front of every encoded chunk: the common prefix of the chat template, or BOS. Without it,
            a chunk's first tokens would become an attention sink, which they are not in stitched prompts.
    """

    def __init__(self, hf: Any, model_name: str, preamble: bool = True) -> None:
        self.hf, self._name = hf, model_name
        self._lock = _locks.setdefault(hf, threading.Lock())
        self._renders_tools: dict[str, bool] = {}
        self._generation_prompts: LRUCache[str, int] = LRUCache(_TEMPLATES)
        self.preamble = self._find_preamble() if preamble else ()

    def as_prompt(self, text: str) -> str | Messages:
        """Return a text as one user message, or unchanged if the model has no chat template."""
        return [{"role": "user", "content": text}] if self.has_chat_template else text

    @property
    def has_chat_template(self) -> bool:
        """True if messages can be rendered."""
        return self.hf.chat_template is not None

    def render(self, prompt: Prompt, /, **template: Any) -> list[int]:
        """Return the ids of a prompt, tokenised once.

        Token ids are returned unchanged. A string is encoded unchanged, with the tokenizer's own BOS, without an end
        token. Messages are rendered with the chat template, to which `template` is passed. Only the template writes
        control tokens: those in a message stay text. If the template rejects the messages, they are merged and tried
        again: first consecutive messages of one role, then the system message into the first user message.
        """
        if is_token_ids(prompt):
            if unknown := [token for token in prompt if not 0 <= token < len(self.hf)]:
                raise PromptError(f"unknown token id {unknown[0]}: {self._name} has tokens 0 to {len(self.hf) - 1}")
            return list(prompt)
        if isinstance(prompt, str):
            check_text(prompt)
            if not prompt.strip():
                raise PromptError("the prompt is empty")
            with self._lock:
                ids = list(self.hf(prompt)["input_ids"])
            ids = ids[: len(ids) - self._num_appended]
            if not ids:
                raise PromptError("the prompt is empty after tokenisation: pass a text")
            return ids
        if not isinstance(prompt, (list, tuple)):
            raise PromptError(f"a prompt must be one string or a list of messages, got {prompt!r:.80}")
        messages = [self.checked_message(message) for message in cast(Messages, prompt)]
        if not messages:
            raise PromptError("the prompt is empty: pass at least one message")
        if not any(message.get("content") or message.get("tool_calls") for message in messages):
            raise PromptError("the prompt is empty: no message has content")
        refusals = []
        for variant in _variants(messages):
            try:
                ids = self._apply_template(variant, template)
                self._check_shown(variant, template)
                return ids
            except PromptError as error:
                refusals.append(error)
        raise refusals[0]

    def checked_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with its content as one string, or without content, and with a role of the template.

        A role that the source of the chat template names is passed to it. Otherwise "developer" is "system", as
        OpenAI's newer name for it, and any other role is an error.
        """
        message = _with_text(message)
        role = message["role"]
        if role in _ROLES or not self.has_chat_template:
            return message
        if re.search(f"(['\"]){re.escape(role)}\\1", self.template_text() + self.template_text([{}])):
            return message
        if role == "developer":
            return {**message, "role": "system"}
        raise PromptError(f"unknown role {role!r:.80}: use {', '.join(_ROLES)} or developer")

    def _check_shown(self, messages: Messages, template: Mapping[str, Any]) -> None:
        """Raise PromptError if the chat template leaves out messages, such as a second system message."""
        words = {number: f"w{number}o" for number, row in enumerate(messages) if row["role"] not in _ROLES[1:]}
        if not words:
            return
        probes = [{**row, "content": words.get(number, row.get("content"))} for number, row in enumerate(messages)]
        with self._lock:
            text = self.hf.apply_chat_template(probes, add_generation_prompt=True, tokenize=False, **template)
        if hidden := [number for number, word in words.items() if word not in text]:
            raise PromptError(
                f"the chat template of {self._name} leaves out message {hidden[0]}, with the role "
                f"{messages[hidden[0]]['role']!r}: give it the role user"
            )

    @cachedmethod(
        lambda self: self._generation_prompts,
        key=lambda self, /, **template: repr((self.hf.chat_template, template)),
        lock=lambda self: self._lock,
    )
    def generation_prompt_length(self, /, **template: Any) -> int:
        """Return the length of the generation prompt: tokens that end a prompt and are absent from a history."""
        messages = [{"role": "user", "content": "a"}]
        try:
            with_prompt, without = (self._apply_template(messages, template, prompt) for prompt in (True, False))
        except PromptError:
            return 0  # unknown: the template rejects a single message
        return len(with_prompt) - num_common(with_prompt, without)

    def _apply_template(self, messages: Messages, template: Mapping[str, Any], prompt: bool = True) -> list[int]:
        if self.hf.chat_template is None:
            raise PromptError(f"{self._name} has no chat template: pass the prompt as one string")
        try:
            with self._lock:
                return apply_chat_template(self.hf, messages, add_generation_prompt=prompt, **template)
        except Exception as error:  # jinja2 errors, errors raised by the template, TypeErrors
            raise PromptError(f"the chat template of {self._name} rejects these messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Return the ids of a chunk's text: without BOS, control tokens as text."""
        check_text(text)
        with self._lock:
            return list(self.hf.encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode(self, ids: Sequence[int], control_tokens: bool = False) -> str:
        """Return the text of generated ids, with or without the control tokens among them."""
        text = self.hf.decode(ids, skip_special_tokens=not control_tokens, clean_up_tokenization_spaces=False)
        return str(text)

    @cached_property
    def _num_appended(self) -> int:
        """Number of tokens that the tokenizer puts behind a text, such as EOS of `add_eos_token`."""
        with self._lock:
            ids, text = self.hf("a")["input_ids"], self.hf.encode("a", add_special_tokens=False)
        return next((n for n in range(len(ids)) if ids[: len(ids) - n][-len(text) :] == text), 0)

    @cached_property
    def _anchor(self) -> list[int]:
        """A token to decode before others: the first one may lose its space."""
        return self.encode("a")[-1:]

    def token_text(self, token: int) -> tuple[str, bytes]:
        """Return the text of one token as it appears within a text, and its bytes.

        The text of an incomplete character is U+FFFD; its bytes are exact.
        """
        before, both = (self.decode(ids, control_tokens=True) for ids in (self._anchor, [*self._anchor, token]))
        text = both.removeprefix(before)
        if "\ufffd" not in text:
            return text, text.encode()
        name = str(self.hf.convert_ids_to_tokens(token))
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):  # SentencePiece
            return text, bytes.fromhex(byte[1])
        return text, bytes(_BYTES[letter] for letter in name if letter in _BYTES)

    def control_tokens(self, fields: Mapping[str, Any] | None = None) -> frozenset[int]:
        """Return the ids of all control tokens, or of those in these fields of a response template."""
        text = None if fields is None else json.dumps(fields, ensure_ascii=False).replace("\\", "")
        return frozenset(number for number, name in _control_tokens(self.hf).items() if text is None or name in text)

    @cached_property
    def marks(self) -> dict[str, int]:
        """Ids of the control tokens, and of other tokens in angle brackets, by their text."""
        added = getattr(self.hf, "added_tokens_decoder", {}).items()
        return {t.content: int(number) for number, t in added if t.special or re.fullmatch("<.+>", t.content)}

    def split(self, text: str) -> list[str | int]:
        """Split a text at its marks, for which their ids stand."""
        pattern = "|".join(map(re.escape, sorted(self.marks, key=len, reverse=True))) or r"\Z"
        return [self.marks.get(piece, piece) for piece in re.split(f"({pattern})", text) if piece]

    def find_switch(self, names: Sequence[str]) -> str | None:
        """Return the first of these variables for which the chat template distinguishes True and False."""
        messages = [{"role": "user", "content": "a"}]
        for name in names:
            with suppress(PromptError):
                if self._apply_template(messages, {name: True}) != self._apply_template(messages, {name: False}):
                    return name
        return None

    def template_text(self, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return the source of the chat template for prompts with these tools; "" without one."""
        return str(self.hf.get_chat_template(tools=tools)) if self.has_chat_template else ""

    # needed for every prompt; the template for tools may be another one than that without
    @cachedmethod(lambda self: self._renders_tools, key=lambda self: self.template_text([{}]))
    def renders_tools(self) -> bool:
        """True if the chat template renders tools; some name them differently or render only calls in the history."""
        probe = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
        try:
            with self._lock:
                text = self.hf.apply_chat_template([{"role": "user", "content": ""}], tools=[probe], tokenize=False)
        except Exception:  # of any type; rendering the prompt will raise it again
            return False
        return "probe" in text

    @property
    def response_template(self) -> dict[str, Any] | None:
        """The tokenizer's own description of the format of answers, if it has one."""
        return getattr(self.hf, "response_template", None)

    @property
    def digest(self) -> str:
        """Hash of everything that determines the ids of a text."""
        backend = getattr(self.hf, "backend_tokenizer", None) or getattr(self.hf, "_tokenizer", None)
        state = backend.to_str() if backend is not None else repr(sorted(self.hf.get_vocab().items()))
        # exclude the truncation and padding settings of the last call
        state = state[max(state.find('"added_tokens"'), 0) :]
        return xxhash.xxh3_128(state.encode()).hexdigest()

    def _find_preamble(self) -> tuple[int, ...]:
        prompts = []
        for contents in _PROBES:
            messages = [{"role": role, "content": content} for role, content in contents.items()]
            with suppress(PromptError):  # no template, or one that rejects a system message
                prompts.append(self._apply_template(messages, {}))
        if len(prompts) > 1 and (common := min(num_common(prompts[0], other) for other in prompts[1:])):
            return tuple(prompts[0][: min(common, _PREAMBLE_TOKENS)])
        bos = self.hf.bos_token_id
        if bos is not None and self.hf("a")["input_ids"][:1] == [bos]:
            return (bos,)
        return tuple(self.hf.encode("\n", add_special_tokens=False)[:1])


class AnswerRegions(ResponseParser):  # type: ignore[misc]
    """transformers' streaming parser of answers. A region that cannot be parsed has the value None.

    `tag` ends the regions of the field "tagged", except inside a JSON string. The event of a region's end has the text
    that ended it as `ended_by`, and what its patterns found as `captures`.
    """

    tag = "</tool_call>"
    _delimiter = ""  # found last

    def __init__(self, template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Begin an answer; `tools` give the types of arguments that are not written as JSON."""
        known = {  # older transformers do not parse Python
            name: field for name, field in template["fields"].items() if field.get("content", "text") in CONTENT_PARSERS
        }
        typed = [_with_types(tool["function"]) for tool in tools]
        super().__init__({**template, "fields": known}, prompt, tools=typed)

    @property
    def field(self) -> str | None:
        """The field of the current region."""
        return cast("str | None", self._current)

    @property
    def is_pending(self) -> bool:
        """True if text is held back that may belong to a delimiter."""
        return bool(self._pos < len(self._buffer))

    def end(self) -> list[dict[str, Any]]:
        """Return the events of the answer's end."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def _scan(self, watch: list[Any], eos: bool) -> tuple[Any, int]:
        found, held = super()._scan(watch, eos)
        self._delimiter = found[2].group() if found else ""
        return found, held

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        if self._current == "tagged" and self._delimiter and _ends_in_string(self._body):
            self._accumulate(events, self._delimiter)
            return
        before, captures = len(events), self._captures
        try:
            super()._close_current(events)
        except Exception:  # for example a call whose arguments are not JSON
            events.append({"type": "region_close", "field": self._current, "value": None})
            self._reset_to_implicit()
        for event in events[before:]:
            event |= {"ended_by": self._delimiter, "captures": captures}


def _with_types(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool whose parameters have types in place of references, which transformers does not follow."""

    def typed(schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        unions = {name: [*map(typed, schema[name])] for name in ("anyOf", "oneOf") if name in schema}
        return {"type": ["object", "array"]} if "$ref" in schema else {**schema, **unions}

    properties = (function.get("parameters") or {}).get("properties") or {}
    return {"name": function["name"], "parameters": {"properties": {key: typed(properties[key]) for key in properties}}}


def _ends_in_string(text: str) -> bool:
    """Return whether this is JSON that ends inside a string."""
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        return getattr(error, "msg", "").startswith("Unterminated string")
    return False


class TextStream:
    """Incremental text of one answer, equal to `Tokenizer.decode` of all tokens.

    A token is decoded together with those of the previous piece, never with the whole answer.
    """

    def __init__(self, hf: Any, control_tokens: Collection[int] = ()) -> None:
        """Begin an answer; `control_tokens` stay in its text."""
        self._hf, self._skip = hf, not control_tokens
        self._skipped = _control_tokens(hf).keys() - set(control_tokens)
        self._shown: list[int] = []  # tokens of the last piece: they determine whether a space follows
        self._pending: list[int] = []  # tokens without complete text yet

    def push(self, token: int) -> str:
        """Add a token; return the text that is now complete, in whole characters."""
        if token in self._skipped:
            return ""
        self._pending.append(token)
        text = self.rest()
        if not text or (text.endswith("\ufffd") and len(self._pending) < _LONGEST_CHARACTER):
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def rest(self) -> str:
        """Return the incomplete text, at the end of the answer."""
        before = self._decode(self._shown)
        return self._decode([*self._shown, *self._pending])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._hf.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False))


_locks: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
"""Locks of tokenizers, which keep state about control tokens: one thread at a time, in all models."""


def is_token_ids(prompt: object) -> TypeGuard[TokenIds]:
    """Return whether a prompt consists of token ids."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(type(token) is int for token in prompt)


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of ids that both rows begin with."""
    different = (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(different, min(len(first), len(second)))


_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}  # letters of byte-level BPE vocabularies


def _control_tokens(hf: Any) -> dict[int, str]:
    return {
        int(number): token.content for number, token in getattr(hf, "added_tokens_decoder", {}).items() if token.special
    }


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its content as one string, or without content."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError(f"a message must be a dict with role and content, got {message!r:.80}")
    content = message.get("content")
    if isinstance(content, list):
        between = "\n" if message["role"] == "tool" else ""  # a tool returns each document as a separate block
        content = between.join(_text_of(part) for part in content)
        message = {**message, "content": content}
    if content is not None:
        if not isinstance(content, str):
            raise PromptError(f"content must be text, got {content!r:.80}")
        check_text(content)
    return message


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise PromptError(f"only text is supported, got message content of type {kind!r}")


def _variants(messages: Messages) -> Iterator[Messages]:
    """Yield the messages, then with alternating roles, then without a system message, for templates that require it."""
    yield messages
    yield _join_neighbours(messages)
    yield _join_neighbours(_fold_system(messages))


def _join_neighbours(messages: Messages) -> Messages:
    joined: Messages = []
    for message in messages:
        last = joined[-1] if joined else {}
        # tool results and messages with calls belong to a call id
        is_plain = last and not {*message, *last} - {"role", "content", "reasoning_content"}
        if is_plain and message["role"] == last["role"] != "tool":
            joined[-1] = {**last, "content": _paragraphs(last.get("content"), message.get("content"))}
        else:
            joined.append(message)
    return joined


def _fold_system(messages: Messages) -> Messages:
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    if not system:
        return messages
    for number, message in enumerate(others):
        if message["role"] == "user":
            others[number] = {**message, "content": _paragraphs(*system, message.get("content"))}
            return others
    return [{"role": "user", "content": _paragraphs(*system)}, *others]


def _paragraphs(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)


def apply_chat_template(hf: Any, messages: list[dict[str, Any]], **template: Any) -> list[int]:
    """Render and tokenise messages. Only control tokens written by the template itself become control tokens."""
    can_sanitize = "sanitize_control_tokens" in inspect.signature(hf.apply_chat_template).parameters
    if _can_be_cut(hf) or not can_sanitize:
        control = _control_text(hf, messages, template)
        if control is None:
            text = hf.apply_chat_template(messages, tokenize=False, **template)
            pieces = hf(_pieces(hf, text), add_special_tokens=False, return_attention_mask=False)["input_ids"]
            return list(chain.from_iterable(pieces))
        if not can_sanitize:  # transformers 5.19, which vLLM may need
            raise PromptError(f"they contain the control token {control!r}: update transformers to 5.20 or newer")
    return list(hf.apply_chat_template(messages, return_dict=False, sanitize_control_tokens=True, **template))


def _control_text(hf: Any, messages: list[dict[str, Any]], template: Mapping[str, Any]) -> str | None:
    """Return a control token, or another mark of transformers, that is in messages or variables; None without any."""
    source, given = hf.get_chat_template(tools=template.get("tools")), json.dumps((messages, template), default=str)
    named = getattr(hf, "chat_control_tokens", None) or ()
    marks = [
        token.content
        for token in hf.added_tokens_decoder.values()
        if token.special or token.content in named or (token.content in source and not token.content.isspace())
    ]
    return next((mark for mark in (*marks, *_MARKERS) if json.dumps(mark)[1:-1] in given), None)


_MARKERS = "\U000f0000\U000f0001"  # transformers leaves them out
_PIECE = 2048  # characters of a piece, at least
_EMPTY_LINE = re.compile(r"\n\n(?=[^\W\d_])")  # before a letter
_LINE_BREAKS = r"|\s*[\r\n]+|"  # in the patterns of GPT-4, Llama 3, Qwen and others


def _pieces(hf: Any, text: str) -> list[str]:
    """Cut a text after empty lines, if that changes no token: several processors tokenise the pieces."""
    starts = [0]
    for line in _EMPTY_LINE.finditer(text) if _can_be_cut(hf) else ():
        if line.end() - starts[-1] >= _PIECE:
            starts.append(line.end())
    return [text[start:stop] for start, stop in pairwise([*starts, len(text)])]


@cached(WeakKeyDictionary(), key=lambda hf: hf)
def _can_be_cut(hf: Any) -> bool:
    """Return whether a tokenizer's words end with their line breaks, whatever letter follows, and depend on no other.

    It has a pattern of words, whose bytes it merges word by word.
    """
    backend: Any = getattr(hf, "backend_tokenizer", None)
    steps = json.loads(backend.pre_tokenizer.__getstate__()) if backend and backend.pre_tokenizer else {}
    words, letters = (*steps.get("pretokenizers", ()), {}, {})[:2]
    pattern = words.get("pattern", {}).get("Regex", "")
    return (
        _LINE_BREAKS in pattern
        and "(?<" not in pattern
        and (letters.get("type"), letters.get("add_prefix_space")) == ("ByteLevel", False)
        and type(backend.normalizer).__name__ in ("NoneType", "NFC")
        and not any(t.lstrip or t.rstrip or "\n" in t.content for t in hf.added_tokens_decoder.values())
    )
