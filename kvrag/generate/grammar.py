"""Answers that keep to a grammar: at every step, only the tokens that it allows can be drawn."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvrag.backend.transformers import Model
from kvrag.config import Grammar
from kvrag.errors import ModelError, SettingError, UnsupportedModelError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# as Python and the chat templates write JSON. Free white space would let a weak model go on with it for ever
_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions", "patternProperties")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "prefixItems")

_tokenizers: weakref.WeakKeyDictionary[Model, LLTokenizer] = weakref.WeakKeyDictionary()
_making = threading.Lock()


class Constraint:
    """What a grammar allows after the tokens so far; for one answer."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self, logits: Tensor) -> Tensor:
        """(1, V) logits -> the same with -inf for every token that would break the grammar.

        Tokens that end an answer are allowed where the grammar may end.

        Raises:
            ModelError: The grammar cannot go on.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, count=logits.shape[-1], bitorder="little")).bool()
        if self._matcher.is_error():
            raise ModelError(f"the grammar cannot go on: {_first_line(self._matcher.get_error())}")
        if not allowed.any():
            raise ModelError("the grammar cannot go on: no token of this model continues the answer")
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def push(self, token: int) -> bool:
        """Go on by a token that was allowed; returns whether the answer is complete and nothing can follow."""
        if not self._matcher.consume_token(token):
            raise ModelError(f"the grammar cannot go on: {_first_line(self._matcher.get_error())}")
        return bool(self._matcher.is_stopped())


def constrain(model: Model, grammar: Grammar) -> Constraint:
    """A constraint at the start of an answer.

    Raises:
        SettingError: The extra is not installed, or the grammar is wrong or has what cannot be guaranteed.
        UnsupportedModelError: The tokenizer's bytes cannot be told.
    """
    llguidance = _llguidance()
    if grammar.regex is not None:
        kind, source = "regex", llguidance.grammar_from("regex", grammar.regex)
    elif grammar.lark is not None:
        kind = "lark"
        try:
            source = llguidance.grammar_from("ebnf", grammar.lark)
        except ValueError as error:
            raise SettingError(f"the grammar's lark is wrong: {_first_line(str(error))}") from None
    else:
        assert grammar.json_schema is not None
        kind, source = "json_schema", llguidance.grammar_from("json_schema", json.dumps(guarded(grammar.json_schema)))
    matcher = llguidance.LLMatcher(_tokenizer(model), source)
    if matcher.is_error():
        raise SettingError(f"the grammar's {kind} cannot be guaranteed: {_first_line(matcher.get_error())}")
    return Constraint(matcher)


def guarded(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as it is enforced: objects have no properties but those named, and white space is fixed."""
    return {**_closed(schema), "x-guidance": _WRITING}


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for name in _SCHEMAS_BY_NAME:
        if isinstance(closed.get(name), Mapping):
            closed[name] = {key: _closed(value) for key, value in closed[name].items()}
    for name in _LISTS_OF_SCHEMAS:
        if isinstance(closed.get(name), list):
            closed[name] = [_closed(value) for value in closed[name]]
    for name in ("items", "additionalProperties"):
        if name in closed:
            closed[name] = _closed(closed[name])
    if "properties" in closed and "patternProperties" not in closed:
        closed.setdefault("additionalProperties", False)
    closed.pop("discriminator", None)  # OpenAPI's hint says nothing that the alternatives do not
    return closed


def _tokenizer(model: Model) -> LLTokenizer:
    import llguidance.hf

    hf = model.tokenizer.hf
    with _making:
        if model not in _tokenizers:
            try:
                _tokenizers[model] = llguidance.hf.from_tokenizer(
                    hf, n_vocab=max(model.vocab_size, len(hf)), eos_token=sorted(model.eos_ids) or None
                )
            except ValueError as error:
                raise UnsupportedModelError(
                    f"answers of {model.name} cannot be held to a grammar: {_first_line(str(error))}"
                ) from None
        return _tokenizers[model]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise SettingError(
            "a grammar, a forced tool choice or structured output needs llguidance: pip install 'kvrag[grammar]'"
        ) from None
    return llguidance


def _first_line(message: str) -> str:
    return message.strip().split("\n")[0]
