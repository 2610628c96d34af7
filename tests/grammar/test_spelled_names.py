"""A name of a property cannot escape its schema by another spelling, such as `"\\u0061"` for `"a"`."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.grammar.grammar import GrammarError
from specdec.grammar.json_schema.rewriting import supported
from tests.grammar.followed import Followed

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
NODE = {
    "type": "object",
    "properties": {"v": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
}
KINDS = [
    {"type": "object", "properties": {"k": {"const": kind}, "x": inner}, "required": ["k"]}
    for kind, inner in (("a", INTEGER), ("b", STRING))
]

CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "properties": (
        {"type": "object", "properties": {"kind": {"const": "safe"}}, "required": ["kind"]},
        ['{"kind": "safe"}', '{"kind": "safe", "kinds": 1, "\\n": 2, "é": 3}'],
        ['{"kind": "safe", "\\u006bind": "evil"}', '{"kind": "safe", "\\u006Bind": "evil"}'],
    ),
    "quotes, a backslash and an emoji": (
        {"type": "object", "properties": {'a"\\/': INTEGER, "é🙂": INTEGER}},
        ['{"a\\"\\\\/": 1, "é🙂": 1}'],
        ['{"a\\u0022\\\\/": "x"}', '{"a\\"\\\\\\/": "x"}', '{"\\u00e9🙂": "x"}', '{"é\\ud83d\\ude42": "x"}'],
    ),
    "a schema of additional properties": (
        {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": STRING},
        ['{"a": 1, "b": "x"}', '{"b": "x"}'],
        ['{"\\u0061": "x"}', '{"b": 1}', '{"a": "x"}'],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x": INTEGER}},
        ['{"x": 1, "y": "s"}', '{"y": "s", "x": 1}'],
        ['{"\\u0078": "s"}', '{"x": "s"}'],
    ),
    "patternProperties and properties": (
        {
            "type": "object",
            "properties": {"a": INTEGER},
            "patternProperties": {"^x": STRING},
            "additionalProperties": {"type": "null"},
        },
        ['{"a": 1, "x": "x", "y": null}'],
        ['{"\\u0061": null}', '{"\\u0078": null}', '{"b": 1}'],
    ),
    "a pattern without a complement": (
        {"type": "object", "patternProperties": {"^[a-z]{1,64}$": INTEGER}, "required": ["id"]},
        ['{"id": 1, "x": 1}'],
        ['{"id": 1, "\\u0061": "x"}', '{"id": "x"}'],
    ),
    "a pattern of any name": (
        {"type": "object", "patternProperties": {"": INTEGER}},
        ['{"a": 1}'],
        ['{"\\u0061": ""}'],
    ),
    "not required": ({"not": {"required": ["a"]}}, ['{"b": 1}'], ['{"\\u0061": 1}', '{"a": 1}']),
    "a nested not": (
        {"type": "object", "properties": {"a": {"not": {"required": ["x"]}}}},
        ['{"a": {"y": 1}}'],
        ['{"a": {"\\u0078": 1}}'],
    ),
    "dependentRequired": (
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        ['{"a": 1, "b": 1}', '{"c": 1}'],
        ['{"\\u0061": 1}', '{"a": 1}'],
    ),
    "items": ({"type": "array", "items": {"properties": {"a": INTEGER}}}, ['[{"a": 1}, 1]'], ['[{"\\u0061": "x"}]']),
    "alternatives beside properties": (
        {
            "type": "object",
            "properties": {"a": INTEGER},
            "anyOf": [{"required": ["a"]}, {"properties": {"b": STRING}, "required": ["b"]}, True],
        },
        ['{"a": 1, "c": 1}', '{"b": "x"}'],
        ['{"\\u0061": "x"}', '{"a": 1, "\\u0061": 1}'],
    ),
    "oneOf": ({"oneOf": KINDS}, ['{"k": "b", "x": "s", "y": 1}'], ['{"k": "a", "\\u0078": "x"}']),
    "allOf of patterns and names": (
        {"type": "object", "allOf": [{"patternProperties": {"^x": INTEGER}}, {"properties": {"a": INTEGER}}]},
        ['{"a": 1, "x": 1, "y": "s"}'],
        ['{"\\u0061": "x"}', '{"\\u0078": "x"}'],
    ),
    "a cycle of definitions": (
        {"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"},
        ['{"v": 1, "next": {"v": 2, "next": null}}', '{"w": 1}'],
        ['{"v": 1, "next": {"\\u0076": "x"}}', '{"\\u0076": "x"}'],
    ),
    "a cycle that begins beside another schema": (
        {"$defs": {"Node": NODE}, "allOf": [{"$ref": "#/$defs/Node"}, {"required": ["v"]}]},
        ['{"v": 1, "next": {"v": 2, "next": null}}', '{"v": 1, "w": 1}'],
        ['{"v": 1, "next": {"\\u0076": "x"}}', '{"v": 1, "\\u0076": "x"}'],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_name_has_one_spelling(name: str) -> None:
    schema, valid, invalid = CASES[name]
    grammar = Followed.of_schema(schema)
    assert [text for text in valid if not grammar.takes(text)] == []
    assert [text for text in invalid if grammar.takes(text)] == []


def test_a_control_character_has_several_spellings() -> None:
    """`"\\n"` and `"\\u000a"`, even in names that match a pattern."""
    schema = {"type": "object", "properties": {"a\n": INTEGER}}
    with pytest.raises(GrammarError, match="cannot be enforced beside others"):
        supported(schema)
    grammar = Followed.of_schema(schema | {"additionalProperties": False})
    assert grammar.takes('{"a\\n": 1}')
    assert not grammar.takes('{"a\\u000a": "x"}')


def test_a_closed_schema_stays_as_it_is() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False}
    assert supported(schema) == schema
