"""JSON schemas in the form that llguidance enforces best."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any
from urllib.parse import unquote

from kvrag.errors import SettingError

MOST_CHARACTERS = 1 << 20
"""Of a schema as enforced."""

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_IN_PLACE = ("allOf", "anyOf", "oneOf")  # lists of schemas for the same value
_LISTS = (*_IN_PLACE, "prefixItems", "items")  # a list of items is draft 7's form of prefixItems
_SINGLE = ("items", "additionalProperties", "additionalItems")
_ADDING = {"patternProperties", "if", "dependentSchemas", "dependentRequired", "dependencies"}  # properties
_ANNOTATIONS = {"type", "title", "description", "$comment", "default", "examples"}  # of names, which are strings
_MOST_NAMES = 100_000  # that closing adds

Supported = Callable[[dict[str, Any]], bool]
Names = dict[str | None, bool]
"""Names of an object's properties; None = any other."""


def enforceable(schema: Mapping[str, Any], is_supported: Supported) -> tuple[dict[str, Any], list[str]]:
    """Return the schema with simpler keywords, and objects that have only the named properties.

    Args:
        is_supported: Whether the grammar supports the regular expressions of a small schema; others are left out.

    Returns:
        The schema, and what was left out.

    Raises:
        SettingError: Too many schemas describe the same object, or the schema is nested too deeply.
    """
    try:
        simple = _Simplified(json.loads(json.dumps(schema)), is_supported)
        return _Closed(simple.root).root, list(simple.left_out)
    except RecursionError:
        raise SettingError("the JSON schema is nested too deeply: flatten it") from None


