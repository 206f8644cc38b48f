"""JSON schemas in the form that llguidance enforces best."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote

from kvrag.errors import SettingError

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_IN_PLACE = ("allOf", "anyOf", "oneOf")  # lists of schemas for the same value
_LISTS = (*_IN_PLACE, "prefixItems", "items")  # a list of items is draft 7's form of prefixItems
_SINGLE = ("items", "additionalProperties", "additionalItems")
_ANNOTATIONS = {"type", "title", "description", "$comment", "default", "examples"}  # of names, which are strings
_MOST_PARTS = 100_000  # schemas and names of objects that several schemas describe

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


def _mapped(schema: Mapping[str, Any], change: Callable[[Any, str], Any], path: str = "") -> dict[str, Any]:
    """Return a copy with `change(part, pointer)` of the schemas in it."""
    copy = dict(schema)
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            copy[key] = {name: change(part, f"{path}/{key}/{_escaped(name)}") for name, part in value.items()}
        elif key in _LISTS and isinstance(value, list):
            copy[key] = [change(part, f"{path}/{key}/{number}") for number, part in enumerate(value)]
        elif key in _SINGLE:
            copy[key] = change(value, f"{path}/{key}")
    return copy


def _escaped(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~")


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
    """A schema without keywords that others can express, or that have no effect."""

    def __init__(self, schema: Mapping[str, Any], is_supported: Supported) -> None:
        self._schema, self._is_supported = schema, is_supported
        self.left_out = dict[str, None]()
        self.root: dict[str, Any] = self._simplified(schema, "#")
        self.root.pop("$schema", None)  # drafts differ in their keywords; an unknown draft would be an error

    def _simplified(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        simple = self._with_key_names(_mapped(schema, self._simplified, path), path)
        if simple.pop("discriminator", None) and "oneOf" in simple and "anyOf" not in simple:
            simple["anyOf"] = simple.pop("oneOf")  # OpenAPI's hint that the alternatives exclude each other
        if simple.get("uniqueItems") is False:
            del simple["uniqueItems"]
        if simple.get("unevaluatedProperties") is False:
            del simple["unevaluatedProperties"]
            if not {"$ref", *_IN_PLACE} & {*simple}:
                simple.setdefault("additionalProperties", False)
        parent = path.split("/")[-2:-1]
        is_part = {"properties", "required", "$ref", *_IN_PLACE} & {*simple} or {*parent} & {"$defs", *_IN_PLACE}
        if is_part:  # llguidance cannot count named properties
            if simple.pop("maxProperties", None) is not None:
                self.left_out["maxProperties"] = None
            if simple.get("minProperties", 0) not in (0, 1):
                simple["minProperties"] = 1
                self.left_out["minProperties"] = None
        pattern, patterns = simple.get("pattern"), simple.get("patternProperties")
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

    def _with_key_names(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """Express `propertyNames` by properties or a pattern, if possible."""
        names = schema.get("propertyNames")
        if isinstance(names, Mapping) and "$ref" in names:
            names = _target(self._schema, names["$ref"])
        others = {key: value for key, value in schema.items() if key != "propertyNames"}
        if names is True or (isinstance(names, Mapping) and {*names} <= _ANNOTATIONS):
            return others
        if not isinstance(names, Mapping) or {"properties", "patternProperties"} & {*schema}:
            return schema
        values, named = schema.get("additionalProperties", True), dict[str, Any]()
        keys = names.get("enum", [names["const"]] if "const" in names else None)
        if isinstance(keys, list) and {*names} <= {*_ANNOTATIONS, "enum", "const"}:
            texts = [key for key in keys if isinstance(key, str)]
            if isinstance(values, Mapping) and texts:  # once, since it may be large
                first = {"$ref": f"{path}/properties/{_escaped(texts[0])}"}
                named = {"properties": {**dict.fromkeys(texts, first), texts[0]: values}}
            else:
                named = {"properties": dict.fromkeys(texts, values)}
        elif {*names} <= {*_ANNOTATIONS, "pattern"} and isinstance(names["pattern"], str):
            named = {"patternProperties": {names["pattern"]: values}}
        return {**others, **named, "additionalProperties": False} if named else schema


class _Closed:
    """A schema whose objects have only the named properties, those of all schemas that describe the same object.

    Every part stays where it is, so that references to it stay valid.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema, self._num_parts = schema, 0
        self._names_of: dict[int, Names] = {}  # by the schema's identity
        self.root: dict[str, Any] = self._closed(schema)

    def _closed(self, schema: Any, _: str = "", outer: Names | None = None) -> Any:
        """Return a schema with its objects closed.

        Args:
            outer: Names of the properties that other schemas give to the same object.
        """
        if not isinstance(schema, Mapping):
            return schema
        own, groups = {**(outer or {}), **self._own_names(schema)}, self._groups(schema)
        given = {key: _joined(names) for key, names in groups.items()}
        every = _joined([own, *given.values()])
        alternatives = next((key for key in ("anyOf", "oneOf") if given.get(key)), None)
        single = (names for key, names in given.items() if key != "allOf")
        if sum(map(bool, (own, *single, *groups.get("allOf", ())))) < 2:
            closed = _mapped(schema, self._closed)
            if own or "properties" in schema:
                self._close(closed, own)
            return closed
        # several schemas describe one object: each allows the properties of the others
        closed = self._open(schema, "", frozenset())
        if alternatives is None:
            self._close(closed, every)
        else:
            beside = _joined([own, *(names for key, names in given.items() if key != alternatives)])
            closed[alternatives] = [self._closed(part, outer=beside) for part in schema[alternatives]]
        return closed

    def _open(self, schema: Any, pointer: str, seen: frozenset[str]) -> Any:
        """Return a schema with the references to schemas for the same value replaced by these.

        Args:
            pointer: Where the schema is defined, if this is a copy: its parts then refer to there.
            seen: References on the way here.
        """
        if not isinstance(schema, Mapping):
            return schema
        self._count(1 + len(self._own_names(schema)))

        def part_of(part: Any, path: str) -> Any:
            if path.removeprefix(pointer).split("/")[1] in _IN_PLACE:
                return self._open(part, path if pointer else "", seen)
            return {"$ref": path} if pointer and isinstance(part, Mapping) else self._closed(part)

        opened = _mapped(schema, part_of, pointer)
        if pointer:
            opened = {key: value for key, value in opened.items() if key not in ("$defs", "definitions", "$id")}
        ref: Any = schema.get("$ref")
        if (target := _target(self._schema, ref)) is not None:
            del opened["$ref"]
            if ref not in seen:
                inlined = self._open(target, ref, seen | {ref})
                opened["allOf"] = [*opened.get("allOf", []), inlined]
        return opened

    def _names(self, schema: Any) -> Names:
        """Return the names of the properties that a schema gives to an object, in all its alternatives."""
        if not isinstance(schema, Mapping):
            return {}
        if id(schema) not in self._names_of:
            self._names_of[id(schema)] = {}  # a reference to itself adds nothing
            parts = (names for group in self._groups(schema).values() for names in group)
            self._names_of[id(schema)] = _joined([*parts, self._own_names(schema)])
        return self._names_of[id(schema)]

    def _groups(self, schema: Mapping[str, Any]) -> dict[str, list[Names]]:
        """Return the names of each schema that describes the same value, by keyword."""
        groups = {
            key: [self._names(part) for part in schema[key]] for key in _IN_PLACE if isinstance(schema.get(key), list)
        }
        if "$ref" in schema:
            target = _target(self._schema, schema["$ref"])
            groups["$ref"] = [{None: True} if target is None else self._names(target)]
        return groups

    def _own_names(self, schema: Mapping[str, Any]) -> Names:
        lists: list[Any] = [schema.get("properties"), schema.get("required")]
        parts = [schema.get(key) for key in ("if", "then", "else")]
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            if isinstance(dependent := schema.get(key), Mapping):
                lists += [value for value in dependent.values() if isinstance(value, list)]
                parts += dependent.values()
        lists = [value for value in lists if isinstance(value, (Mapping, list))]
        names: Names = {name: True for value in lists for name in value if isinstance(name, str)}
        if "patternProperties" in schema or schema.get("additionalProperties", False) is not False:
            names[None] = True
        return _joined([names, *map(self._names, parts)])

    def _close(self, schema: dict[str, Any], names: Names) -> None:
        """Allow an object these properties only, unless it may have any other. Changes the schema."""
        given = schema.get("properties", {})
        if None not in names and isinstance(given, Mapping):
            self._count(len(names) - len(given))
            schema["properties"] = {**dict.fromkeys(names, True), **given}
            schema["additionalProperties"] = False

    def _count(self, parts: int) -> None:
        self._num_parts += parts
        if self._num_parts > _MOST_PARTS:
            raise SettingError("too many schemas of the JSON schema describe one object: use fewer alternatives")
