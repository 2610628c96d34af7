"""Calls of functions, read out of a model's text as it comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from specdec.client.tool_formats import ToolFormat

_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolCall:
    """A call: the function's name, and its arguments as a JSON object."""

    name: str
    arguments: str


class ToolCallReader:
    """Reads one text. What turns out to be no call is text, so that nothing is lost but white space behind calls."""

    def __init__(self, tool_format: ToolFormat) -> None:
        self._format = tool_format
        self._held = ""  # not told yet: it may be a call, or begin one
        self._said = False  # text was told that is not white space
        self._behind_call = False  # a call was the last that was told
        self._hopeless = False  # what looked like a call was none: all that follows is text

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
                text, self._held = self._held[:begin], self._held[begin:]
                if self._behind_call:
                    text = text.lstrip()
                if text:
                    self._behind_call, self._said = False, self._said or not text.isspace()
                    yield text
                continue
            found = self._calls(behind, over=over)
            if found is None:
                if not over:
                    return
                self._hopeless = True  # it was cut off
                continue
            calls, self._held = found
            self._hopeless, self._behind_call = not calls, bool(calls)
            yield from calls

    def _beginning(self) -> tuple[int, int]:
        """Return where in what is held calls begin, or may begin once more has come, and where their JSON does."""
        text, marker = self._held, self._format.marker
        if self._hopeless:
            return len(text), 0
        if not marker:  # calls are the whole text
            bare = text.lstrip(" \n;")
            return (0, len(text) - len(bare)) if not self._said and bare[:1] in ("", "{") else (len(text), 0)
        at = text.find(marker)
        if at < 0:
            at = len(text) - _overlap(text, marker)
        return at, len(marker)

    def _calls(self, behind: int, *, over: bool) -> tuple[list[ToolCall], str] | None:
        """Return the calls that what is held begins with, none if they are not what calls are, and what follows them;
        None while that is not known."""
        body = self._held[behind:].lstrip()
        try:
            found, end = _DECODER.raw_decode(body)
        except ValueError:
            return None
        rest, after = body[end:].lstrip(), self._format.after.strip()
        if not over and len(rest) < len(after) and after.startswith(rest):
            return None
        calls = [self._call(each) for each in (found if isinstance(found, list) else [found])]
        if not calls or None in calls:
            return [], self._held
        return [call for call in calls if call is not None], rest.removeprefix(after)

    def _call(self, found: object) -> ToolCall | None:
        if not isinstance(found, dict) or not isinstance(name := found.get("name"), str):
            return None
        arguments = found.get(self._format.arguments, {})
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a marker."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
