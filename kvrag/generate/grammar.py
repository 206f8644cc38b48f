"""Constrained decoding: only tokens that the grammar allows can be sampled.

JSON schemas are brought into the form that llguidance enforces best.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from kvrag.backend.transformers import Model, Tokenizer
from kvrag.backend.transformers.gguf import FileTokenizer
from kvrag.config import Grammar
from kvrag.errors import ModelError, SettingError, UnsupportedModelError, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

# Python's and the chat templates' JSON style; if white space were free, a weak model might write nothing else
_JSON_STYLE = {
    **{"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True},
    "lenient": True,  # what it cannot enforce is a warning
}

# llguidance follows references by recursion, and an overflow of the stack would end the process: a long grammar
# of nothing else takes 0.3 GiB. Memory of the stack that is not used is not allocated
_STACK = 512 << 20
_MOST_CHARACTERS = 1 << 20

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # a list of items is draft 7's form of prefixItems
_SINGLE = ("items", "additionalProperties", "additionalItems")
_OWN = {"properties", "required", "additionalProperties", "patternProperties"}  # of a schema that describes an object
_ADDING = {"patternProperties", "if", "dependentSchemas", "dependentRequired", "dependencies"}  # properties

_tokenizers: weakref.WeakKeyDictionary[Model, LLTokenizer] = weakref.WeakKeyDictionary()
_creating = threading.Lock()


class Constraint:
    """A grammar with the state of one answer.

    Attributes:
        notes: What of a schema is not enforced, for the report.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, left_out: Sequence[str] = ()) -> None:
        from llguidance.torch import allocate_token_bitmask

        self.notes = [f"the grammar does not enforce all of the schema: {'; '.join(left_out)}"] if left_out else []
        self._matcher = matcher
        self._bitmask: Tensor = allocate_token_bitmask(1, vocab_size)  # (1, V / 32) int32, pinned where there is a GPU

    def mask(self, logits: Tensor) -> Tensor:
        """Return (1, V) logits with -inf for every token that would break the grammar.

        Tokens that end an answer are allowed where the grammar may end. Raises SettingError if no token is allowed.
        """
        from llguidance.torch import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bitmask)
        if self._matcher.is_error():
            reason = first_line(self._matcher.get_error())
            raise SettingError(f"the grammar cannot continue ({reason}): does it refer to itself without an end?")
        if not self._bitmask.any():
            raise SettingError("the grammar cannot continue: this model has no token that it allows here")
        # not llguidance's apply_token_bitmask_inplace: it is torch-compiled, which takes half a minute and a compiler
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (self._bitmask.to(logits.device)[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[-1]]  # (1, V)
        masked = torch.full_like(logits, -torch.inf)
        known = slice(0, allowed.shape[1])  # some models have more logits than their tokenizer has tokens
        masked[:, known] = logits[:, known].masked_fill(allowed == 0, -torch.inf)
        return masked

    def push(self, token: int) -> bool:
        """Advance by an allowed token; return whether the answer is complete and nothing can follow."""
        if not self._matcher.consume_token(token):
            raise ModelError(f"the grammar cannot continue: {first_line(self._matcher.get_error())}")
        return bool(self._matcher.is_stopped())


def constrain(model: Model, grammar: Grammar, before: str = "", left_out: Sequence[str] = ()) -> Constraint:
    """Return a constraint at the start of an answer.

    Args:
        before: Lark grammar of a thought, or what else precedes the answer, which it calls `@answer`.
        left_out: What the grammar does not enforce of the schemas in it.

    Raises:
        SettingError: The extra is not installed, or the grammar is invalid or uses unsupported features.
        UnsupportedModelError: The tokenizer does not expose the bytes of its tokens.
    """
    llguidance = _llguidance()
    form: Literal["json_schema", "regex", "ebnf"] = "ebnf"
    text = grammar.lark or ""
    if grammar.json_schema is not None:
        schema, left_out = guarded(grammar.json_schema)
        form, text = "json_schema", json.dumps(schema)
    elif grammar.regex is not None:
        form, text = "regex", grammar.regex
    kind = "lark" if form == "ebnf" else form
    try:
        source = llguidance.grammar_from(form, text)
    except ValueError as error:
        raise SettingError(f"the grammar's {kind} is invalid: {first_line(error)}") from None
    if before:
        answer = {"lark_grammar": source} if kind == "lark" else json.loads(source)["grammars"][0]
        source = json.dumps({"grammars": [{"lark_grammar": before}, {**answer, "name": "answer"}]})
    if len(source) > _MOST_CHARACTERS:
        raise SettingError(
            f"the grammar is longer than {_MOST_CHARACTERS} characters: use a shorter one, or fewer tools"
        )
    tokenizer = _tokenizer(model)
    matcher = _with_stack(lambda: llguidance.LLMatcher(tokenizer, source))
    if matcher.is_error():
        raise SettingError(f"the grammar's {kind} is invalid or not supported: {first_line(matcher.get_error())}")
    return Constraint(matcher, tokenizer.vocab_size, [*left_out, *matcher.get_grammar_warnings()])


def _with_stack(work: Callable[[], T]) -> T:
    """Return the result of work in a thread with a large stack."""
    with ThreadPoolExecutor(1) as pool:
        with _creating:
            usual = threading.stack_size(_STACK)
            try:
                done = pool.submit(work)  # starts the thread
            finally:
                threading.stack_size(usual)
        return done.result()


@functools.lru_cache(maxsize=1024)
def _is_supported(schema: str) -> bool:
    llguidance = _llguidance()
    return not llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(schema))


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise SettingError(
            "a grammar, a forced tool choice or structured output needs llguidance: pip install 'kvrag[grammar]'"
        ) from None
    return llguidance


