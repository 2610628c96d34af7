"""Structural tags: text is free except in its tags, which fit their schemas."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from specdec.grammar.grammar import Kind, source_violation
from specdec.openai_api.errors import ApiError
from specdec.openai_api.requests import parse_fields
from specdec.openai_api.structural_tags import tags_in_lark
from tests.grammar.followed import Followed

CITY = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Rome"]}}, "required": ["city"]}
TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=weather>", "schema": {**CITY, "additionalProperties": False}, "end": "</function>"},
        {"begin": "<function=time>", "schema": {"type": "integer"}, "end": "</function>"},
        {"begin": "[[", "schema": {"type": "null"}, "end": "]]"},
    ],
    "triggers": ["<function=", "[["],
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("", True),
        ("free text,\n with <b> and <function", True),
        ('<function=weather>{"city": "Bonn"}</function>', True),
        ('before <function=weather>{"city":"Rome"}</function> between [[null]] after', True),
        ("<function=time>5</function><function=time>6</function>", True),
        ('<function=weather>{"city": "Oslo"}</function>', False),
        ("<function=time>5", False),
        ("<function=other>5</function>", False),
        ("<function=time>null</function>", False),
        ("text [[5]]", False),
        ("text [[", False),
    ],
)
def test_which_texts_fit(text: str, fits: bool) -> None:
    assert Followed(Kind.LARK, tags_in_lark(TAGS, "tags")).takes(text) is fits


def test_they_are_one_grammar_under_every_name() -> None:
    def grammar(**fields: Any) -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        return parse_fields(body, chat=True).message(0).grammar.lark

    want = tags_in_lark(TAGS, "tags")
    assert grammar(response_format=TAGS) == want
    assert grammar(structured_outputs={"structural_tag": json.dumps(TAGS)}) == want
    assert grammar(structured_outputs={"structural_tag": TAGS}) == want


@pytest.mark.parametrize(
    ("tags", "field", "problem"),
    [
        ({"triggers": ["<"] * 513}, "tags.triggers", "has 513 entries, must have at most 512"),
        ({"triggers": ["<" * 1025]}, "tags.triggers", "at most 1024 characters"),
        ({"structures": TAGS["structures"] * 171}, "tags.structures", "has 513 entries"),
        ({"structures": TAGS["structures"] * 170}, "tags.structures", "at most 509 with 2 triggers"),
        (
            {"structures": [{"begin": "[[" + "x" * 1023, "schema": {}, "end": ""}]},
            "tags.structures[0].begin",
            "has 1025 characters",
        ),
    ],
)
def test_their_number_and_length_are_bounded(tags: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(ApiError, match=re.escape(problem)) as raised:
        tags_in_lark({**TAGS, **tags}, "tags")
    assert raised.value.param == field


@pytest.mark.parametrize(("triggers", "most"), [(1, 510), (340, 340)])
def test_as_many_structures_as_a_grammar_has_room_for(triggers: int, most: int) -> None:
    def in_lark(number: int) -> str:
        begun = [f"<{index % triggers}>" for index in range(number)]
        structures = [{"begin": begin, "schema": {}, "end": ""} for begin in begun]
        return tags_in_lark({"structures": structures, "triggers": begun[:triggers]}, "tags")

    assert source_violation(Kind.LARK, (in_lark(most),)) is None
    with pytest.raises(ApiError, match=f"has {most + 1} entries"):
        in_lark(most + 1)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, ['{"a": 1}'], ['{"\\u0061": "x"}']),
        ({"type": "string", "not": {"const": "a"}}, ['"b"'], ['"a"']),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, ["[2, 1]"], ["[1, 1]"]),
        ({"type": "array", "contains": {"const": 1}, "maxItems": 2}, ["[0, 1]"], ["[0]"]),
        ({"type": "string", "format": "cuid"}, ['"x"'], ["1"]),
    ],
    ids=json.dumps,
)
def test_a_structure_fits_its_whole_schema(schema: dict[str, Any], valid: list[str], invalid: list[str]) -> None:
    tags = {"triggers": ["<"], "structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}]}
    followed = Followed(Kind.LARK, tags_in_lark(tags, "tags"))
    assert [text for text in valid if not followed.takes(f"<a>{text}</a>")] == []
    assert [text for text in invalid if followed.takes(f"<a>{text}</a>")] == []


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"minProperties": 2}, "/minProperties: cannot be enforced"),
        ({"properties": {"a": {"type": "strng"}}}, "/properties/a/type: is "),
        ({"$ref": "#/x"}, "/$ref: #/x is not in the schema"),
    ],
    ids=json.dumps,
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place(schema: dict[str, Any], problem: str) -> None:
    structures = [*TAGS["structures"], {"begin": "[[", "schema": schema, "end": "]]"}]
    with pytest.raises(ApiError, match=re.escape(problem)) as raised:
        tags_in_lark({**TAGS, "structures": structures}, "tags")
    assert raised.value.param == "tags.structures[3].schema"


def test_all_schemas_share_one_budget_of_work() -> None:
    schema = {"anyOf": [{"const": number} for number in range(2_000)]}
    structures = [{"begin": "<", "schema": schema, "end": ">"} for _ in range(20)]
    with pytest.raises(ApiError, match="expands to more than"):
        tags_in_lark({"structures": structures, "triggers": ["<"]}, "tags")
