"""Schemas of real generators, rewritten for llguidance, allow the same values."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema.validators import Draft202012Validator, validator_for

from specdec.grammar.grammar import GrammarError
from specdec.grammar.json_schema.numbers import LARGEST
from tests.grammar.followed import Followed

INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
COLOURS = {"enum": ["red", "green"], "type": "string"}
KIND = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b", "c"]}, "x": {"type": "integer"}},
    "required": ["kind"],
}
POINT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TREE = {
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "tags": {"type": "array", "items": COLOURS, "uniqueItems": True},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}], "default": None},
            },
            "required": ["tags", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/Node",
}


def closed_object(*names: str) -> dict[str, Any]:
    properties = {name: {"type": "integer"} for name in names}
    return {"type": "object", "properties": properties, "required": [*names], "additionalProperties": False}


SCHEMAS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "zod record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}},
        [{}, {"a": True, "b": False}],
        [{"a": 1}],
    ),
    "zod record of an enum": (
        {
            "type": "object",
            "propertyNames": COLOURS,
            "additionalProperties": {"type": "integer"},
            "required": ["red", "green"],
        },
        [{"red": 1, "green": 2}],
        [{"red": 1}, {"red": 1, "green": 2, "blue": 3}, {"red": "x", "green": 1}],
    ),
    "pydantic dict of constrained names": (
        {
            "type": "object",
            "propertyNames": {"pattern": "^(?!x)[a-z]+$", "maxLength": 3},
            "additionalProperties": {"type": "integer"},
            "minProperties": 1,
        },
        [{"abc": 1}, {"a": 1, "b": 2}],
        [{}, {"xa": 1}, {"abcd": 1}, {"A": 1}],
    ),
    "names beside properties": (
        {
            "type": "object",
            "properties": {"aa": {"type": "string"}, "b": {"type": "string"}},
            "propertyNames": {"pattern": "^a"},
            "additionalProperties": {"type": "integer"},
        },
        [{"aa": "x", "ab": 1}, {}],
        [{"b": "x"}, {"aa": 1}, {"ab": "x"}, {"c": 1}],
    ),
    "names beside patterns": (
        {
            "type": "object",
            "patternProperties": {"^a": {"type": "string"}},
            "propertyNames": {"maxLength": 2},
            "additionalProperties": {"type": "integer"},
        },
        [{"ab": "x", "b": 1}],
        [{"abc": "x"}, {"ab": 1}, {"bcd": 1}, {"b": "x"}],
    ),
    "unique boolean": (
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        [[], [True, False]],
        [[True, True]],
    ),
    "set of an enum": (
        {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c", "d"]}, "minItems": 1},
        [["a"], ["d", "a"], ["b", "c", "d", "a"]],
        [[], ["a", "a"], ["a", "b", "a"], ["e"]],
    ),
    "unique and short": ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [5]], [[1, 2]]),
    "a cycle of definitions": (
        TREE,
        [{"tags": [], "next": {"tags": ["green", "red"], "next": None}}],
        [{"tags": ["red", "red"], "next": None}, {"tags": []}],
    ),
    "draft-07": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"id": {"type": "integer", "minimum": 1}},
            "type": "array",
            "items": [{"$ref": "#/definitions/id"}, {"const": "x"}],
            "additionalItems": {"type": "null"},
        },
        [[1], [1, "x"], [1, "x", None]],
        [[0], [1, "y"], [1, "x", 2]],
    ),
    "draft-07 dependencies": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"a": {}, "b": {}, "c": {"type": "integer"}},
            "dependencies": {"a": ["b"], "b": {"properties": {"c": {"minimum": 5}}}},
            "additionalProperties": False,
        },
        [{}, {"c": 1}, {"a": 1, "b": 2}, {"b": 1, "c": 5}],
        [{"a": 1}, {"b": 1, "c": 4}, {"a": 1, "c": 5}],
    ),
    "dependentRequired": (
        {
            "type": "object",
            "properties": {"card": {"type": "integer"}, "address": {"type": "string"}},
            "dependentRequired": {"card": ["address"]},
        },
        [{}, {"address": "x"}, {"card": 1, "address": "x"}],
        [{"card": 1}],
    ),
    "dependentSchemas": (
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}},
        },
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": None}],
        [{"a": 1, "b": 1}],
    ),
    "if, then, else": (
        {
            **KIND,
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["x"]},
            "else": {"properties": {"x": False}},
        },
        [{"kind": "a", "x": 1}, {"kind": "b"}],
        [{"kind": "a"}, {"kind": "b", "x": 1}, {}],
    ),
    "allOf with true": ({"type": "object", "allOf": [True, {"required": ["a"]}]}, [{"a": 1}], [{}]),
    "several ifs": (
        {
            **KIND,
            "allOf": [
                {"if": {"properties": {"kind": {"const": kind}}}, "then": {"properties": {"x": {"minimum": least}}}}
                for kind, least in (("a", 1), ("b", 2), ("c", 3))
            ],
        },
        [{"kind": "a", "x": 1}, {"kind": "c", "x": 3}, {"kind": "b"}],
        [{"kind": "b", "x": 1}, {"kind": "c", "x": 2}],
    ),
    "an if for each of many kinds": (
        {
            "type": "object",
            "properties": {"kind": {"type": "string"}, "x": {"type": "integer"}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"enum": ["k0", "k1"]}}},
            "then": {"required": ["x"]},
            "allOf": [
                {
                    "if": {"properties": {"kind": {"const": f"k{n}"}}, "required": ["kind"]},
                    "then": {"properties": {"x": {"minimum": n}}},
                    **({"else": {"properties": {"x": {"maximum": 50 + n}}}} if n < 2 else {}),
                }
                for n in range(30)
            ],
        },
        [{"kind": "k1", "x": 1}, {"kind": "k29", "x": 29}, {"kind": "k20"}, {"kind": "z", "x": 50}],
        [{"kind": "k1"}, {"kind": "k29", "x": 28}, {"kind": "z", "x": 51}, {"kind": "k0", "x": 60}, {"x": 1}],
    ),
    "not an enum": ({"type": "string", "not": {"enum": ["a", "ab"]}}, ["", "b", "abc"], ["a", "ab", 1]),
    "not a type": ({"not": {"type": ["string", "number"]}}, [None, True, [1], {"a": 1}], ["a", 1, 1.5]),
    "not a number": ({"type": "integer", "minimum": 0, "maximum": 9, "not": {"enum": [3, 5]}}, [0, 4, 9], [3, 5, 10]),
    "not a pattern": ({"type": "string", "not": {"pattern": "^_"}}, ["a", "", "a_"], ["_a"]),
    "not required": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a", "b"]}},
        [{}, {"a": 1}],
        [{"a": 1, "b": 1}],
    ),
    "an if with keywords that exclude nothing": (
        {
            "if": {
                "properties": {"a": {"uniqueItems": False, "unevaluatedItems": True, "const": 1}},
                "required": ["a"],
            },
            "then": {"required": ["b"], "properties": {"b": {"type": "integer"}}},
            "type": "object",
        },
        [{"a": 1, "b": 2}, {"a": 2}, {}],
        [{"a": 1}, {"a": 1, "b": "x"}],
    ),
    "not one of two": (
        {"not": {"anyOf": [{"type": "string"}, {"properties": {"a": {"type": "number"}}, "required": ["a"]}]}},
        [{"a": "x"}, {"b": 1}],
        ["x", {"a": 1}, 1],
    ),
    "unevaluatedProperties": (
        {
            "$defs": {"base": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
            "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"type": "string"}}}],
            "unevaluatedProperties": False,
        },
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{"a": 1, "c": 2}, {"b": "x"}, {"a": "x"}],
    ),
    "contains": (
        {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}, "maxItems": 3},
        [[5], [1, 1, 7]],
        [[], [1, 2], [1, 1, 1, 7]],
    ),
    "contains in an open array": (
        {"type": "array", "items": {"type": ["integer", "null"]}, "contains": {"minimum": 5, "type": "integer"}},
        [[5], [None, 1, 7, None, 9], [1] * 15 + [5], [5] * 40],
        [[], [None, 2], ["x", 5]],
    ),
    "contains in a longer array": (
        {"items": {"enum": [1, 2]}, "contains": {"const": 1}, "minItems": 2, "maxItems": 40},
        [[2, 1], [1] * 40, "x"],
        [[1], [2, 2], [1] * 41],
    ),
    "contains and uniqueItems of any type": (
        {
            "contains": {"type": "string"},
            "properties": {
                "b": {"contains": {"type": "string"}},
                "c": {"uniqueItems": True, "items": {"enum": ["w", "x", "y", "z"]}},
            },
        },
        [{"b": {"c": "a"}}, {"b": [1, "a"], "c": {"c": 1}}, [1, "a"], "x"],
        [{"b": [1]}, [], {"c": ["x", "x"]}],
    ),
    "contains in no array": ({"contains": {"type": "string"}, "maxItems": 0}, [1, {}], [[], ["a"]]),
    "dependencies of any type": (
        {"dependentRequired": {n: ["x"] for n in "abcde"}, "items": {"dependentRequired": {n: ["x"] for n in "abcde"}}},
        [[{"a": 1, "x": 1}], [[]], 1],
        [[{"a": 1}], {"e": 1}],
    ),
    "contains at least none": ({"type": "array", "contains": {"const": 1}, "minContains": 0}, [[], [2]], [1]),
    "contains none": (
        {"type": "array", "contains": {"const": 1}, "minContains": 0, "maxContains": 0},
        [[], [2, "x"]],
        [[1], [2, 1]],
    ),
    "contains what all items are": (
        {"type": "array", "items": {"type": "null"}, "contains": {"type": "null"}, "maxContains": 2},
        [[None], [None, None]],
        [[], [None, None, None]],
    ),
    "unknown format": ({"type": "string", "format": "cuid"}, ["x"], [1]),
    "format of names": ({"type": "string", "format": "json-pointer"}, ["", "/a~1b"], ["a", "/~2"]),
    "version of a uuid": (
        {"type": "string", "format": "uuid4"},
        ["12345678-1234-4234-8234-123456789abc"],
        ["12345678-1234-1234-8234-123456789abc", "x"],
    ),
    "look-ahead": ({"type": "string", "pattern": "^(?=.*[0-9])(?!.*x)[a-z0-9]+$"}, ["a1"], ["a", "x1"]),
    "pattern and format": (
        {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z]+\.de$"},
        ["a.b@c.de"],
        [".a@c.de", "a..b@c.de", "a@c.com"],
    ),
    "int64": (INT64, [0, 2**63 - 1, -LARGEST], [2**63, -(2**63) - 1, 1.5]),
    "uint64": ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, 2**53 + 1, LARGEST], [-1, 2**64]),
    "float32": (
        {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
        [1.5, 1e9],
        ["x"],
    ),
    "a bound between two floats": ({"type": "integer", "minimum": 2**53 + 3}, [2**53 + 4, 2**53 + 5], [2**53 + 2, 0]),
    "annotations": (
        {
            "type": "string",
            "title": "t",
            "examples": ["x"],
            "contentEncoding": "base64",
            "readOnly": True,
            "x-order": 1,
        },
        ["x"],
        [1],
    ),
    "oneOf with a discriminator that has a default": (
        {
            "$defs": {
                name: {
                    "type": "object",
                    "properties": {"kind": {"const": name, "default": name}, name: {"type": "integer"}},
                    "required": [name],
                }
                for name in ("cat", "dog")
            },
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "discriminator": {"propertyName": "kind"},
        },
        [{"kind": "cat", "cat": 1}, {"kind": "dog", "dog": 2}],
        [{"kind": "cat", "dog": 1}, {"kind": "cow", "cat": 1}, {"cat": 1, "dog": 2}],
    ),
    "oneOf of null and a reference": (
        {"$defs": {"P": POINT}, "oneOf": [{"type": "null"}, {"$ref": "#/$defs/P"}]},
        [None, {"a": 1}],
        [{}, "x", {"a": "x"}],
    ),
    "oneOf of null and the schema itself": (
        {
            "$defs": {
                "N": {
                    "type": "object",
                    "properties": {"next": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/N"}]}},
                    "required": ["next"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/N",
        },
        [{"next": None}, {"next": {"next": None}}],
        [{}, None, {"next": {}}],
    ),
    "oneOf of references within allOf and anyOf": (
        {
            "$defs": {"P": POINT, "N": {"type": ["integer", "null"]}},
            "oneOf": [
                {"allOf": [{"$ref": "#/$defs/P"}]},
                {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "boolean"}]},
                {"type": "array"},
            ],
        },
        [{"a": 1}, 1, None, True, [1]],
        [{}, "x", 1.5],
    ),
    "oneOf of listed values": (
        {"$defs": {"E": {"enum": ["a", 1]}}, "oneOf": [{"$ref": "#/$defs/E"}, {"const": "b"}, {"enum": [2, None]}]},
        ["a", 1, "b", 2, None],
        ["c", 3, False],
    ),
    "oneOf with discriminators that are numbers and booleans": (
        {
            "$defs": {
                f"{kind}": {"type": "object", "properties": {"kind": {"const": kind}, "x": {"const": f"{kind}"}}}
                for kind in (True, 1, 2.5)
            },
            "oneOf": [*({"$ref": f"#/$defs/{kind}"} for kind in (True, 1, 2.5)), {"type": "null"}],
        },
        [{"kind": True, "x": "True"}, {"kind": 1, "x": "1"}, {"kind": 2.5}, None],
        [{"kind": True, "x": "1"}, {"kind": 1, "x": "True"}, {"kind": 2}, {"x": "1"}],
    ),
    "oneOf of objects that require a property of different types": (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": {"type": kind}}, "required": ["a"]}
                for kind in ("integer", "string")
            ],
            "anyOf": [{"type": "object"}, {"type": "null"}],
        },
        [{"a": 1}, {"a": "x"}],
        [{"a": 1.5}, {}, None],
    ),
    "oneOf of parts that the schema around them completes": (
        {
            "type": "object",
            "properties": {"k": {"type": "string"}},
            "required": ["k"],
            "oneOf": [{"properties": {"k": {"const": name}}} for name in ("a", "b")],
        },
        [{"k": "a"}, {"k": "b"}],
        [{"k": "c"}, {}, "a"],
    ),
    "oneOf within allOf": (
        {
            "type": "object",
            "allOf": [{"oneOf": [{"properties": {"k": {"const": name}}, "required": ["k"]} for name in ("a", "b")]}],
        },
        [{"k": "a"}, {"k": "b"}],
        [{"k": "c"}, {}],
    ),
    "oneOf of a type and all others": (
        {"oneOf": [{"not": {"type": "string"}}, {"type": "string"}]},
        ["a", 1, None],
        [],
    ),
    "at most one of some properties": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False, "maxProperties": 1},
        [{}, {"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}, {"c": 1}],
    ),
    "as many properties as a closed object may have": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False, "maxProperties": 2},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}],
    ),
    "a maximum beside conditions": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "anyOf": [{"required": ["a"]}, {"properties": {"a": False}}],
            "maxProperties": 1,
        },
        [{}, {"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}],
    ),
    "oneOf of objects that exclude each other's property": (
        {
            "oneOf": [
                {"enum": ["a"]},
                {"anyOf": [closed_object("a"), closed_object("b", "c")]},
                closed_object("c"),
                {"type": "object", "required": ["d"]},
            ]
        },
        ["a", {"a": 1}, {"b": 1, "c": 2}, {"c": 1}, {"d": 1}, {"d": 1, "a": 1}],
        [{}, {"b": 1}, {"a": 1, "c": 1}, "b"],
    ),
    "anchors and ids": (
        {
            "$id": "https://example.com/root.json",
            "$defs": {
                "a": {"$anchor": "here", "type": "integer"},
                "b": {"$id": "other.json", "$defs": {"c": {"type": "null"}}, "$ref": "#/$defs/c"},
            },
            "type": "array",
            "prefixItems": [
                {"$ref": "#here"},
                {"$ref": "other.json"},
                {"$ref": "https://example.com/root.json#/$defs/a"},
            ],
            "items": False,
        },
        [[1, None, 2]],
        [["x"], [1, 2], [1, None, "x"]],
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_rewritten_schema_allows_what_the_original_does(name: str) -> None:
    schema, valid, invalid = SCHEMAS[name]
    validator = validator_for(schema, Draft202012Validator)(schema)
    followed = Followed.of_schema(schema)
    assert [value for value in valid if not validator.is_valid(value)] == []
    assert [value for value in valid if not followed.takes_value(value)] == []
    assert [value for value in invalid if followed.takes_value(value)] == []
    drawn = [text for text in (followed.text(seed) for seed in range(5)) if text is not None]
    assert [text for text in drawn if not validator.is_valid(json.loads(text))] == []


VALUES = st.sampled_from(
    [{"const": 1}, {"enum": [1, 2]}, {"type": "string"}, {"type": "integer"}, {"minimum": 2}, True]
)
NAMES = st.sampled_from(["a", "b", "c"])
PARTS = st.one_of(
    st.builds(lambda name, value: {"properties": {name: value}}, NAMES, VALUES),
    st.builds(lambda name, value: {"properties": {name: value}, "required": [name]}, NAMES, VALUES),
    st.builds(lambda names: {"required": names}, st.lists(NAMES, min_size=1, max_size=2, unique=True)),
)
CONDITIONS = st.recursive(
    PARTS,
    lambda inner: st.one_of(
        st.builds(lambda part: {"not": part}, inner),
        st.builds(lambda asked, then: {"if": asked, "then": then}, inner, inner),
        st.builds(lambda asked, other: {"if": asked, "else": other}, inner, inner),
        st.builds(lambda *parts: {"anyOf": list(parts)}, inner, inner),
        st.builds(lambda *parts: {"allOf": list(parts)}, inner, inner),
        st.builds(lambda name, needed: {"dependentRequired": {name: [needed]}}, NAMES, NAMES),
        st.builds(lambda name, part: {"dependentSchemas": {name: part}}, NAMES, inner),
    ),
    max_leaves=3,
)
ANY: list[Any] = [None, 1, 2, 3, "x"]
"""Values of a property; None: the property is missing."""


@settings(max_examples=40)
@given(CONDITIONS, st.booleans())
def test_conditions_hold_for_exactly_the_same_objects(condition: dict[str, Any], is_open: bool) -> None:
    schema = {"type": "object", "properties": {name: {"type": ["integer", "string"]} for name in "abc"}, **condition}
    if "properties" in condition:
        schema = {"type": "object", "properties": {name: {"type": ["integer", "string"]} for name in "abc"}}
        schema["allOf"] = [condition]
    schema["additionalProperties"] = is_open
    validator = Draft202012Validator(schema)
    objects = [
        {name: value for name, value in zip("abc", values, strict=True) if value is not None}
        for values in itertools.product(ANY[:4], ANY[::2], (None, 1, "x"))
    ]
    try:
        followed = Followed.of_schema(schema)
    except GrammarError as error:
        impossible = "matches no text" in str(error) or "Unsatisfiable" in str(error)
        possible = [value for value in objects if validator.is_valid(value)]
        if (impossible and not possible) or "integer has no opposite" in str(error):
            return
        raise
    wrong = [value for value in objects if followed.takes_value(value) != validator.is_valid(value)]
    assert wrong == []
