"""Bounds of numbers exclude what they exclude in JSON Schema, whichever schema the other bound is in."""

from __future__ import annotations

from typing import Any

import pytest

from tests.grammar.followed import Followed

NUMBER = {"type": "number"}

CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (NUMBER | {"exclusiveMinimum": 0, "maximum": 0.5}, ["0.001", "0.5"], ["0", "0.0", "0.6", "-0.1"]),
    (NUMBER | {"exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.5}, ["0.5"], ["0"]),
    (NUMBER | {"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1.001", "1.49"], ["1", "1.0", "1.5"]),
    (NUMBER | {"exclusiveMinimum": -1.5, "exclusiveMaximum": -1}, ["-1.001", "-1.49"], ["-1", "-1.0", "-1.5"]),
    (NUMBER | {"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.001", "-0.5"], ["-0", "0", "-0.6"]),
    (NUMBER | {"exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1"], ["0", "1.5"]),
    ({"type": "integer", "exclusiveMinimum": 1, "maximum": 2.5}, ["2"], ["1", "3"]),
    (NUMBER | {"exclusiveMinimum": 0, "allOf": [{"maximum": 0.5}]}, ["0.1"], ["0"]),
    ({"$defs": {"a": {"maximum": 0.5}}, "$ref": "#/$defs/a", **NUMBER, "exclusiveMinimum": 0}, ["0.1"], ["0"]),
    (NUMBER | {"maximum": 0.5, "not": {"maximum": 0}}, ["0.1"], ["0"]),
    (NUMBER | {"minimum": 0, "maximum": 2, "not": {"enum": [0, 0.5, 1]}}, ["0.4", "0.9", "1.5"], ["0", "0.5", "1"]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES)
def test_a_bound_excludes_numbers(schema: dict[str, Any], valid: list[str], invalid: list[str]) -> None:
    grammar = Followed.of_schema(schema)
    assert [text for text in valid if not grammar.takes(text)] == []
    assert [text for text in invalid if grammar.takes(text)] == []
