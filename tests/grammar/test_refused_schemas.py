"""Schemas without an equivalent for llguidance are refused, naming the place. Invalid or large ones end in time."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.grammar.grammar import GrammarError, Kind
from specdec.grammar.json_schema.arrays import MAX_UNIQUE
from specdec.grammar.json_schema.rewriting import MAX_COMBINATIONS, MAX_TOLD_CHARACTERS, supported, supported_source
from tests.grammar.followed import Followed

CHAINED = {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(60)} | {"60": {"pattern": "^a"}}
"""Definitions that each refer to the next."""


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (
            {"properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}},
            f"/properties/a/uniqueItems: cannot be enforced: items must be an enum of at most {MAX_UNIQUE} values",
        ),
        (
            {"items": {"contains": {"const": 1}, "maxContains": 2}},
            "/items/contains: cannot be enforced with this minContains or maxContains",
        ),
        ({"anyOf": [{"pattern": "(?<=a)b"}]}, "/anyOf/0/pattern: cannot be enforced: it uses look-behind"),
        ({"not": {"items": {"type": "string"}}}, "/not/items: cannot be enforced within not or if"),
        ({"not": {"type": "integer"}}, "/not/type: cannot be enforced within not or if: integer has no opposite"),
        ({"if": {"oneOf": []}, "then": {}}, "/if/oneOf: cannot be enforced within not or if"),
        ({"not": {"if": {}, "then": {"oneOf": []}}}, "/not/then/oneOf: cannot be enforced within not or if"),
        (
            {"not": {"prefixItems": [{}, {"oneOf": []}]}},
            "/not/prefixItems/1/oneOf: cannot be enforced",
        ),
        (
            {
                "type": "object",
                "required": ["a"],
                "allOf": [
                    {"if": {"properties": {"a": {"const": "x"}}}, "then": {"not": {"oneOf": []}}},
                    {"if": {"properties": {"a": {"const": "y"}}}, "then": {}},
                ],
            },
            "/allOf/0/then/not/oneOf: cannot be enforced within not or if",
        ),
        (
            {"propertyNames": {"$ref": "#/$defs/0"}, "$defs": CHAINED},
            "/$ref: cannot be enforced: has more than 50 nested negations and references, or one refers to itself",
        ),
        ({"oneOf": [{"type": "object"}, {"$ref": "#/x"}]}, "/oneOf/1/$ref: #/x is not in the schema"),
        ({"minProperties": 2, "allOf": [{"$ref": "#/x"}]}, "/allOf/0/$ref: #/x is not in the schema"),
        ({"$ref": "https://example.com/x.json"}, "/$ref: https://example.com/x.json is not in the schema"),
        ({"$dynamicRef": "#node"}, "/$dynamicRef: cannot be enforced: use $ref"),
        ({"const": 2**53 + 1}, "/const: cannot be enforced: 9007199254740993 has more digits than a 64-bit float"),
        ({"minimum": 2**70}, "/minimum: cannot be enforced: must be between"),
        ({"properties": {"a/b": 5}}, "/properties/a~1b: must be an object, true or false"),
        ({"properties": {"a": {"type": "strng"}}}, '/properties/a/type: is "strng", must be one of array, boolean'),
        ({"items": {"type": ["string", 5]}}, "/items/type: must be one of array, boolean"),
        ({"properties": ["a"]}, "/properties: must be an object"),
        ({"anyOf": [{"required": "a"}]}, '/anyOf/0/required: is "a", must be a list of names'),
        ({"properties": {"a": {"enum": "b"}}}, '/properties/a/enum: is "b", must be a list'),
        ({"properties": {"a": {"minimum": "5"}}}, '/properties/a/minimum: is "5", must be a number'),
        ({"properties": {"a": {"maxLength": -1}}}, "/properties/a/maxLength: must be a whole number from 0 to"),
        ({"items": {"minLength": 1.5}}, "/items/minLength: must be a whole number from 0 to"),
        ({"type": "string", "minLength": 1e30}, "/minLength: must be a whole number from 0 to"),
        ({"not": {"minLength": 1.5}}, "/not/minLength: must be a whole number from 0 to"),
        (
            {"items": {"properties": {"a": {}, "b": {}}, "required": ["a"], "maxProperties": 2}},
            '/items/maxProperties: cannot be enforced: the property "b" is optional',
        ),
        ({"items": {"multipleOf": 0}}, "/items/multipleOf: must be a number above 0"),
        ({"items": {"pattern": "("}}, "/items/pattern: cannot be enforced: it lacks a closing parenthesis"),
        ({"items": {"pattern": "*.txt"}}, "/items/pattern: cannot be enforced: it repeats nothing"),
        ({"anyOf": [{"pattern": "[z-a]"}]}, "/anyOf/0/pattern: cannot be enforced: it has an invalid range"),
        ({"patternProperties": {"a{2,1}": {}}}, "/patternProperties/a{2,1}: cannot be enforced: it has a maximum"),
        ({"$defs": {"a": {"pattern": 5}}, "items": {"$ref": "#/$defs/a"}}, "/$defs/a/pattern: must be text"),
        ({"propertyNames": {"format": "email"}}, "/propertyNames/format: cannot be enforced for names: use pattern"),
        (
            {"anyOf": [{"properties": {"a": {}}}, {}], "unevaluatedProperties": False},
            "/unevaluatedProperties: cannot be enforced beside alternatives",
        ),
        (
            {"dependentRequired": {name: ["z"] for name in "abcdef"}},
            f"/: has conditions that make more than {MAX_COMBINATIONS} combinations",
        ),
        ({"not": {}}, "matches no text"),
        (
            json.loads('{"properties": {"a long name of a property": ' * 30 + '{"not": {"const": []}}' + "}}" * 30),
            " ... ",
        ),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_what_has_no_equivalent_is_refused_with_its_place(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(GrammarError) as raised:
        supported(schema)
    assert problem in str(raised.value)
    assert len(str(raised.value)) <= MAX_TOLD_CHARACTERS + len(" ... ")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "required": True, "minimum": "1"},  # `required` as in draft 3, beside a field's type
        {"type": ["array", "null"], "properties": ["a"], "pattern": 5, "multipleOf": "2"},
    ],
    ids=json.dumps,
)
def test_a_keyword_without_effect_on_the_type_may_have_any_value(schema: dict[str, Any]) -> None:
    supported(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5, "properties": 5, "required": 5, "enum": 5, "allOf": 5, "pattern": 5, "format": 5},
        {"patternProperties": [], "dependencies": 5, "dependentRequired": {"a": 5}, "items": 5},
        {"minimum": "5", "maxItems": True, "prefixItems": {}, "contains": 5, "$ref": 5},
        {"propertyNames": 5, "unevaluatedProperties": 5, "not": 5},
        {"if": 5, "then": 5},
        {"type": "string", "contains": {"const": 1}, "maxItems": float("nan")},
        {"type": "object", "allOf": ["an if", 5]},
        {"$id": 5, "$anchor": 5, "$ref": "#x"},
        {"$id": "http://[", "$ref": "http://["},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "not": {"$ref": "#/$defs/a"}},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "propertyNames": {"$ref": "#/$defs/a"}},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "items": {"$ref": "#/$defs/a"}, "uniqueItems": True},
        {"enum": ["\ud800"], "minimum": float("nan"), "maximum": float("inf")},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_schemas_that_make_no_sense_break_nothing(schema: dict[str, Any]) -> None:
    with contextlib.suppress(GrammarError):
        supported_source(json.dumps(schema))[0].encode()


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"if": {"properties": {f"p{n}": {"const": n}}}, "then": {"required": ["x"]}} for n in range(500)]},
        {"not": {"anyOf": [{"enum": [f"{n}x{m}" for m in range(50)]} for n in range(100)]}},
        {"$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)} | {"d40": {}}}
        | {"not": {"$ref": "#/$defs/d0"}},
        {"$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(2000)} | {"d2000": {}}, "$ref": "#/$defs/d0"},
        {"allOf": [{"pattern": f"^(?!{n}(a|b)*a(a|b){{9}}$)"} for n in range(200)]},
        {"not": {"enum": [f"value {n}" for n in range(5000)]}},
        {"propertyNames": {"pattern": "^a", "enum": [f"value {n}" for n in range(5000)]}},
        {"oneOf": [{"type": "object", "properties": {f"p{n}": {} for n in range(99)}} for _ in range(99)]},
    ],
    ids=["ifs", "values", "doubling", "chain", "patterns", "not an enum", "names", "parts"],
)
def test_large_schemas_end_in_time(schema: dict[str, Any]) -> None:
    with contextlib.suppress(GrammarError):
        supported_source(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
        {"oneOf": [{"const": 1}, {"enum": [1.0, "a"]}]},
        {"$defs": {"P": {"type": "object"}}, "oneOf": [{"$ref": "#/$defs/P"}, {"required": ["a"]}]},
        {"$defs": {"a": {"oneOf": [{"$ref": "#/$defs/a"}, {}]}}, "$ref": "#/$defs/a"},
        {  # a part without the discriminator, which would be lost if that became required
            "oneOf": [
                {"type": "object", "properties": {"kind": {"const": "a"}}},
                {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False},
            ]
        },
    ],
)
def test_parts_that_may_share_a_value_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="oneOf"):
        Followed.of_schema(schema)


def test_parts_that_share_a_value_may_be_coerced() -> None:
    schema = {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert Followed.of_schema(schema).takes_value(1)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, ["ab", "abc"], ["a", "abcd"]),
        ({"type": "string", "pattern": r"^[\w-.]+$"}, ["a-b.c"], ["a,b"]),
        ({"type": "string", "not": {"minLength": 2.0}}, ["a"], ["ab"]),
        ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, [[1], [1, 2]], [[], [1, 2, 3]]),
        ({"type": "array", "contains": True, "minContains": 2.0, "maxContains": 2.0}, [[1, 2]], [[1], [1, 2, 3]]),
        ({"type": "object", "maxProperties": 1.0, "minProperties": 1.0}, [{"a": 1}], [{}, {"a": 1, "b": 2}]),
        ({"type": "object", "propertyNames": {"minLength": 2.0}}, [{"ab": 1}], [{"a": 1}]),
    ],
    ids=json.dumps,
)
def test_a_size_may_be_written_with_a_fraction(schema: dict[str, Any], valid: list[Any], invalid: list[Any]) -> None:
    """JSON Schema counts 2.0 as a whole number."""
    followed = Followed.of_schema(schema)
    assert [value for value in valid if not followed.takes_value(value)] == []
    assert [value for value in invalid if followed.takes_value(value)] == []


LENIENT = {"x-guidance": {"lenient": True}}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ["[1, 1]"], ['["a"]']),
        ({"type": "object", "properties": {"a": {"not": {"const": 1}}}, "minProperties": 2}, ["{}"], ['{"a": 1}']),
        ({"type": "string", "pattern": "^(?!a)b?$"}, ['"b"', '""'], ['"a"']),
        ({"type": "integer", "maximum": 2**70}, ["1"], ['"a"']),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, ["{}"], ['{"\\u0061": "x"}']),
        ({"type": "array", "contains": {"const": 1}, "maxContains": 1}, ["[1, 1]", "[]"], ["1"]),  # as it is
    ],
    ids=json.dumps,
)
def test_a_lenient_schema_is_enforced_where_it_can_be(
    schema: dict[str, Any], valid: list[str], invalid: list[str]
) -> None:
    source, check = supported_source(json.dumps({**schema, **LENIENT}), checks=True)
    assert check is None
    for followed in (Followed(Kind.JSON_SCHEMA, source), Followed.of_schema({**schema, **LENIENT})):
        assert [text for text in valid if not followed.takes(text)] == []
        assert [text for text in invalid if followed.takes(text)] == []


def test_a_lenient_schema_without_an_equivalent_is_left_alone() -> None:
    schema = {**LENIENT, "type": "array", "contains": {"const": 1}, "maxContains": 1}
    assert supported(schema) == schema


KEYWORDS = st.sampled_from(
    [
        *("$anchor", "$defs", "$id", "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const"),
        *("contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "enum", "exclusiveMaximum"),
        *("exclusiveMinimum", "format", "if", "items", "maxContains", "maxItems", "maxLength", "maxProperties"),
        *("maximum", "minContains", "minItems", "minLength", "minProperties", "minimum", "not", "oneOf", "pattern"),
        *("patternProperties", "prefixItems", "properties", "propertyNames", "required", "then", "type"),
        *("unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    ]
)
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from([0, 1, 5, -1, 2**53 + 1, 10**400, 1.5, float("inf"), float("nan")]),
        st.sampled_from(
            ["", "a", "#", "#/$defs/a", "#/not", "#a", "object", "string", "integer", "email", "^(?!a)b$", "("]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(KEYWORDS, st.sampled_from("ab")), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(KEYWORDS, JSON, max_size=6))
def test_nothing_but_a_refusal_is_raised(schema: dict[str, Any]) -> None:
    with contextlib.suppress(GrammarError):
        supported(schema)
