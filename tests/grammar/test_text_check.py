"""The check of finished texts for what no grammar enforces, against jsonschema."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from pydantic import BaseModel, TypeAdapter

from specdec.grammar.grammar import GrammarError, Kind
from specdec.grammar.json_schema.rewriting import supported, supported_source
from specdec.grammar.json_schema.text_check import (
    ITEM_WORK,
    MAX_CHARACTERS,
    MAX_WORK,
    VISIT_WORK,
    TextCheck,
    TextVerdict,
)
from tests.grammar.followed import Followed

SET: dict[str, Any] = {
    "type": "array",
    "items": {"type": ["string", "number", "boolean", "object"]},
    "uniqueItems": True,
}

DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def check_of(schema: dict[str, Any]) -> TextCheck:
    _, check = supported_source(json.dumps(schema), checks=True)
    assert check is not None
    return check


def test_a_long_name_is_not_copied_for_each_item() -> None:
    check = check_of({"additionalProperties": {"type": "array", "items": SET}})
    text = json.dumps({"x" * 50_000: [[]] * 4_000})
    tracemalloc.start()
    try:
        assert check.of_text(text).ok is True
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("schema", "value", "path"),
    [
        (SET, ["a", "b", "a"], "/2"),
        (SET, [1, True, "1", {"a": 1, "b": 2}], ""),
        (SET, [1, 1.0], "/1"),
        (SET, [{"a": 1, "b": 2}, {"b": 2, "a": 1.0}], "/1"),
        ({"properties": {"a/b": SET}}, {"a/b": [1, 1], "b": [1, 1]}, "/a~1b/1"),
        ({"properties": {"a": True}, "additionalProperties": SET}, {"a": [1, 1], "b": [1, 1]}, "/b/1"),
        ({"prefixItems": [True, SET], "items": {"items": SET}}, [[1, 1], [1], [[1], [2, 2]]], "/2/1/1"),
        ({"$schema": DRAFT_7, "items": [SET], "additionalItems": {}}, [[1, 1]], "/0/1"),
        ({"anyOf": [SET, {"type": "null"}, {"type": "object", "properties": {"a": SET}}]}, {"a": [1, 1]}, "/a/1"),
        ({"$defs": {"s": SET}, "allOf": [{"items": {"$ref": "#/$defs/s"}}]}, [[1, 1]], "/0/1"),
        ({"$ref": "#/$defs/t", "$defs": {"t": SET | {"items": {"$ref": "#/$defs/t"}}}}, [[], [[], [[]], [[]]]], "/1/2"),
    ],
)
def test_the_place_of_what_is_repeated(schema: dict[str, Any], value: Any, path: str) -> None:
    assert check_of(schema).of_text(json.dumps(value)) == TextVerdict(not path, path, path and "uniqueItems")
    assert validator_for(schema, Draft202012Validator)(schema).is_valid(value) == (not path)


LEAVES = st.sampled_from([{"type": "integer"}, {"type": "string"}, True])
NAMES = st.sampled_from(["a", "b"])
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "uniqueItems": True}, inner),
        st.builds(lambda items, first: {"type": "array", "prefixItems": [first], "items": items}, inner, inner),
        st.builds(lambda name, part: {"type": "object", "properties": {name: part}}, NAMES, inner),
        st.builds(lambda part: {"type": "object", "additionalProperties": part}, inner),
        st.builds(lambda part: {"anyOf": [part, {"type": "null"}]}, inner),
        st.builds(lambda *parts: {"allOf": list(parts)}, inner, inner),
        st.builds(lambda *parts: {"anyOf": list(parts)}, inner, inner),
    ),
    max_leaves=4,
)
VALUES = st.recursive(
    st.sampled_from([0, 1, 1.0, "x", None, True]),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=2)),
    max_leaves=6,
)


def without(schema: Any) -> Any:
    """Return the part of a schema that the grammar enforces."""
    if isinstance(schema, dict):
        return {key: without(part) for key, part in schema.items() if key != "uniqueItems"}
    return [without(part) for part in schema] if isinstance(schema, list) else schema


@settings(max_examples=200, deadline=None)
@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=8))
def test_a_text_is_valid_if_the_check_says_so(schema: Any, values: list[Any]) -> None:
    assume(isinstance(schema, dict))
    try:
        _, check = supported_source(json.dumps(schema), checks=True)
    except GrammarError as error:
        if "decide whether it applies" not in str(error):  # alternatives of one type
            raise
        return
    validator, enforced = Draft202012Validator(schema), Draft202012Validator(without(schema))
    for value in filter(enforced.is_valid, values):
        assert (True if check is None else check.of_text(json.dumps(value)).ok) == validator.is_valid(value)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [SET, {"type": "array", "items": {"type": "integer"}}]},
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": 1}, "a": SET}},
                {"type": "object", "properties": {"k": {"const": 2}}},
            ]
        },
        {"if": {"required": ["a"]}, "then": {"properties": {"b": SET}}},
        {
            "$defs": {"s": SET},
            "properties": {"a": {"$ref": "#/$defs/s"}},
            "patternProperties": {"^x": {"$ref": "#/$defs/s"}},
        },
        {"patternProperties": {"^x": True}, "additionalProperties": SET},
        {"dependentSchemas": {"a": {"properties": {"b": SET}}}},
    ],
    ids=lambda schema: next(iter(schema)),
)
def test_what_depends_on_other_keywords_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match=r"/uniqueItems: cannot be enforced: alternatives other than types decide"):
        supported_source(json.dumps(schema), checks=True)
    with pytest.raises(GrammarError, match=r"/uniqueItems: cannot be enforced: items must be an enum"):
        supported(schema)


def test_what_is_no_whole_value_or_too_large_is_not_judged() -> None:
    check = check_of({"items": SET})
    assert check.of_text('[["a", "a"]').ok is None
    assert check.of_text("[" * 100_000).ok is None
    assert check.of_text(json.dumps([[]] * (MAX_WORK // VISIT_WORK - 2))).ok is True
    assert check.of_text(json.dumps([[]] * (MAX_WORK // VISIT_WORK))).ok is None
    assert check.of_text(json.dumps([list(range(MAX_WORK // (ITEM_WORK + 6)))])).ok is True
    assert check.of_text(json.dumps([list(range(MAX_WORK // ITEM_WORK))])).ok is None
    assert check.of_text(json.dumps([["x" * MAX_CHARACTERS]])).ok is None


def test_an_enforced_schema_needs_no_check() -> None:
    for schema in ({"items": {"enum": ["a", "b"]}, "uniqueItems": True}, {"uniqueItems": True, "maxItems": 1}, {}):
        assert supported_source(json.dumps(schema), checks=True)[1] is None


def test_a_repeated_name_counts_once() -> None:
    schema = {"properties": {"m": {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}}}}
    check = check_of(schema)
    assert check.of_text('{"m": {"x": 1, "x": 2}}') == TextVerdict(False, "/m", "minProperties")
    assert check.of_text('{"m": {"x": 1, "y": 2}}') == TextVerdict(True)
    assert not Followed.of_schema({"minProperties": 1}).takes("{}")
    for negated in (schema, {"not": {"properties": {"m": {"maxProperties": 1}}}}):
        with pytest.raises(GrammarError, match="a name may be repeated"):
            supported(negated)


@pytest.mark.parametrize(
    "schema",
    [
        {"minProperties": 1},
        {"minProperties": 2, "properties": {"a": True}, "required": ["a"]},
        {"minProperties": 2, "patternProperties": {"^x": True}, "required": ["a"]},
        {"minProperties": 2, "properties": {"a": True, "b": True, "c": True}, "required": ["a", "b"]},
        {
            "minProperties": 2,
            "properties": {"a": True, "b": True},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        {
            "minProperties": 2,
            "allOf": [{"required": ["a"]}, {"$ref": "#/$defs/b"}],
            "$defs": {"b": {"required": ["b"]}},
        },
        {"minProperties": 2, "$id": "http://x/y/", "$ref": "z", "$defs": {"z": {"$id": "z", "required": ["a", "b"]}}},
        {"type": "object", "minProperties": 0, "properties": {"a": True}},
    ],
)
def test_names_that_cannot_repeat_need_no_check(schema: dict[str, Any]) -> None:
    source, check = supported_source(json.dumps(schema), checks=True)
    grammar = Followed(Kind.JSON_SCHEMA, source)
    validator = Draft202012Validator(schema)
    assert check is None
    for text in ('{"a": 1, "b": 2}', '{"a": 1}', '{"a": 1, "a": 1}', '{"a": 1, "\\u0061": 2}', "{}"):
        assert validator.is_valid(json.loads(text)) or not grammar.takes(text)
    assert grammar.takes('{"a": 1, "b": 2}')


@pytest.mark.parametrize(
    ("schema", "short", "enough"),
    [
        ({"required": ["a"], "minProperties": 2}, '{"a": 1, "\\u0061": 2}', '{"a": 1, "b": 2}'),
        ({"required": ["\n"], "properties": {"b": True}, "minProperties": 2}, '{"\\n": 1}', '{"b": 2, "\\n": 1}'),
        ({"properties": {"a": True, "b": True}, "minProperties": 1}, "{}", '{"b": 1}'),
        (
            {"properties": {"a": True, "b": True}, "minProperties": 2, "additionalProperties": False},
            '{"b": 1}',
            '{"a": 1, "b": 1}',
        ),
    ],
)
def test_names_that_repeat_or_are_optional_are_checked(schema: dict[str, Any], short: str, enough: str) -> None:
    source, check = supported_source(json.dumps(schema), checks=True)
    assert check is not None
    assert check.of_text(short) == TextVerdict(False, "", "minProperties")
    assert check.of_text(enough) == TextVerdict(True)
    assert Followed(Kind.JSON_SCHEMA, source).takes(enough)
    with pytest.raises(GrammarError, match=r"/minProperties: .* list [12] required properties"):
        supported(schema)


@pytest.mark.parametrize("kind", ["string", "array"])
def test_keywords_of_objects_do_not_apply_to_other_types(kind: str) -> None:
    schema = {"type": kind, "minProperties": 3, "required": [[1]], "properties": {"a": True}}
    source, check = supported_source(json.dumps({"items": schema}), checks=True)
    assert check is None
    assert Followed(Kind.JSON_SCHEMA, source).takes_value([[], []] if kind == "array" else ["x"])


class Page(BaseModel):
    tags: set[str]
    links: dict[str, frozenset[int]] | None = None
    pages: list[Page] = []


def test_sets_of_pydantic() -> None:
    check = check_of(TypeAdapter(Page).json_schema())
    good = Page(tags={"a", "b"}, links={"x": frozenset([1, 2])}, pages=[Page(tags=set())])
    assert check.of_text(good.model_dump_json()).ok is True
    bad = {"tags": [], "links": {"x": [1, 2]}, "pages": [{"tags": ["a"], "links": {"y": [3, 3]}}]}
    assert check.of_text(json.dumps(bad)) == TextVerdict(False, "/pages/0/links/y/1", "uniqueItems")
