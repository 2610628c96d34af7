"""Parsing of bodies: short ones inline, longer ones, which take up to seconds, in threads."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from specdec.openai_api.requests import ParsedRequest, parse
from specdec.serving.bounded_threads import BoundedThreads

SHORT_BODY = 4 << 10
"""Maximum bytes of a body parsed inline, within a few milliseconds."""

LONG_BODY = 64 << 10
"""Size in bytes from which a body counts as long. Long bodies have a separate queue and thread and do not delay
others."""

MAX_WAITING = 1024
MAX_LONG_WAITING = 16
"""Maximum bodies waiting in each of the two queues; one caller gets at most half of the places."""

WAIT_SECONDS = 10.0
"""Maximum wait for a thread in seconds."""


class Parse(Protocol):
    """A function that parses a body."""

    def __call__(self, body: bytes, *, chat: bool) -> ParsedRequest: ...


class Parser:
    """Parses bodies, all but short ones in threads, so that streams continue meanwhile."""

    def __init__(self, parse: Parse = parse) -> None:
        self._parse = parse
        self._bodies = BoundedThreads("bodies", 1, MAX_WAITING)
        self._long_bodies = BoundedThreads("long bodies", 1, MAX_LONG_WAITING)

    async def parse(self, body: bytes, *, chat: bool, caller: str) -> ParsedRequest:
        """Return the parsed request; ApiError if it is invalid or unsupported, OverloadedError if too many bodies
        wait."""
        work = partial(self._parse, body, chat=chat)
        if len(body) <= SHORT_BODY:
            return work()
        threads = self._bodies if len(body) < LONG_BODY else self._long_bodies
        return await threads.run(work, caller, WAIT_SECONDS)
