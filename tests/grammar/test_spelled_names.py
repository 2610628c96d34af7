"""A name of a property cannot escape its schema by another spelling, such as `"\\u0061"` for `"a"`."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.grammar.grammar import MAX_SOURCE_BYTES, GrammarError
from specdec.grammar.json_schema.rewriting import json_text, supported
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


@pytest.mark.parametrize("pattern", ["^x", "^(?=x)x"])
def test_a_control_character_in_a_closed_schema(pattern: str) -> None:
    """It is refused only where a pattern matches the name: the pattern would allow its other spellings."""

    def schema(name: str) -> dict[str, Any]:
        patterns = {"patternProperties": {pattern: STRING}, "additionalProperties": False}
        return {"properties": {"b/": {"type": "object", "properties": {name: {"const": "safe"}}, **patterns}}}

    grammar = Followed.of_schema(schema("a\n"))
    assert grammar.takes('{"b/": {"a\\n": "safe", "x": "y"}}')
    assert not grammar.takes('{"b/": {"a\\u000a": "evil"}}')
    with pytest.raises(GrammarError, match=r'^/properties/b~1: the property "x\\n" cannot be .* let no pattern match'):
        supported(schema("x\n"))


def objects(number: int) -> dict[str, Any]:
    """Return a cycle of definitions, each with two properties."""
    names = [f"definition_{n}" for n in range(number)]
    return {
        name: {
            "type": "object",
            "properties": {f"number_of_{name}": INTEGER, f"next_after_{name}": {"$ref": f"#/$defs/{after}"}},
            "required": [f"number_of_{name}"],
        }
        for name, after in zip(names, [*names[1:], names[0]], strict=True)
    }


def chain(number: int) -> dict[str, Any]:
    """Return a chain of definitions: each one extends the next."""
    first = {"type": "object", "properties": {"end": INTEGER}}
    return {f"d{number}": first} | {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}], "properties": {f"p{n}": {"$ref": "#/$defs/d0"}}}
        for n in range(number)
    }


def variants(number: int) -> dict[str, Any]:
    """Return a union of definitions that extend one definition."""
    return {
        "d0": {"anyOf": [{"allOf": [{"$ref": "#/$defs/base"}, {"required": [f"p{n}"]}]} for n in range(number)]},
        "base": {"type": "object", "properties": {f"p{n}": {"$ref": "#/$defs/d0"} for n in range(number)}},
    }


@pytest.mark.parametrize("definitions", [objects(620), chain(140), variants(100)], ids=["objects", "chain", "variants"])
def test_large_schemas_fit(definitions: dict[str, Any]) -> None:
    first = next(iter(definitions)) if "d0" not in definitions else "d0"
    schema = {"$defs": definitions, "$ref": f"#/$defs/{first}"}
    assert len(json_text(supported(schema))) <= MAX_SOURCE_BYTES


def test_a_definition_that_is_its_own_alternative() -> None:
    """Each definition has the names of the other."""
    definitions = {
        "A": {"anyOf": [{"$ref": "#/$defs/B"}, {"type": "object", "properties": {"a": INTEGER}}]},
        "B": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]},
    }
    for name in definitions:
        grammar = Followed.of_schema({"$defs": definitions, "items": {"$ref": f"#/$defs/{name}"}})
        assert grammar.takes('[{"a": 1, "b": "x"}, null]')
        assert not grammar.takes('[{"\\u0061": "x"}]')


def test_a_pattern_is_not_narrowed_because_others_spent_the_work() -> None:
    """Only a pattern that is too large by itself excludes names outside it."""

    def schema(number: int) -> dict[str, Any]:
        inner = {
            f"p{n}": {"type": "object", "patternProperties": {f"^(?:[a-z]_{n}){{1,12}}$": INTEGER}}
            for n in range(number)
        }
        return {"type": "object", "properties": inner}

    grammar = Followed.of_schema(schema(3))
    assert grammar.takes('{"p0": {"a_0": 1, "b": "x"}, "p2": {"a_2": 1, "b": "x"}}')
    with pytest.raises(
        GrammarError, match=r"^/properties/p\d+/patternProperties: cannot be enforced: it makes the request's"
    ):
        supported(schema(300))


def test_a_closed_schema_stays_as_it_is() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False}
    assert supported(schema) == schema
