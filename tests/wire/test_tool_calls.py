"""Tool calls are parsed from a text identically for any split into pieces; all else is text."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.wire.cut_calls import cut_calls
from specdec.wire.tool_arguments import types_of
from specdec.wire.tool_calls import ToolCall, ToolCallReader
from specdec.wire.tool_formats import (
    FORMATS,
    GLM,
    GLM_DENSE,
    GRANITE,
    HERMES,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_CODER,
    SEED,
    ToolFormat,
    written,
)
from tests.cpu_time import taking_less_than

WEATHER = ToolCall("weather", '{"city": "Bonn", "days": [1, 2]}')
TIME = ToolCall("time", "{}")


def read(
    tool_format: ToolFormat, *pieces: str, schemas: Mapping[str, dict[str, Any]] = MappingProxyType({})
) -> tuple[str, list[ToolCall]]:
    reader = ToolCallReader(tool_format, schemas)
    found = [each for piece in pieces for each in reader.push(piece)] + list(reader.finish())
    return "".join(each for each in found if isinstance(each, str)), [
        each for each in found if isinstance(each, ToolCall)
    ]


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "<|tool_call|>", "<seed:tool_call>", "<minimax:tool_call>",
    "<function=", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "[ARGS]", "[CALL_ID]",
    "[", "]", "{", "}", '{"name": 1}', "x ", '{"nam": "f"}', '"', "\\", "\n", '{"name": "f"', "},", "[]",
    '{"name": "f", "arguments": 5, "parameters": 5}',
    '{"name": "f", "arguments": {"a": NaN}, "parameters": {"a": 1e999}}',
]  # fmt: skip
"""Pieces of text without a valid call."""


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
    text = said + written(tool_format, [(call.name, json.loads(call.arguments)) for call in calls]) + then
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
        (HERMES, '<tool_call>{"name": "time"}', ("", [TIME])),  # cut off after the call
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
        (LLAMA, ' \n{"name": "time"}\n', ("", [TIME])),
        (HERMES, '<tool_call>{"name": "time"}</tool_<tool_call>{"name": "time"}', ("</tool_", [TIME, TIME])),
        (HERMES, '<tool_call>{"name": "a\nb"}', ('<tool_call>{"name": "a\nb"}', [])),
        (MISTRAL_ARGS, "[TOOL_CALLS]time[ARGS]{}", ("", [TIME])),
        (MISTRAL_ARGS, "[TOOL_CALLS]time[CALL_ID]abcdef123[ARGS]{} [TOOL_CALLS]time{}", ("", [TIME, TIME])),
        (MISTRAL_ARGS, "[TOOL_CALLS]time[ARGS][]", ("[TOOL_CALLS]time[ARGS][]", [])),
        (MISTRAL_ARGS, "[TOOL_CALLS][ARGS]{}", ("[TOOL_CALLS][ARGS]{}", [])),
        (MISTRAL_ARGS, "[TOOL_CALLS]time[ID]{}", ("[TOOL_CALLS]time[ID]{}", [])),
        (QWEN_CODER, "a <tool_call><function=time></function></tool_call>\nb", ("a b", [TIME])),
        (QWEN_CODER, "<tool_call><function=time></function>", ("", [TIME])),
        (QWEN_CODER, '<tool_call>{"name": "time"}</tool_call>', ('<tool_call>{"name": "time"}</tool_call>', [])),
        (QWEN_CODER, "<tool_call><function=time><parameter=a>b", ("<tool_call><function=time><parameter=a>b", [])),
        (
            QWEN_CODER,
            "<tool_call><function=f><parameter=a><tool_call><function=time></function></tool_call>",
            ("<tool_call><function=f><parameter=a>", [TIME]),
        ),
        (GLM, "<tool_call>time</tool_call>", ("", [TIME])),
        (GLM, "<tool_call>time\n</tool_call>\n<tool_call>time\n</tool_call>", ("", [TIME, TIME])),
        (GLM, '<tool_call>{"name": "time"}</tool_call>', ('<tool_call>{"name": "time"}</tool_call>', [])),
        (GLM_DENSE, "<tool_call>f<arg_key>a</arg_key> b", ("<tool_call>f<arg_key>a</arg_key> b", [])),
        (
            MINIMAX,
            '<minimax:tool_call><invoke name="time"></invoke><invoke name="time"></invoke></minimax:tool_call>',
            ("", [TIME, TIME]),
        ),
        (
            MINIMAX,
            '<minimax:tool_call><invoke name="time"></invoke>\n<invoke name=time></invoke></minimax:tool_call>',
            ("<invoke name=time></invoke></minimax:tool_call>", [TIME]),
        ),
        (
            MINIMAX,
            '<minimax:tool_call><invoke name="time"></invoke><invoke name="f"><parameter name="a">b',
            ('<invoke name="f"><parameter name="a">b', [TIME]),
        ),
        (
            MINIMAX,
            '<minimax:tool_call><invoke name="time"></invoke><invoke name="f"><parameter name="a">1e999</parameter>'
            '</invoke></minimax:tool_call> <minimax:tool_call><invoke name="time"></invoke></minimax:tool_call>',
            ('<invoke name="f"><parameter name="a">1e999</parameter></invoke></minimax:tool_call> ', [TIME, TIME]),
        ),
    ],
)
def test_what_models_write(tool_format: ToolFormat, text: str, wanted: tuple[str, list[ToolCall]]) -> None:
    assert read(tool_format, text) == wanted
    assert read(tool_format, *text) == wanted


def test_a_long_call_is_read_once() -> None:
    """Reparsing for each of 100,000 pieces would take minutes."""
    city = "x" * 100_000
    text, calls = read(HERMES, '<tool_call>{"name": "f", "arguments": {"city": "', *city, '"}}</tool_call>')
    assert text == ""
    assert json.loads(calls[0].arguments)["city"] == city


SCHEMA: dict[str, Any] = {
    "properties": {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "unit": {"$ref": "#/$defs/unit"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "any": {},
    },
    "$defs": {"unit": {"enum": ["1", "2"]}},
}


@pytest.mark.parametrize(
    ("name", "written_value", "value"),
    [
        ("text", "5", "5"),
        ("text", "\n a\n\n", "\n a\n\n"),
        ("text", "null", "null"),
        ("text", "a < b </parameter", "a < b </parameter"),
        ("maybe", "null", None),
        ("maybe", "nil", "nil"),
        ("unit", "1", "1"),
        ("count", "5", 5),
        ("count", "five", "five"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("list", '[1, "a"]', [1, "a"]),
        ("any", "a", "a"),
        ("any", "5", 5),
        ("unknown", '{"a": NaN}', '{"a": NaN}'),
    ],
)
@pytest.mark.parametrize("tool_format", [QWEN_CODER, SEED, MINIMAX], ids=lambda each: each.name)
def test_values_between_tags(tool_format: ToolFormat, name: str, written_value: str, value: object) -> None:
    """By the function's schema, strings are raw text and all other values are JSON."""
    text = written(tool_format, [("f", {name: written_value})])
    call = ToolCall("f", json.dumps({name: value}))
    assert read(tool_format, text, schemas={"f": SCHEMA}) == ("", [call])
    assert read(tool_format, *text, schemas={"f": SCHEMA}) == ("", [call])


