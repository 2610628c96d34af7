"""Calls in a text that was cut off; the last one may be incomplete."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from specdec.wire.overlap import overlap
from specdec.wire.tool_arguments import is_text, property_schemas, types_of, value_of
from specdec.wire.tool_formats import JsonCall, NamedCall, TaggedCall, ToolCall, ToolFormat
from specdec.wire.tool_scanner import Schemas, json_call, tool_call

_NAME = r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*'
_BETWEEN = re.compile(r"[, \n;]*")
_NAMED = re.compile(r"\s*([a-zA-Z0-9_.\-]+)")


def cut_calls(text: str, tool_format: ToolFormat, schemas: Schemas) -> list[ToolCall]:
    """Return the calls in the text after a marker: complete ones, and a last one with only the start of its arguments.
    Empty if the text is no call, has an invalid complete call, or ends before the first function's name is complete."""
    match tool_format.call:
        case JsonCall() as style:
            calls = _json_calls(text, style)
            known = bool(tool_format.marker) or not schemas or all(call.name in schemas for call in calls)
            return calls if known else []
        case NamedCall() as style:
            return _named_call(text, style)
        case TaggedCall() as style:
            return _tagged_calls(text, style, schemas)


def _json_calls(text: str, style: JsonCall) -> list[ToolCall]:
    calls, at = [], len(text) - len(text.lstrip(" \n;"))
    if style.listed and text[at : at + 1] == "[":
        at = _next_entry(text, at + 1)
    decoder = json.JSONDecoder()
    while at < len(text):
        try:
            entry, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        if (call := json_call(entry, style)) is None:
            return []
        calls.append(call)
        at = _next_entry(text, at)
    found = re.compile(rf'{_NAME}(?:,\s*(?:"{style.arguments}"\s*(?::\s*(.*))?)?)?', re.DOTALL).match(text, at)
    name = None if found is None else _text(found[1])
    return calls if found is None or name is None else [*calls, ToolCall(name, _arguments(found[2] or ""))]


def _next_entry(text: str, at: int) -> int:
    """Return the place of a list's next entry."""
    found = _BETWEEN.match(text, at)
    assert found is not None  # it matches the empty text, too
    return found.end()


def _named_call(text: str, style: NamedCall) -> list[ToolCall]:
    found = _NAMED.match(text)
    if found is None or style.opening not in text:
        return []
    return [ToolCall(found[1], _arguments(text.split(style.opening, 1)[1].lstrip()))]


def _tagged_calls(text: str, style: TaggedCall, schemas: Schemas) -> list[ToolCall]:
    calls, at = list[ToolCall](), 0
    while True:
        call, end = _tagged_call(text, at, style, schemas)
        if call is None:
            return calls if end < 0 else []
        calls.append(call)
        if end < 0:
            return calls
        at = end + len(style.end)


def _tagged_call(text: str, at: int, style: TaggedCall, schemas: Schemas) -> tuple[ToolCall | None, int]:
    """Return the call at a place, and the place of its end tag, -1 if it was cut off before. The call is None if its
    name is incomplete, or JSON cannot represent its complete arguments."""
    end = text.find(style.end, at) if style.end else -1
    behind = re.escape(style.name[1]) or r"(?=[\s<])"
    found = re.compile(rf'\s*{re.escape(style.name[0])}([^\s<>"]+){behind}').match(text, at)
    if found is None:
        return None, end
    name, at = found[1], found.end()
    schema = schemas.get(name, {})
    arguments: dict[str, object] = {}
    properties = property_schemas(schema)
    # A text may have thousands of arguments: the rest of the text is neither copied nor searched for each.
    while True:
        if 0 <= end < at:  # it was part of a value
            end = text.find(style.end, at)
        key_begin = _behind(text, style.key[0], at, end if end >= 0 else len(text))
        if key_begin < 0:
            break
        key_end = text.find(style.key[1], key_begin)
        begin = -1 if key_end < 0 else _behind(text, style.value[0], key_end + len(style.key[1]))
        if begin < 0:
            break
        key, value_end = text[key_begin:key_end], text.find(style.value[1], begin)
        inner = properties.get(key, {})
        if value_end < 0:
            value = text[begin : len(text) - overlap(text, style.pad + style.value[1], begin)]
            arguments.pop(key, None)  # a repeated argument: the last one counts, and stands last
            begun = tool_call(name, {**arguments, key: 0})
            last = _begun_value(value.removeprefix(style.pad), inner, schema)
            return None if begun is None else ToolCall(name, begun.arguments.removesuffix("0}") + last), -1
        value = text[begin:value_end].removeprefix(style.pad).removesuffix(style.pad)
        arguments[key] = value_of(value, inner, schema)
        at = value_end + len(style.value[1])
    call = tool_call(name, arguments)
    return call if call is None or end >= 0 else ToolCall(name, call.arguments.removesuffix("}")), end


def _behind(text: str, mark: str, at: int, end: int | None = None) -> int:
    """Return the index after the first `mark` in text[at:end]; -1 if there is none."""
    found = text.find(mark, at, end)
    return found if found < 0 else found + len(mark)


def _begun_value(text: str, inner: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return the JSON of a value that was cut off."""
    return json.dumps(text, ensure_ascii=False)[:-1] if is_text(types_of(inner, schema)) else text


def _arguments(text: str) -> str:
    """Return arguments, without the text after a complete object."""
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return text
    return text[:end] if isinstance(found, dict) else text


def _text(written: str) -> str | None:
    try:
        text: str = json.loads(written)
        text.encode()
    except ValueError:  # no JSON, or a lone surrogate
        return None
    return text
