"""Scanners of calls, after their marker: each character is read once, however the text is cut into pieces.

Scanners are generators: they yield when they need more text, and return the calls, or None if the text is not a call.
The text after the marker of a failed call is read again, but total time stays linear: a tagged value ends at the next
marker at the latest, and a JSON scanner passes a marker only inside a string. Of two JSON scanners started at different
markers, only one is inside a string at a third marker, so at most two read the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from specdec.wire.tool_arguments import property_schemas, value_of
from specdec.wire.tool_formats import JsonCall, NamedCall, TaggedCall, ToolCall, ToolFormat

Schemas = Mapping[str, Mapping[str, Any]]
"""Schemas of arguments, by function."""

_SPACE = re.compile(r"[ \t\n\r\f\v]*")
_LEADING = re.compile(r"[ \n;]*")
_NAME = re.compile(r"[a-zA-Z0-9_.\-]*")
_TAGGED_NAME = re.compile(r'[^\s<>"]*')
_KEY = re.compile(r'[^<>"]*')
_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_OUTSIDE_STRINGS = re.compile(r"[ \t\n\r,:0-9+\-.eEtrufalsn]*")
"""White space, separators, numbers, `true`, `false` and `null`; no marker consists only of these."""


class Cursor:
    """A place in a text that arrives in pieces. Methods that are generators yield at the end of a piece."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        """Place in the piece; negative after a return to characters of earlier pieces, which ends the scan."""
        self.over = False
        """True if the text is complete."""
        self._passed = 0  # characters of earlier pieces

    def push(self, text: str) -> None:
        """Go on with the next piece."""
        self._passed += len(self.text)
        self.text, self.at = text, 0

    @property
    def place(self) -> int:
        """The place among all pieces of a scan, for `return_to`."""
        return self._passed + self.at

    def return_to(self, place: int) -> None:
        """Move back to an earlier place."""
        self.at = place - self._passed

    def peek(self) -> Generator[None, None, str]:
        """Return the next character; empty at the end of the text."""
        while self.at == len(self.text):
            if self.over:
                return ""
            yield
        return self.text[self.at]

    def run(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Skip and return the longest run that matches a pattern of single characters."""
        pieces = []
        while True:
            found = pattern.match(self.text, self.at)
            assert found is not None
            pieces.append(found[0])
            self.at = found.end()
            if self.at < len(self.text) or self.over:
                return "".join(pieces)
            yield

    def one_of(self, *wanted: str) -> Generator[None, None, str]:
        """Skip and return one of several texts, none of which is a prefix of another. If none matches, move back and
        return an empty text."""
        read = ""
        while read not in wanted:
            read += (character := (yield from self.peek()))
            self.at += len(character)
            if not character or not any(text.startswith(read) for text in wanted):
                self.at -= len(read)
                return ""
        return read

    def until(self, *ends: str) -> Generator[None, None, tuple[str, str]]:
        """Skip and return a text and the first of several ends after it; the end is empty if none comes."""
        pattern = re.compile("|".join(map(re.escape, ends)))
        kept = max(map(len, ends)) - 1
        pieces, tail, begin = [], "", self.at
        while True:
            buffer = tail + self.text if tail else self.text
            if (found := pattern.search(buffer, begin)) is not None:
                pieces.append(buffer[begin : found.start()])
                self.at = found.end() - len(tail)
                return "".join(pieces), found[0]
            self.at = len(self.text)
            if self.over:
                return "".join((*pieces, buffer[begin:])), ""
            place = max(begin, len(buffer) - kept)
            pieces.append(buffer[begin:place])
            tail, begin = buffer[place:], 0
            yield

    def json(self) -> Generator[None, None, str | None]:
        """Skip and return an object or a list; None as soon as the text cannot be either."""
        pieces: list[str] = []
        begin, depth, in_string, escaped = self.at, 0, False, False
        while True:
            if not escaped:
                found = (_STRING if in_string else _OUTSIDE_STRINGS).match(self.text, self.at)
                assert found is not None
                self.at = found.end()
            if self.at == len(self.text):
                if self.over:
                    return None
                pieces.append(self.text[begin:])
                yield
                begin = self.at
                continue
            character = self.text[self.at]
            self.at += 1
            if escaped:
                escaped = False
            elif character == '"':
                in_string = not in_string
            elif in_string:
                if character != "\\":
                    return None
                escaped = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
                if depth == 0:
                    return "".join((*pieces, self.text[begin : self.at]))
            else:
                return None


Scan = Generator[None, None, list[ToolCall] | None]


def scan(cursor: Cursor, tool_format: ToolFormat, schemas: Schemas) -> Scan:
    """Return the scanner of a format, for calls after their marker."""
    match tool_format.call:
        case JsonCall() as style:
            return _json_calls(cursor, style, None if tool_format.marker else schemas)
        case NamedCall() as style:
            return _named_call(cursor, style)
        case TaggedCall() as style:
            return _tagged_calls(cursor, style, tool_format.marker, schemas)


