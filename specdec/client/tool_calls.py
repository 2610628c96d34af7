"""Calls of functions, read out of a model's text as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from specdec.client.tool_formats import ToolFormat

_SPACE = re.compile(r"\s*")
_STRUCTURE = re.compile(r'["\\{}\[\]]')


@dataclass(frozen=True)
class ToolCall:
    """A call: the function's name, and its arguments as a JSON object."""

    name: str
    arguments: str


class ToolCallReader:
    """Reads one text, each character once. What begins as a call and turns out to be none is text; white space behind
    calls is dropped."""

    def __init__(self, tool_format: ToolFormat) -> None:
        self._format = tool_format
        self._held = ""  # not told yet: it may be a call, or begin one
        self._json: _JsonEnd | None = None  # of the calls that it begins with
        self._said = False  # text was told that is not white space
        self._behind_call = False  # a call was the last that was told

    def push(self, text: str) -> Iterator[str | ToolCall]:
        """Take a piece of the text; yield what has become known: text, and calls that are complete."""
        self._held += text
        yield from self._read(over=False)

    def finish(self) -> Iterator[str | ToolCall]:
        """Yield what is left at the end of the text."""
        yield from self._read(over=True)

    def _read(self, *, over: bool) -> Iterator[str | ToolCall]:
        while self._held:
            begin, behind = self._beginning()
            if begin:
                yield from self._tell(begin)
                continue
            found = self._calls(behind, over=over)
            if found is None and not over:
                return
            self._json = None
            if found is None or not found[0]:  # it was cut off, or is no call: calls may follow all the same
                yield from self._tell(behind or len(self._held))
                continue
            calls, end = found
            self._held, self._behind_call = self._held[end:], True
            yield from calls

    def _tell(self, end: int) -> Iterator[str]:
        """Tell what is held, up to a place, as text."""
        text, self._held = self._held[:end], self._held[end:]
        if self._behind_call:
            text = text.lstrip()
        if text:
            self._behind_call, self._said = False, self._said or not text.isspace()
            yield text

    def _beginning(self) -> tuple[int, int]:
        """Return where in what is held calls begin, or may begin once more has come, and where their JSON does."""
        text, marker = self._held, self._format.marker
        if not marker:  # calls are the whole text
            bare = text.lstrip(" \n;")
            return (0, len(text) - len(bare)) if not self._said and bare[:1] in ("", "{") else (len(text), 0)
        at = text.find(marker)
        if at < 0:
            at = len(text) - _overlap(text, marker)
            return at, len(text)
        return at, len(marker)

    def _calls(self, behind: int, *, over: bool) -> tuple[list[ToolCall], int] | None:
        """Return the calls that what is held begins with, none if they are not what calls are, and where they end; None
        while that is not known."""
        text, after = self._held, self._format.after.strip()
        begin = _end_of_space(text, behind)
        if begin == len(text):
            return None
        if text[begin] not in "{[":
            return [], 0
        self._json = self._json or _JsonEnd(begin)
        end = self._json.find(text)
        if end is None:
            return None
        rest = _end_of_space(text, end)
        if not over and len(text) - rest < len(after) and after.startswith(text[rest:]):
            return None
        return self._decoded(text[begin:end]), rest + len(after) if text.startswith(after, rest) else rest

    def _decoded(self, written: str) -> list[ToolCall]:
        """Return the calls that JSON holds; none unless all of it is calls."""
        try:
            found = json.loads(written)
            calls = [self._call(each) for each in (found if isinstance(found, list) else [found])]
        except (ValueError, RecursionError):
            return []
        return [] if None in calls else [call for call in calls if call is not None]

    def _call(self, found: object) -> ToolCall | None:
        """Return a call; None if it is none, ValueError if its name or its arguments are what no JSON in UTF-8 can say.
        Half a surrogate pair in an argument stays escaped."""
        if not isinstance(found, dict) or not isinstance(name := found.get("name"), str):
            return None
        arguments = found.get(self._format.arguments, {})
        if not isinstance(arguments, dict):
            return None
        name.encode()
        said = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        try:
            said.encode()
        except UnicodeEncodeError:
            said = json.dumps(arguments, allow_nan=False)
        return ToolCall(name, said)


class _JsonEnd:
    """Finds where an object or a list that begins at a place in a growing text ends."""

    def __init__(self, begin: int) -> None:
        self._at = begin
        self._depth = 0
        self._in_string = False
        self._found: int | None = None

    def find(self, text: str) -> int | None:
        """Return the place behind it; None if that has not come."""
        if self._found is None:
            self._found = self._search(text)
        return self._found

    def _search(self, text: str) -> int | None:
        while (found := _STRUCTURE.search(text, self._at)) is not None:
            character, self._at = found[0], found.end()
            if character == "\\":
                if self._in_string:
                    if self._at == len(text):
                        self._at -= 1  # what it escapes has not come
                        return None
                    self._at += 1
            elif character == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    return self._at
        self._at = len(text)
        return None


def _end_of_space(text: str, begin: int) -> int:
    """Return the place of the first character from a place on that is not white space."""
    found = _SPACE.match(text, begin)
    assert found is not None
    return found.end()


def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a marker."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
