"""Parsing of bodies, of which a short one takes no time worth a thread, and a long one seconds."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from specdec.openai_api.requests import Asked, parse
from specdec.serving.bounded_threads import BoundedThreads

SHORT_BODY = 4 << 10
"""Bytes of a body that is parsed at once, in a few milliseconds at most."""

LONG_BODY = 64 << 10
"""Bytes of a body from which on few may wait. Shorter ones do not wait behind it."""

MOST_WAITING = 1024
MOST_LONG_WAITING = 16
"""Bodies of each of the two kinds that may wait for its thread; one caller's take half of the places at most."""

WAIT_SECONDS = 10.0
"""Seconds for which a body waits for its thread."""


class Parse(Protocol):
    """A function that makes a request of a body."""

    def __call__(self, body: bytes, *, chat: bool) -> Asked: ...


class Parser:
    """Parses bodies, all but short ones in threads: streams go on meanwhile."""

    def __init__(self, parse: Parse = parse) -> None:
        self._parse = parse
        self._bodies = BoundedThreads("bodies", 1, MOST_WAITING)
        self._long_bodies = BoundedThreads("long bodies", 1, MOST_LONG_WAITING)

    async def parse(self, body: bytes, *, chat: bool, caller: str) -> Asked:
        """Return what a caller asks for; ApiError if that cannot be honoured, OverloadedError if too many wait."""
        work = partial(self._parse, body, chat=chat)
        if len(body) <= SHORT_BODY:
            return work()
        threads = self._bodies if len(body) < LONG_BODY else self._long_bodies
        return await threads.run(work, caller, WAIT_SECONDS)
