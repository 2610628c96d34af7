"""Calls are read out of a text the same way however it is cut, and what is no call is text."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.client.tool_calls import ToolCall, ToolCallReader
from specdec.client.tool_formats import FORMATS, GRANITE, HERMES, LLAMA, MISTRAL, ToolFormat, format_of

WEATHER = ToolCall("weather", '{"city": "Bonn", "days": [1, 2]}')
TIME = ToolCall("time", "{}")


def written(tool_format: ToolFormat, *calls: ToolCall) -> str:
    """Calls as a model writes them in this format."""
    objects = [
        json.dumps({"name": call.name, tool_format.arguments: json.loads(call.arguments)}, ensure_ascii=False)
        for call in calls
    ]
    f = tool_format
    if f.listed:
        return f"{f.marker}[{', '.join(objects)}]{f.after}"
    return f.between.join(f"{f.marker}{f.before}{each}{f.after}" for each in objects)


def read(tool_format: ToolFormat, *pieces: str) -> tuple[str, list[ToolCall]]:
    reader = ToolCallReader(tool_format)
    found = [each for piece in pieces for each in reader.push(piece)] + list(reader.finish())
    return "".join(each for each in found if isinstance(each, str)), [
        each for each in found if isinstance(each, ToolCall)
    ]


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "<|tool_call|>", "[", "]", "{", "}", '{"name": 1}', "x ",
    '{"nam": "f"}', '"', "\\", "\n", '{"name": "f", "arguments": 5, "parameters": 5}', '{"name": "f"', "},", "[]",
    '{"name": "f", "arguments": {"a": NaN}, "parameters": {"a": 1e999}}',
]  # fmt: skip
"""Of which no call can be made."""


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=12))})
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


@given(st.sampled_from(list(FORMATS.values())), st.sampled_from([(WEATHER,), (TIME, WEATHER)]), st.data())
def test_calls_are_found_however_the_text_is_cut(
    tool_format: ToolFormat, calls: tuple[ToolCall, ...], data: st.DataObject
) -> None:
    said = data.draw(st.sampled_from(["", "Let me see: <tool ["])) if tool_format.marker else ""
    then = data.draw(st.sampled_from(["", "Done.\n"])) if tool_format.marker else ""
    text = said + written(tool_format, *calls) + then
    assert read(tool_format, *data.draw(cuts(text))) == (said + then, list(calls))


@given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.data(),
)
def test_text_without_calls_is_kept_however_it_is_cut(tool_format: ToolFormat, text: str, data: st.DataObject) -> None:
    assert read(tool_format, *data.draw(cuts(text))) == (text, [])


@pytest.mark.parametrize(
    ("tool_format", "text", "wanted"),
    [
        (HERMES, 'a <tool_call>\n{"name": "f", "argum', ('a <tool_call>\n{"name": "f", "argum', [])),
        (HERMES, '<tool_call>{"name": 5}</tool_call> b', ('<tool_call>{"name": 5}</tool_call> b', [])),
        (HERMES, '<tool_call>{"name": "time"}', ("", [TIME])),  # cut off behind the call
        (
            HERMES,
            'Use <tool_call> tags. <tool_call>{"name": 1}</tool_call><tool_call>{"name": "time"}</tool_call>',
            ('Use <tool_call> tags. <tool_call>{"name": 1}</tool_call>', [TIME]),
        ),
        (HERMES, '<tool_call>{"a <tool_call>{"name": "time"}', ('<tool_call>{"a ', [TIME])),
        (HERMES, "<tool_call>" + "[" * 100_000, ("<tool_call>" + "[" * 100_000, [])),
        (HERMES, '<tool_call>{"name": "time"}</tool_call>\nDone.', ("Done.", [TIME])),
        (MISTRAL, '[TOOL_CALLS] [{"name": "time", "arguments": {}}]', ("", [TIME])),
        (MISTRAL, "[TOOL_CALLS] []", ("[TOOL_CALLS] []", [])),
        (GRANITE, '<|tool_call|>[{"name": "time"}, {"name": "time"}]', ("", [TIME, TIME])),
        (LLAMA, '{"name": "time", "parameters": {}}; {"name": "time", "parameters": {}}', ("", [TIME, TIME])),
        (LLAMA, 'It is {"name": "time"}', ('It is {"name": "time"}', [])),
        (LLAMA, '{"a": 1}', ('{"a": 1}', [])),
    ],
)
def test_what_models_write(tool_format: ToolFormat, text: str, wanted: tuple[str, list[ToolCall]]) -> None:
    assert read(tool_format, text) == wanted
    assert read(tool_format, *text) == wanted


def test_a_long_call_is_read_once() -> None:
    """Not from its beginning with each piece: 100,000 pieces would take minutes."""
    city = "x" * 100_000
    text, calls = read(HERMES, '<tool_call>{"name": "f", "arguments": {"city": "', *city, '"}}</tool_call>')
    assert text == ""
    assert json.loads(calls[0].arguments)["city"] == city


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>", "hermes"),
        ("{% if tools %}[TOOL_CALLS]", "mistral"),
        ('{% if tools %}<|start_header_id|> {"name": f, "parameters": p}', "llama3_json"),
        ("{% if tools %}<|tool_call|>", "granite"),
        ("{% if tools %}<tool_call><function=", None),
        ("{% if tools %}[TOOL_CALLS][ARGS]", None),
        ("{% if tools %}", None),
        ("<tool_call>", None),
    ],
)
def test_the_format_of_a_template(template: str, name: str | None) -> None:
    found = format_of(template)
    assert (found and found.name) == name


def test_half_a_surrogate_pair_stays_escaped() -> None:
    """JSON has it, UTF-8 does not: an answer could not be sent."""
    call = '<tool_call>{"name": "f", "arguments": {"text": "\\ud83d"}}</tool_call>'
    _, (made,) = read(HERMES, call)
    assert json.loads(made.arguments) == {"text": "\ud83d"}
    made.arguments.encode()
    text, made_of_name = read(HERMES, call.replace('"f"', '"\\ud83d"'))
    assert (text, made_of_name) == (call.replace('"f"', '"\\ud83d"'), [])
