"""Limits on the structure of a JSON body, counted while it arrives.

json.loads holds the GIL throughout, and many small values take a hundred times as long as one long text. So a body with
too many values is refused before it is parsed.
"""

from __future__ import annotations

import asyncio
import re
from itertools import accumulate

from specdec.openai_api.errors import ApiError

MAX_VALUES = 1 << 18
"""Maximum values of a body, token ids included: json.loads takes 15 ms."""

MAX_NAMES = 1 << 16
"""Maximum names in objects: json.loads takes 20 ms."""

MAX_CONTAINERS = 1 << 15
"""Maximum lists and objects: json.loads takes 5 ms."""

MAX_DEPTH = 128
"""Maximum nesting depth of lists and objects."""

PIECE_BYTES = 64 << 10
"""Bytes of a body scanned before other tasks get a turn; scanning them takes at most 4 ms."""

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRINGS = re.compile(_STRING, re.DOTALL)
_COMPLETE = re.compile(rb'[^"]*+(?:' + _STRING + rb'[^"]*+)*+', re.DOTALL)
"""Everything before an unterminated string."""

_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class Structure:
    """Counts the values, names and containers of a body outside strings. Invalid JSON is left to the parser."""

    def __init__(self) -> None:
        self._begun = b""  # of an unterminated string: its quote, and a final unpaired backslash
        self._values = 1
        self._names = 0
        self._containers = 0
        self._depth = 0

    async def add(self, part: bytes) -> None:
        """Count the next part; ApiError above a limit. Other tasks run between pieces."""
        for begin in range(0, len(part), PIECE_BYTES):
            if begin:
                await asyncio.sleep(0)
            self._count(self._begun + part[begin : begin + PIECE_BYTES])

    def _count(self, piece: bytes) -> None:
        complete = _COMPLETE.match(piece)
        assert complete is not None  # the pattern matches the empty string, too
        plain = _STRINGS.sub(b"", piece[: complete.end()])
        begun = piece[complete.end() :]
        escapes = len(begun) - len(begun.rstrip(b"\\"))
        self._begun = begun[:1] + b"\\" * (escapes % 2)
        self._names += plain.count(b":")
        opened = plain.count(b"[") + plain.count(b"{")
        self._containers += opened
        self._values += plain.count(b",") + opened
        for number, most, what in (
            (self._values, MAX_VALUES, "values"),
            (self._names, MAX_NAMES, "names in objects"),
            (self._containers, MAX_CONTAINERS, "lists and objects"),
        ):
            _check(number, most, f"has more than {most} {what}")
        steps = map(_STEPS.__getitem__, plain.translate(None, _OTHERS))
        depths = list(accumulate(steps, initial=self._depth))
        self._depth = depths[-1]
        _check(max(depths), MAX_DEPTH, f"is nested more than {MAX_DEPTH} deep")


def _check(number: int, most: int, problem: str) -> None:
    if number > most:
        raise ApiError(400, f"the body {problem}", code="body_too_complex")
