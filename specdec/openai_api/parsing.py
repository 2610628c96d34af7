"""Reads and parses the bodies of requests: short ones inline, others, which may take seconds, in threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request

from specdec.grammar.json_schema.text_check import KEYWORDS
from specdec.openai_api.bodies import Bodies
from specdec.openai_api.gateway import Caller
from specdec.openai_api.requests import fields_of
from specdec.serving.bounded_threads import BoundedThreads

Parsed = TypeVar("Parsed")

SHORT_BODY = 4 << 10
"""Maximum bytes of a body parsed inline, which takes a few milliseconds at most."""

SLOW = (*(keyword.encode() for keyword in KEYWORDS), rb"\u")
"""A body with one of these texts is never parsed inline: rewriting even a short strict schema with such a keyword may
take 150 ms, and escapes may spell the keyword."""

LONG_BODY = 64 << 10
"""Minimum bytes of a long body. Long bodies have a separate queue and thread, so that they do not delay others."""

MAX_WAITING = 1024
MAX_LONG_WAITING = 16
"""Maximum bodies waiting in each of the two queues; one caller gets at most half of a queue."""

WAIT_SECONDS = 10.0
"""Maximum seconds of waiting for a thread."""


class Parser:
    """Parses bodies: short ones inline, others in threads, so that streams continue meanwhile."""

    def __init__(self) -> None:
        self._bodies = BoundedThreads("bodies", 1, MAX_WAITING)
        self._long_bodies = BoundedThreads("long bodies", 1, MAX_LONG_WAITING)

    async def parse(self, size: int, work: Callable[[], Parsed], caller: str) -> Parsed:
        """Run `work`, which parses a body of `size` bytes, and return its result; OverloadedError if too many wait."""
        if size <= SHORT_BODY:
            return work()
        threads = self._bodies if size < LONG_BODY else self._long_bodies
        return await threads.run(work, caller, WAIT_SECONDS)


Content = TypeVar("Content", covariant=True)


class Parse(Protocol[Content]):
    """Parses the fields of a body into a request; with `strict`, it refuses unknown fields."""

    def __call__(self, fields: Mapping[str, Any], *, strict: bool) -> Content: ...


@dataclass(frozen=True)
class TakenRequest(Generic[Parsed]):
    """A parsed request."""

    request: Parsed
    size: int  # bytes of the body; more than SHORT_BODY if its parsing may be slow
    caller: Caller
    owner: str  # the caller's name in the limits per caller


@dataclass(frozen=True)
class Intake:
    """Reads and parses the bodies of all endpoints. `who` returns a request's caller for orchestrators, and the
    caller's name in the limits per caller."""

    parser: Parser
    bodies: Bodies
    who: Callable[[Request], tuple[Caller, str]]
    strict: bool = False

    async def take(self, http: Request, parse: Parse[Parsed]) -> TakenRequest[Parsed]:
        """Read and parse a request's body."""
        caller, owner = self.who(http)
        body = await self.bodies.read(http, owner)
        size = max(len(body), SHORT_BODY + 1) if any(text in body for text in SLOW) else len(body)
        request = await self.parser.parse(size, lambda: parse(fields_of(body), strict=self.strict), owner)
        return TakenRequest(request, size, caller, owner)
