"""JSON schemas as pydantic, zod and OpenAPI write them: none is refused, and what a grammar can enforce is enforced."""

from __future__ import annotations

import datetime
import ipaddress
import json
import uuid
from collections.abc import Iterable
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from blending import messages
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict, Field, Json, RootModel, SecretStr, StringConstraints

from kvrag import BlendEngine, Grammar, Model, ModelError, SettingError
from kvrag.generate.grammar import constrain, guarded


class Tag(StrEnum):
    a = "a"
    b = "b"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    owner: Dog | None = None


class Tree(RootModel[dict[str, "int | list[Tree]"]]):
    pass


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow", regex_engine="python-re")
    word: str = Field(pattern=r"^(?=.*\d)[a-z\d]+$")


TYPES: list[Any] = [
    *(set[Tag], frozenset[int], dict[Tag, bool], dict[Literal["a", "b"], Cat], dict[int, str], dict[uuid.UUID, int]),
    *(bytes, Decimal, SecretStr, Json[list[int]], Any, Path, uuid.UUID, ipaddress.IPv4Address, ipaddress.IPv6Network),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, Iterable[int], Cat | None, Tree, Loose),
    *(tuple[int, str], tuple[int, ...], Literal["a", 1, None], Annotated[Cat | Dog, Field(discriminator="kind")], Dog),
    Annotated[str, StringConstraints(pattern="^[a-c]+$", max_length=4)],
    Annotated[Decimal, Field(max_digits=5, decimal_places=2)],
    Annotated[list[Tag], Field(min_length=1, max_length=2, json_schema_extra={"uniqueItems": True})],
    Annotated[dict[Tag, bool], Field(min_length=2)],
]
NAMED = {"type": "object", "properties": {"name": {"enum": ["x"]}}, "required": ["name"]}
ID = {"id": {"enum": [1]}}
REF = {"$ref": "#/$defs/Named"}
SCHEMAS: list[dict[str, Any]] = [  # of zod, OpenAPI and others
    {"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", "type": "integer", "format": "int64", "x-order": 1},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"const": 1}], "minItems": 1},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    {"type": "object", "propertyNames": {"pattern": "^k"}, "additionalProperties": {"enum": [1]}, "minProperties": 1},
    {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": {"enum": [1]}},
    {"type": "array", "uniqueItems": False, "contains": {"const": 1}, "items": {"type": "boolean"}},
    {
        "type": "string",
        "format": "email",
        "pattern": r"^(?!\.)([\w'+\-\.]*)@([a-z]+\.)+[a-z]+$",
    },
    {"type": "string", "format": "cuid", "contentEncoding": "base64", "contentMediaType": "text/html"},
    {"type": "string", "default": "a", "readOnly": True, "deprecated": True, "examples": [1], "not": {"const": "b"}},
    {
        "type": "object",
        "patternProperties": {"^(?!x)": {"enum": [1]}, "^x": {"enum": [2]}},
        "additionalProperties": False,
    },
    {"type": "object", "patternProperties": {"^x": {"enum": [1]}, "^xy": {"enum": [1]}}, "additionalProperties": False},
    {"type": "object", "properties": {**ID, "n": True, "m": True}, "minProperties": 2, "maxProperties": 2},
    {"type": "object", "properties": ID, "required": ["id", "other"], "unevaluatedProperties": False},
    {"type": "object", "properties": ID, "dependentRequired": {"id": ["b"]}, "required": ["id", "b"]},
    {**NAMED, "if": {"required": ["name"]}, "then": {"properties": ID, "required": ["id"]}},
]
TOGETHER: list[dict[str, Any]] = [  # several schemas describe one object, {"name": "x", "id": 1}
    {"$defs": {"Named": NAMED}, "type": "object", "allOf": [REF], "properties": ID, "required": ["id"]},
    {"$defs": {"Named": NAMED}, **REF, "properties": ID, "required": ["id"]},
    {"$defs": {"Named": NAMED}, "allOf": [REF, {"properties": ID, "required": ["id"]}], "unevaluatedProperties": False},
    {"$defs": {"Named": NAMED}, "allOf": [REF, {"allOf": [REF, {"properties": ID}]}, {"required": ["id"]}]},
    {**NAMED, "anyOf": [{"properties": ID, "required": ["id"]}]},
    {**NAMED, "oneOf": [{"properties": ID, "required": ["id"]}, {"properties": {"id": False}, "required": ["id"]}]},
    {
        "$defs": {"Named": {**NAMED, "properties": {**NAMED["properties"], "next": {"$ref": "#/$defs/Both"}}}}
        | {"Both": {"allOf": [REF], "properties": ID, "required": ["id"]}},
        "$ref": "#/$defs/Both",
    },
]


