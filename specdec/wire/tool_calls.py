"""An incremental parser of tool calls in a model's text."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from specdec.wire.cut_calls import cut_calls
from specdec.wire.overlap import overlap
from specdec.wire.tool_formats import ToolCall as ToolCall
from specdec.wire.tool_formats import ToolFormat
from specdec.wire.tool_scanner import Cursor, Scan, Schemas, scan


class ToolCallReader:
    """Reads one text, in time linear in its length. A failed call is yielded as text; white space after calls is
    dropped."""

    def __init__(
        self, tool_format: ToolFormat, schemas: Schemas = MappingProxyType({}), *, only_calls: bool = False
    ) -> None:
        """`schemas`: JSON schemas of the arguments, by function name. They decide whether a value is a string in
        formats that do not quote strings, and whether a JSON object is a call in formats without a marker.
        `only_calls`: calls are forced, so the text contains nothing else."""
        self._format = tool_format
        self._schemas = schemas
        self._only_calls = only_calls
        self._held: list[str] = []  # not yielded yet: possibly a call or its beginning
        self._cursor = Cursor()
        self._scan: Scan | None = None  # of the held text, once its marker is complete
        self._said = False  # text other than white space was yielded
        self._behind_call = False  # the last item yielded was a call

    def push(self, text: str) -> Iterator[str | ToolCall]:
        """Take a piece of the text; yield everything that is certain so far: text, and complete calls."""
        if text:
            yield from self._read(text)

    def finish(self, *, cut: bool = False) -> Iterator[str | ToolCall]:
        """Yield the rest at the end of the text. `cut`: the text was cut off, so an unfinished call is yielded with its
        partial arguments, which are not valid JSON. An unfinished marker after a call is then dropped. With
        `only_calls`, an unfinished call is also dropped if its function's name is incomplete."""
        held = "".join(self._held)
        of_marker = self._scan is None and self._behind_call and self._format.marker.startswith(held.strip())
        begun: list[str | ToolCall] = []
        if cut and self._scan is not None:
            begun += cut_calls(held[len(self._format.marker) :], self._format, self._schemas)
        self._cursor.over = True
        rest = list(self._read(""))
        behind = rest[-1] if len(rest) > 1 and isinstance(rest[-2], ToolCall) else None  # what follows the last call
        if len(begun) > sum(isinstance(item, ToolCall) for item in rest):
            rest = begun
        elif cut and isinstance(behind, str) and self._format.begins_tag(behind.strip()):
            rest.pop()
        if cut and (self._only_calls or of_marker):
            rest = [item for item in rest if isinstance(item, ToolCall)]
        yield from rest

    def _read(self, text: str) -> Iterator[str | ToolCall]:
        marker, cursor = self._format.marker, self._cursor
        begin: int | None = None  # where the scanned call begins in `text`; None: in the held text
        if self._scan is None:
            text, self._held = "".join((*self._held, text)), []
        cursor.push(text)
        while True:
            if self._scan is None:
                begin = self._beginning(text, cursor.at)
                yield from self._tell(text[cursor.at : begin])
                if not text.startswith(marker, begin) or (not marker and begin == len(text)):
                    self._held = [text[begin:]]
                    return
                cursor.at = begin + len(marker)
                self._scan = scan(cursor, self._format, self._schemas)
            try:
                next(self._scan)
            except StopIteration as ended:
                self._scan = None
                if begin is None and (ended.value is None or cursor.at < 0):  # read the held text again
                    held = "".join(self._held)
                    text, cursor.at = held + text, cursor.at + len(held)
                    cursor.text, begin = text, 0
                self._held = []
                if ended.value is None:
                    assert begin is not None
                    cursor.at = begin + len(marker) if marker else len(text)
                    yield from self._tell(text[begin : cursor.at])
                else:
                    self._behind_call = True
                    yield from ended.value
            else:
                self._held.append(text if begin is None else text[begin:])
                return

    def _beginning(self, text: str, at: int) -> int:
        """Return the first place from `at` where a call begins, or may begin depending on the next piece."""
        marker = self._format.marker
        if not marker:  # the whole text must be calls
            return len(text) if self._said else at
        found = text.find(marker, at)
        if found >= 0:
            return found
        return len(text) if self._cursor.over else len(text) - overlap(text, marker, at)

    def _tell(self, text: str) -> Iterator[str]:
        if self._behind_call:
            text = text.lstrip()
        if text:
            self._behind_call, self._said = False, self._said or not text.isspace()
            yield text
