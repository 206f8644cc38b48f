"""JSON schemas in the form that llguidance enforces best."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvrag.errors import SettingError

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # a list of items is draft 7's form of prefixItems
_SINGLE = ("items", "additionalProperties", "additionalItems")
_OWN = {"properties", "required", "additionalProperties", "patternProperties"}  # of a schema that describes an object
_ADDING = {"patternProperties", "if", "dependentSchemas", "dependentRequired", "dependencies"}  # properties

Supported = Callable[[dict[str, Any]], bool]


def enforceable(schema: Mapping[str, Any], is_supported: Supported) -> tuple[dict[str, Any], list[str]]:
    """Return the schema with objects that have only the named properties, and what of it was left out.

    If several schemas describe the same object, all objects stay open, as JSON schema has it.

    Args:
        is_supported: Whether the grammar supports the regular expressions of a small schema; others are left out.

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
        left_out |= dict.fromkeys(_drop_patterns(part, is_supported) + _drop_counts(part))
        if not is_open:
            _close(part)
    return root, list(left_out)


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


def _drop_patterns(schema: dict[str, Any], is_supported: Supported) -> list[str]:
    """Remove regular expressions that the grammar does not support; return a note for each."""
    pattern, patterns = schema.get("pattern"), schema.get("patternProperties")
    dropped = list[str]()
    if isinstance(pattern, str) and not is_supported({"type": "string", "pattern": pattern}) and _is_valid(pattern):
        dropped.append(schema.pop("pattern"))
    if isinstance(patterns, dict):
        probe = {"type": "object", "patternProperties": dict.fromkeys(patterns, True)}
        if not is_supported(probe) and all(map(_is_valid, patterns)):
            dropped += patterns
            schema["patternProperties"] = {"": {"anyOf": [*patterns.values()]}}
    return [f"pattern {pattern}" for pattern in dropped]


def _is_valid(pattern: str) -> bool:
    """Return whether this is a regular expression; others are errors of the schema, which the grammar reports."""
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