def schema_of(kind: Any) -> dict[str, Any]:
    class Holder(BaseModel):
        value: kind

    return Holder.model_json_schema()


@pytest.mark.parametrize("schema", [*map(schema_of, TYPES), *SCHEMAS, *TOGETHER], ids=repr)
@pytest.mark.parametrize("is_call", [False, True])
def test_no_schema_is_refused(engine: BlendEngine, schema: dict[str, Any], is_call: bool) -> None:
    if is_call:
        parameters = {"type": "object", "properties": {"value": {"type": "integer"}}, **schema}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        form: dict[str, Any] = {"tools": [tool], "tool_choice": "f"}
    else:
        form = {"grammar": Grammar(json_schema=schema)}
    engine.generate(messages("Who?"), **form, temperature=0, max_new_tokens=4, policy="full")


def accepts(model: Model, schema: dict[str, Any], text: str) -> bool:
    """Return whether a grammar allows a text as the whole answer."""
    constraint = constrain(model, Grammar(json_schema=schema))
    try:
        is_complete = [constraint.push(model.tokenizer.encode(letter)[0]) for letter in text][-1]
    except ModelError:
        return False
    allowed = constraint.mask(torch.zeros(1, model.vocab_size)).isfinite()[0] if not is_complete else []
    return is_complete or any(allowed[eos] for eos in model.eos_ids)


@pytest.mark.parametrize("schema", TOGETHER, ids=repr)
def test_an_object_that_several_schemas_describe_is_open(model: Model, schema: dict[str, Any]) -> None:
    whole = '{"name": "x", "id": 1}'
    is_reversed = not accepts(model, schema, whole)
    assert accepts(model, schema, '{"id": 1, "name": "x"}') == is_reversed  # properties have an order
    Draft202012Validator(schema).validate(json.loads(whole))
    for wrong in ('{"name": "x"}', '{"id": 1}'):
        assert not accepts(model, schema, wrong)


def test_alternatives_do_not_share_properties(model: Model) -> None:
    one, two = ({"properties": {name: {"enum": [1]}}, "required": [name]} for name in "ab")
    schema = {"anyOf": [one, two], "type": "object"}
    assert accepts(model, schema, '{"a": 1}')
    assert accepts(model, schema, '{"b": 1}')
    assert not accepts(model, schema, '{"a": 1, "b": 1}')


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, "uniqueItems"),
        ({"type": "string", "format": "binary"}, "binary"),
        ({"type": "string", "pattern": "^(?=a)"}, "pattern ^(?=a)"),
        ({"type": "object", "properties": ID, "minProperties": 2}, "minProperties"),
        ({"type": "object", "propertyNames": {"enum": ["a"]}}, "propertyNames"),
        ({"type": "array", "title": "T", "items": {"type": "integer"}}, ""),
        (NAMED, ""),
    ],
)
@pytest.mark.parametrize("is_call", [False, True])
def test_the_report_names_what_is_not_enforced(
    engine: BlendEngine, schema: dict[str, Any], left_out: str, is_call: bool
) -> None:
    inner = {"type": "object", "properties": {"value": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": inner}}
    form: dict[str, Any] = {"tools": [tool], "tool_choice": "f"} if is_call else {"grammar": Grammar(json_schema=inner)}
    notes = engine.generate(messages("Who?"), **form, temperature=0, max_new_tokens=4, policy="full").report.notes
    about = [note for note in notes if "the grammar does not enforce all of the schema" in note]
    assert len(about) == bool(left_out)
    assert left_out in "".join(about)


def test_schemas_that_are_too_large_are_refused(model: Model) -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(SettingError, match="nested too deeply"):
        guarded(deep)
    many = {"properties": {f"n{number}": {} for number in range(500)}}
    steps = {f"S{n}": {"properties": {f"p{n}": {}}, "anyOf": [{"$ref": f"#/$defs/S{n + 1}"}] * 2} for n in range(30)}
    for wide in (
        {"$defs": {**steps, "S30": NAMED}, "$ref": "#/$defs/S0"},
        {**many, "anyOf": [{"properties": {f"c{number}": {}}} for number in range(500)]},
    ):
        with pytest.raises(SettingError, match="schema too large"):
            constrain(model, Grammar(json_schema=wide))