def literal(tokenizer: Tokenizer, text: str) -> str:
    """Return a text as Lark terms; llguidance accepts marks by number only."""
    pieces = tokenizer.split(text)
    return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part, ensure_ascii=False) for part in pieces)


def _tokenizer(model: Model) -> LLTokenizer:
    import llguidance.hf

    hf = model.tokenizer.hf
    ends = sorted(model.eos_ids) or None
    with _creating:
        if model not in _tokenizers:
            try:
                if isinstance(hf, FileTokenizer):
                    kind: Any = llguidance.LLTokenizer  # its stub lacks the method
                    _tokenizers[model] = kind.from_llamacpp(**hf.parts(), eos_token=ends)
                else:
                    most = max(model.vocab_size, len(hf))
                    _tokenizers[model] = llguidance.hf.from_tokenizer(hf, n_vocab=most, eos_token=ends)
            except ValueError as error:
                raise UnsupportedModelError(
                    f"grammars are not supported for {model.name}: {first_line(error)}"
                ) from None
        return _tokenizers[model]


# ---------------------------------------------------------------- schemas


def guarded(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the schema as enforced, and what of it is not: objects have only the named properties.

    If several schemas describe the same object, all objects stay open, as JSON schema has it. White space is fixed.

    Raises:
        SettingError: The schema is nested too deeply.
    """
    try:
        root: dict[str, Any] = json.loads(json.dumps(schema))
        parts = list(_schemas(root))
    except RecursionError:
        raise SettingError("the JSON schema is nested too deeply: flatten it") from None
    root.pop("$schema", None)  # drafts differ in their keywords; an unknown draft would be an error
    is_open, left_out = any(map(_has_several, parts)), dict[str, None]()
    for part in parts:
        left_out |= dict.fromkeys(_drop_patterns(part) + _drop_counts(part))
        if not is_open:
            _close(part)
    return {**root, "x-guidance": _JSON_STYLE}, list(left_out)


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema, and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        parts: Any = [value] if key in _SINGLE else ()
        if key in _BY_NAME and isinstance(value, dict):
            parts = value.values()
        elif key in _LISTS and isinstance(value, list):
            parts = value
        for part in parts:
            yield from _schemas(part)


def _has_several(schema: dict[str, Any]) -> bool:
    """Return whether a value must match several schemas, each of which may name properties."""
    together = schema.get("allOf")
    beside = sum(key in schema for key in ("anyOf", "oneOf", "$ref")) + bool(_OWN & {*schema})
    return beside + (len(together) if isinstance(together, list) else 0) > 1


def _close(schema: dict[str, Any]) -> None:
    """Allow an object only the properties that this schema names."""
    named, required = schema.get("properties"), schema.get("required")
    if isinstance(named, dict) and "additionalProperties" not in schema and not _ADDING & {*schema}:
        for name in required if isinstance(required, list) else ():
            named.setdefault(name, True)
        schema["additionalProperties"] = False
        schema.pop("unevaluatedProperties", None)


def _drop_counts(schema: dict[str, Any]) -> list[str]:
    """Remove limits to the number of named properties, which llguidance cannot count; return their names."""
    is_named = _has_several(schema) or "properties" in schema
    return [name for name in ("minProperties", "maxProperties") if is_named and schema.pop(name, None) is not None]


def _drop_patterns(schema: dict[str, Any]) -> list[str]:
    """Remove regular expressions that the grammar does not support; return a note for each."""
    pattern, patterns = schema.get("pattern"), schema.get("patternProperties")
    dropped = list[str]()
    if isinstance(pattern, str) and _is_unknown([pattern], json.dumps({"type": "string", "pattern": pattern})):
        dropped.append(schema.pop("pattern"))
    if isinstance(patterns, dict):
        probe = {"type": "object", "patternProperties": dict.fromkeys(patterns, True)}
        if _is_unknown(patterns, json.dumps(probe)):
            dropped += patterns
            schema["patternProperties"] = {"": {"anyOf": [*patterns.values()]}}
    return [f"pattern {pattern}" for pattern in dropped]


def _is_unknown(patterns: Iterable[str], probe: str) -> bool:
    """Return whether a schema of these is not supported, and they are regular expressions.

    Others are errors of the schema, which the grammar reports.
    """
    if _is_supported(probe):
        return False
    try:
        return all(map(re.compile, patterns))
    except re.error:
        return False