def test_schemas_that_say_nothing() -> None:
    """Invalid schemas neither help nor raise: the orchestrator validates schemas, a client may not."""
    text = written(GLM, [("f", {"a": "5"})])
    for schema in ({"properties": 5}, {"properties": {"a": 5}}, {"properties": {"a": {"$ref": "#/properties/a"}}}):
        assert read(GLM, text, schemas={"f": schema}) == ("", [ToolCall("f", '{"a": 5}')])


# Text that stays undecided for long: (format, beginning, repeated piece).
LONG = [
    (HERMES, "<tool_call>", " "),
    (HERMES, '<tool_call>{"name": "f"}', " \n"),
    (HERMES, "<tool_call>{", " "),
    (HERMES, '<tool_call>{"a":"', "x<tool_call>{"),
    (HERMES, "", '<tool_call>{"'),
    (HERMES, "", '<tool_call>{",":1,"'),
    (HERMES, "", "<tool_call>["),
    (HERMES, "", "<tool_call"),
    (HERMES, '<tool_call>{"name": "f"}', "</tool_call<tool_call>{"),
    (MISTRAL, "[TOOL_CALLS]", " "),
    (MISTRAL, "", "[TOOL_CALLS]["),
    (MISTRAL_ARGS, "[TOOL_CALLS]", " "),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]", " "),
    (MISTRAL_ARGS, "[TOOL_CALLS]", "f"),
    (MISTRAL_ARGS, "", "[TOOL_CALLS]f[CALL_ID]a"),
    (LLAMA, "", " "),
    (LLAMA, '{"name": "f"}', " ;\n"),
    (LLAMA, "", '{"name": "f"};'),
    (QWEN_CODER, "<tool_call>", "\n"),
    (QWEN_CODER, "", "<tool_call>\n<function=f>\n<parameter=a>\n"),
    (QWEN_CODER, "<tool_call><function=f>", "<parameter=a>\n"),
    (QWEN_CODER, "<tool_call><function=f><parameter=a>", "</parameter"),
    (GLM, "<tool_call>", "f"),
    (GLM, "", "<tool_call>f<arg_key>a"),
    (GLM, "<tool_call>f", "<arg_key>a</arg_key>"),
    (MINIMAX, "", '<minimax:tool_call><invoke name="f"></invoke><invoke name="f"><parameter name="a">'),
    (MINIMAX, "<minimax:tool_call>", '<invoke name="f"></invoke>'),
]


