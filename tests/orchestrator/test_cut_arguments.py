"""A call's arguments that were cut at any place become an object again, with nothing that was not written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.requests.tools import arguments_of
from specdec.v2.generation_pb2 import ToolCall

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def begins(part: Any, whole: Any) -> bool:
    """Return True if the first value has nothing that the second one lacks."""
    match part, whole:
        case dict(), dict():
            return all(name in whole and begins(value, whole[name]) for name, value in part.items())
        case list(), list():
            return len(part) <= len(whole) and all(map(begins, part, whole))
        case str(), str():
            return whole.startswith(part)
        case (bool(), _) | (_, bool()):
            return part is whole
        case ((int() | float()), (int() | float())):  # 1.5e+10 may have been cut to 1 or 1.5e+1
            return True
    return part is whole


def read(text: str) -> dict[str, Any] | None:
    return arguments_of(ToolCall(arguments=text))


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), st.booleans(), st.data())
def test_a_cut_object_begins_the_whole_one(whole: dict[str, Any], ascii_alone: bool, data: st.DataObject) -> None:
    text = json.dumps(whole, ensure_ascii=ascii_alone)
    assert read(text) == whole
    found = read(text[: data.draw(st.integers(1, len(text)))])
    assert found is not None
    assert begins(found, whole)
    json.dumps(found, ensure_ascii=False).encode()  # raises if a character is cut in half


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        (' {"ci', {}),
        ('{"city": "Bo\\u00', {"city": "Bo"}),
        ('{"city": "\\ud83d', {"city": ""}),
        ('{"city": "Bonn", "days": [1, {"a": tr', {"city": "Bonn", "days": [1, {}]}),
    ],
)
def test_what_is_not_finished_is_left_out(text: str, found: dict[str, Any]) -> None:
    assert read(text) == found


@pytest.mark.parametrize("text", ["[", "no", '"{"', '{"a": 1} and', "{city", '{"a" 1', '{"a": [1,]}', "{,"])
def test_what_is_not_the_beginning_of_an_object_is_none(text: str) -> None:
    assert read(text) is None