def _mapped(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a copy with `change(part)` of the schemas in it."""
    copy = dict(schema)
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            copy[key] = {name: change(part) for name, part in value.items()}
        elif key in _LISTS and isinstance(value, list):
            copy[key] = [change(part) for part in value]
        elif key in _SINGLE:
            copy[key] = change(value)
    return copy


def _target(root: Any, ref: Any) -> Any:
    """Return what a `$ref` within the schema refers to; None if it refers to something else."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        return None
    for name in ref[1:].split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        else:
            root = root.get(name) if isinstance(root, Mapping) else None
    return root


def _joined(names: Iterable[Names]) -> Names:
    return {name: True for part in names for name in part}


class _Simplified:
    """A schema without keywords that others can express, or that make llguidance reject it."""

    def __init__(self, schema: Mapping[str, Any], is_supported: Supported) -> None:
        self._schema, self._is_supported = schema, is_supported
        self.left_out = dict[str, None]()
        self.root: dict[str, Any] = self._simplified(schema)
        self.root.pop("$schema", None)  # drafts differ in their keywords; an unknown draft would be an error

    def _simplified(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        simple = self._with_key_names(_mapped(schema, self._simplified))
        if simple.get("unevaluatedProperties") is False:
            del simple["unevaluatedProperties"]  # as closing does
        pattern, patterns = simple.get("pattern"), simple.get("patternProperties")
        is_counted = {"additionalProperties", "patternProperties"} & {*simple}
        if not is_counted or {"properties", "required", "$ref", *_IN_PLACE} & {*simple}:
            # llguidance cannot count named properties
            if simple.pop("maxProperties", None) is not None:
                self.left_out["maxProperties"] = None
            if simple.get("minProperties", 0) not in (0, 1):
                simple["minProperties"] = 1
                self.left_out["minProperties"] = None
        if isinstance(pattern, str) and self._is_left_out({"type": "string", "pattern": pattern}, pattern):
            del simple["pattern"]
        if isinstance(patterns, Mapping):
            probe = {"type": "object", "patternProperties": dict.fromkeys(patterns, True)}
            if self._is_left_out(probe, *patterns):
                simple["patternProperties"] = {"": {"anyOf": [*patterns.values()]}}
        return simple

    def _is_left_out(self, probe: dict[str, Any], *patterns: str) -> bool:
        """Return whether these are regular expressions that the grammar does not support; take a note of it."""
        if self._is_supported(probe):
            return False
        try:
            for pattern in patterns:
                re.compile(pattern)
        except re.error:
            return False  # an error of the schema
        self.left_out |= {f"pattern {pattern}": None for pattern in patterns}
        return True

    def _with_key_names(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Express `propertyNames` by properties or a pattern, if possible."""
        names = schema.get("propertyNames")
        if isinstance(names, Mapping) and "$ref" in names:
            names = _target(self._schema, names["$ref"])
        if not isinstance(names, Mapping) or {"properties", "patternProperties"} & {*schema}:
            return schema
        others = {key: value for key, value in schema.items() if key != "propertyNames"}
        if {*names} <= _ANNOTATIONS:
            return others
        values, named = schema.get("additionalProperties", True), dict[str, Any]()
        keys = names.get("enum", [names["const"]] if "const" in names else None)
        is_small = isinstance(keys, list) and len(keys) * len(json.dumps(values)) < MOST_CHARACTERS
        if is_small and {*names} <= {*_ANNOTATIONS, "enum", "const"}:
            named = {"properties": {key: values for key in keys if isinstance(key, str)}}
        elif {*names} <= {*_ANNOTATIONS, "pattern"} and isinstance(names["pattern"], str):
            named = {"patternProperties": {names["pattern"]: values}}
        return {**others, **named, "additionalProperties": False} if named else schema


class _Closed:
    """A schema whose objects have only the named properties, those of all schemas that describe the same object.

    A schema that describes an object together with others stays open, also where it does so alone.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema, self._num_names = schema, 0
        self._names_of: dict[int, Names] = {}  # by the schema's identity
        self._open = set[int]()  # identities
        self._find_open(schema)
        self.root: dict[str, Any] = self._closed(schema)

    def _find_open(self, schema: Any) -> None:
        """Find the schemas that stay open, in this one and all of its parts."""
        if isinstance(schema, Mapping):
            if self._has_several(schema):
                self._leave_open(schema)
            _mapped(schema, self._find_open)

    def _leave_open(self, schema: Mapping[str, Any]) -> None:
        """Leave all open that describe the same object as this schema, which is not."""
        lists = [schema[key] for key in _IN_PLACE if isinstance(schema.get(key), list)]
        for part in chain(*lists, [_target(self._schema, schema.get("$ref"))]):
            if isinstance(part, Mapping) and id(part) not in self._open:
                self._open.add(id(part))
                self._leave_open(part)

    def _closed(self, schema: Any) -> Any:
        """Return a copy with closed objects."""
        if not isinstance(schema, Mapping):
            return schema
        closed, given = _mapped(schema, self._closed), schema.get("properties", {})
        names = self._names(schema) if self._has_several(schema) else self._own_names(schema)
        has_names = isinstance(given, Mapping) and (names or "properties" in schema)
        if has_names and None not in names and id(schema) not in self._open:
            self._num_names += len(names) - len(given)
            if self._num_names > _MOST_NAMES:
                raise SettingError("too many schemas of the JSON schema describe one object: use fewer")
            closed["properties"] = {**dict.fromkeys(names, True), **closed.get("properties", {})}
            closed["additionalProperties"] = False
        return closed

    def _has_several(self, schema: Mapping[str, Any]) -> bool:
        """Return whether several schemas name properties of the same object, other than as alternatives."""
        return sum(map(bool, self._groups(schema))) > 1

    def _names(self, schema: Any) -> Names:
        """Return the names of the properties that a schema gives to an object, in all its alternatives."""
        if not isinstance(schema, Mapping):
            return {}
        if id(schema) not in self._names_of:
            self._names_of[id(schema)] = {}  # a reference to itself adds nothing
            self._names_of[id(schema)] = _joined(self._groups(schema))
        return self._names_of[id(schema)]

    def _groups(self, schema: Mapping[str, Any]) -> list[Names]:
        """Return the names of each schema that describes the same value; those of alternatives are one."""
        each = {key: [*map(self._names, schema[key])] for key in _IN_PLACE if isinstance(schema.get(key), list)}
        groups = [*each.pop("allOf", ()), *map(_joined, each.values())]
        if "$ref" in schema:
            target = _target(self._schema, schema["$ref"])
            groups.append({None: True} if target is None else self._names(target))
        return [*groups, self._own_names(schema)]

    def _own_names(self, schema: Mapping[str, Any]) -> Names:
        lists = [value for key in ("properties", "required") if isinstance(value := schema.get(key), (Mapping, list))]
        names: Names = {name: True for value in lists for name in value if isinstance(name, str)}
        if _ADDING & {*schema} or schema.get("additionalProperties", False) is not False:
            names[None] = True
        return names