@pytest.mark.parametrize(("tool_format", "begin", "repeated"), LONG)
@pytest.mark.parametrize(("length", "cut"), [(20_000, 80_000), (20_000, 100), (3_000, 1)])
def test_reading_takes_time_linear_in_the_length(
    tool_format: ToolFormat, begin: str, repeated: str, length: int, cut: int
) -> None:
    """Rescans for every piece or marker would take quadratic time: 16 times as long for four times the length."""

    def seconds(length: int) -> float:
        text = begin + repeated * (length // len(repeated))
        started = time.process_time()
        read(tool_format, *(text[at : at + cut] for at in range(0, len(text), cut)))
        return time.process_time() - started

    assert min(seconds(4 * length) for _ in range(2)) < 9 * min(seconds(length) for _ in range(2)) + 0.02


def test_a_megabyte_of_white_space() -> None:
    """At quadratic cost, this would take hours."""
    started = time.process_time()
    text = "<tool_call>" + " " * (1 << 20) + '{"name": "time"}'
    assert read(HERMES, *(text[at : at + 4] for at in range(0, len(text), 4))) == ("", [TIME])
    assert time.process_time() - started < 10


def test_a_cut_call_with_many_arguments_takes_time_linear_in_its_length() -> None:
    """If the rest of the text were copied for each argument, this would take many seconds."""
    arguments = 2_000 * "<arg_key>a</arg_key><arg_value></arg_value>"
    text = f"f\n{arguments}<arg_key>b</arg_key><arg_value>" + 4_000_000 * "x"
    started = time.process_time()
    (call,) = cut_calls(text, GLM, {})
    assert time.process_time() - started < 1
    assert call.arguments.startswith('{"a": "", "b": xxx')


def test_a_cut_call_with_a_repeated_argument_has_its_last_value() -> None:
    written = [f"<arg_key>{key}</arg_key><arg_value>{value}" for key, value in (("a", "1"), ("b", "2"), ("a", "3"))]
    (call,) = cut_calls("f\n" + "</arg_value>".join(written), GLM, {})
    assert call.arguments == '{"b": 2, "a": 3'


@pytest.mark.parametrize("value", ["x</function>y", "</function></function>"])
def test_a_cut_call_may_have_its_end_tag_in_a_value(value: str) -> None:
    text = f"\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n<parameter=b>\nq"
    assert cut_calls(text, QWEN_CODER, {}) == [ToolCall("f", f'{{"a": "{value}", "b": q')]


def test_a_cut_list_may_begin_with_white_space() -> None:
    calls = cut_calls('[ {"name": "f", "arguments": {"x": 1}}, {"name": "g"', MISTRAL, {})
    assert calls == [ToolCall("f", '{"x": 1}'), ToolCall("g", "")]


def test_half_a_surrogate_pair_stays_escaped() -> None:
    """It is valid in JSON but not in UTF-8: the response could not be sent."""
    call = '<tool_call>{"name": "f", "arguments": {"text": "\\ud83d"}}</tool_call>'
    _, (made,) = read(HERMES, call)
    assert json.loads(made.arguments) == {"text": "\ud83d"}
    made.arguments.encode()
    text, made_of_name = read(HERMES, call.replace('"f"', '"\\ud83d"'))
    assert (text, made_of_name) == (call.replace('"f"', '"\\ud83d"'), [])


WEATHER_SCHEMA: dict[str, dict[str, Any]] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
    "time": {},
}


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=lambda tool_format: tool_format.name)
def test_a_call_that_was_cut_short_has_the_arguments_there_are(tool_format: ToolFormat) -> None:
    """Cut anywhere after its name, it has a beginning of the whole call's arguments, never shorter for a later cut."""
    whole = written(tool_format, [("weather", {"city": "Bo\u00f6n", "days": [1, 2]})])
    name = whole.index("weather") + len("weather")
    last = ""
    for end in range(name + 2, len(whole) + 1):
        reader = ToolCallReader(tool_format, WEATHER_SCHEMA)
        found = [*reader.push(whole[:end]), *reader.finish(cut=True)]
        if end < whole.index("Bo") and not any(isinstance(item, ToolCall) for item in found):
            continue
        (call,) = found
        assert isinstance(call, ToolCall), (whole[:end], call)
        assert call.name == "weather"
        assert '{"city": "Bo\u00f6n", "days": [1, 2]}'.startswith(call.arguments), (whole[:end], call.arguments)
        assert len(call.arguments) >= len(last)
        last = call.arguments
    assert last == '{"city": "Bo\u00f6n", "days": [1, 2]}'


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=lambda tool_format: tool_format.name)
def test_calls_before_one_that_was_cut_short_are_complete(tool_format: ToolFormat) -> None:
    whole = written(tool_format, [("time", {}), ("weather", {"city": "Bonn", "days": [1, 2]})])
    reader = ToolCallReader(tool_format, WEATHER_SCHEMA)
    first, second = [*reader.push(whole[: whole.index("nn")]), *reader.finish(cut=True)]
    assert first == TIME
    assert isinstance(second, ToolCall)
    assert (second.name, second.arguments) == ("weather", '{"city": "Bo')