def _json_calls(cursor: Cursor, style: JsonCall, bare: Schemas | None) -> Scan:
    """`bare`: the functions' schemas, if calls have no marker; JSON that names another function is then no call."""
    yield from cursor.run(_SPACE if bare is None else _LEADING)
    begin = yield from cursor.peek()
    if not begin or begin not in ("{[" if bare is None else "{"):
        return None
    text = yield from cursor.json()
    calls = None if text is None else _decoded(text, style)
    if calls and bare and not all(call.name in bare for call in calls):
        return None
    if calls:
        yield from _closing(cursor, style.after.strip())
    return calls


def _named_call(cursor: Cursor, style: NamedCall) -> Scan:
    yield from cursor.run(_SPACE)
    name = yield from cursor.run(_NAME)
    if not name:
        return None
    if (yield from cursor.peek()) == "[":
        mark = yield from cursor.one_of(style.opening, style.identifier)
        if mark == style.identifier:
            yield from cursor.run(_NAME)
            mark = yield from cursor.one_of(style.opening)
        if not mark:
            return None
    yield from cursor.run(_SPACE)
    if (yield from cursor.peek()) != "{":
        return None
    text = yield from cursor.json()
    arguments = None if text is None else _object(text)
    call = None if arguments is None else tool_call(name, arguments)
    return None if call is None else [call]


def _tagged_calls(cursor: Cursor, style: TaggedCall, marker: str, schemas: Schemas) -> Scan:
    calls: list[ToolCall] = []
    while True:
        place = cursor.place
        yield from cursor.run(_SPACE)
        if style.name[0]:
            ends = (style.after,) if calls else ()
            if (yield from cursor.one_of(style.name[0], *ends)) != style.name[0]:
                return calls or None
        call = yield from _tagged_call(cursor, style, marker, schemas)
        if call is None:
            cursor.return_to(place)  # of several calls, those before the failed one stay
            return calls or None
        calls.append(call)
        if not style.end:  # one tag ends both the call and the list of calls
            return calls


def _tagged_call(
    cursor: Cursor, style: TaggedCall, marker: str, schemas: Schemas
) -> Generator[None, None, ToolCall | None]:
    name = yield from cursor.run(_TAGGED_NAME)
    if not name or (style.name[1] and not (yield from cursor.one_of(style.name[1]))):
        return None
    arguments = yield from _tagged_arguments(cursor, style, marker, schemas.get(name, {}))
    return None if arguments is None else tool_call(name, arguments)


def _tagged_arguments(
    cursor: Cursor, style: TaggedCall, marker: str, schema: Mapping[str, Any]
) -> Generator[None, None, dict[str, object] | None]:
    """Read the arguments of one call, and its end tag."""
    arguments: dict[str, object] = {}
    properties = property_schemas(schema)
    while True:
        yield from cursor.run(_SPACE)
        tag = yield from cursor.one_of(style.key[0], style.end or style.after)
        if tag != style.key[0]:
            return arguments if tag else None
        key = yield from cursor.run(_KEY)
        if not (yield from cursor.one_of(style.key[1])):
            return None
        if style.value[0]:
            yield from cursor.run(_SPACE)
            if not (yield from cursor.one_of(style.value[0])):
                return None
        text, end = yield from cursor.until(style.value[1], marker)
        if end != style.value[1]:
            return None
        text = text.removeprefix(style.pad).removesuffix(style.pad)
        arguments[key] = value_of(text, properties.get(key, {}), schema)


def _closing(cursor: Cursor, after: str) -> Generator[None, None, None]:
    """Skip white space and the closing tag, which may be missing."""
    yield from cursor.run(_SPACE)
    if after:
        yield from cursor.one_of(after)


def _decoded(written: str, style: JsonCall) -> list[ToolCall] | None:
    """Return the calls in a JSON text; None unless all of it is calls."""
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        return None
    calls = []
    for entry in found if isinstance(found, list) else [found]:
        if (call := json_call(entry, style)) is None:
            return None
        calls.append(call)
    return calls or None


def json_call(entry: object, style: JsonCall) -> ToolCall | None:
    """Return the call in a JSON value; None if it is no valid call."""
    name = entry.get("name") if isinstance(entry, dict) else None
    arguments = entry.get(style.arguments, {}) if isinstance(entry, dict) else None
    return tool_call(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _object(text: str) -> dict[str, object] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def tool_call(name: str, arguments: Mapping[str, object]) -> ToolCall | None:
    """Return a call; None if JSON in UTF-8 cannot represent its name or arguments. A lone surrogate in an argument
    stays escaped."""
    try:
        name.encode()
        encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    try:
        encoded.encode()
    except UnicodeEncodeError:
        encoded = json.dumps(arguments, allow_nan=False)
    return ToolCall(name, encoded)