INVOKED = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">{}</parameter>\n'


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"x": NaN}}, {"name": "g"'),
        (MISTRAL, '[TOOL_CALLS][{"name": "\\ud83d", "arguments": {}}, {"name": "g"'),
        (MISTRAL, '[TOOL_CALLS][{"name": "\\ud83d"'),
        (MINIMAX, INVOKED.format("1e999") + '</invoke>\n<invoke name="g">'),
        (MINIMAX, INVOKED.format("1e999")),
        (MINIMAX, INVOKED.format("1e999") + '<parameter name="y">1'),
    ],
)
def test_an_invalid_call_in_a_cut_text_is_no_call(tool_format: ToolFormat, text: str) -> None:
    reader = ToolCallReader(tool_format)
    assert "".join(str(item) for item in [*reader.push(text), *reader.finish(cut=True)]) == text


@pytest.mark.parametrize(
    ("tool_format", "text", "arguments"),
    [
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"x": "\\ud83d"}}, {"name": "g"', r'{"x": "\ud83d"}'),
        (MINIMAX, INVOKED.format(r'"\ud83d"') + '</invoke>\n<invoke name="g">', r'{"x": "\ud83d"}'),
        (MINIMAX, INVOKED.format(r'"\ud83d"'), r'{"x": "\ud83d"'),
        (MINIMAX, INVOKED.format(r'"\ud83d"') + '<parameter name="y">1', r'{"x": "\ud83d", "y": 1'),
    ],
)
def test_a_lone_surrogate_in_a_cut_text_stays_escaped(tool_format: ToolFormat, text: str, arguments: str) -> None:
    reader = ToolCallReader(tool_format)
    first, *_ = [*reader.push(text), *reader.finish(cut=True)]
    assert first == ToolCall("f", arguments)


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=lambda tool_format: tool_format.name)
@pytest.mark.parametrize("size", [1, 1000])
def test_forced_calls_that_were_cut_short_leave_no_text(tool_format: ToolFormat, size: int) -> None:
    whole = written(tool_format, [("time", {}), ("weather", {"city": "Bonn", "days": [1, 2]})])
    found: list[str | ToolCall] = []
    for end in range(len(whole) + 1):
        reader = ToolCallReader(tool_format, WEATHER_SCHEMA, only_calls=True)
        found = [item for begin in range(0, end, size) for item in reader.push(whole[begin : min(end, begin + size)])]
        found += reader.finish(cut=True)
        assert not [item for item in found if isinstance(item, str)], whole[:end]
    assert found[0] == TIME


@pytest.mark.parametrize(("behind", "told"), [("\n<tool", []), ("<", []), ("\n<toll", ["<toll"])])
def test_the_beginning_of_a_marker_behind_a_call_is_no_text(behind: str, told: list[str]) -> None:
    text = written(HERMES, [("time", {})]) + behind
    reader = ToolCallReader(HERMES)
    assert [*reader.push(text), *reader.finish(cut=True)] == [TIME, *told]
    reader = ToolCallReader(HERMES)
    assert [*reader.push(text), *reader.finish()] == [TIME, behind.strip()]


@pytest.mark.parametrize("behind", ["<", "<inv", '<invoke name="', '<invoke name="ti', "</minimax"])
def test_the_beginning_of_another_call_behind_a_call_is_no_text(behind: str) -> None:
    reader = ToolCallReader(MINIMAX)
    text = '<minimax:tool_call>\n<invoke name="time">\n</invoke>\n' + behind
    assert [*reader.push(text), *reader.finish(cut=True)] == [TIME]


def test_json_with_another_name_is_no_call_where_calls_have_no_marker() -> None:
    answer = '{"name": "Bob", "parameters": {}}'
    assert read(LLAMA, answer, schemas=WEATHER_SCHEMA) == (answer, [])
    assert read(LLAMA, answer) == ("", [ToolCall("Bob", "{}")])
    reader = ToolCallReader(LLAMA, WEATHER_SCHEMA)
    assert [*reader.push(answer[:25]), *reader.finish(cut=True)] == [answer[:25]]


@pytest.mark.parametrize("text", ["<tool_call>", '<tool_call>\n{"na', "<tool_call> is a tag", '{"name": "f"', "<tool"])
def test_what_was_cut_before_a_name_stays_text(text: str) -> None:
    reader = ToolCallReader(HERMES)
    assert "".join(str(item) for item in [*reader.push(text), *reader.finish(cut=True)]) == text


def test_the_types_of_an_argument_are_found_soon() -> None:
    root = {"$defs": {"e": {"enum": [1] * 130_000}}}
    with taking_less_than(0.1):
        assert types_of({"anyOf": [{"$ref": "#/$defs/e"}] * 63}, root) == frozenset()
