"""Reads and parses the bodies of requests: short ones inline, others, which may take seconds, in threads."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request

from specdec.grammar.json_schema.text_check import KEYWORDS
from specdec.openai_api.bodies import Bodies
from specdec.openai_api.errors import ApiError
from specdec.openai_api.gateway import Caller
from specdec.serving.bounded_threads import BoundedThreads

Parsed = TypeVar("Parsed")

SHORT_BODY = 4 << 10
"""Maximum bytes of a body parsed inline, which takes a few milliseconds at most."""

SLOW = (*(keyword.encode() for keyword in KEYWORDS), b"structures", rb"\u")
"""A body with one of these texts is never parsed inline: rewriting even a short strict schema with such a keyword, or
the schema of a structural tag, may take 150 ms, and escapes may spell the text."""

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
        """Run `work`, which parses a body of `size` bytes, and return its result; OverloadedError if too many wait, or
        if no thread is free within `WAIT_SECONDS`."""
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


def fields_of(body: bytes) -> dict[str, Any]:
    """Return the fields of a body; ApiError if it is not a JSON object."""
    try:  # only UTF-8, since `structure.py` cannot count other encodings
        found = json.loads(body.decode("utf-8-sig"), parse_constant=_no_number, parse_float=_finite)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid_json(f"is not JSON: {error}") from None
    except ValueError:  # of int(); a function of our own in its place would double the time for token ids
        raise _invalid_json(f"has a number of more than {sys.get_int_max_str_digits()} digits") from None
    if not isinstance(found, dict):
        raise _invalid_json("is not a JSON object")
    return found


def _invalid_json(problem: str) -> ApiError:
    return ApiError(400, f"the body {problem}", code="invalid_json")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):  # an answer may contain it, and JSON has no infinity
        raise _invalid_json(f"has a number that is too large: {text[:20]}")
    return number


def _no_number(name: str) -> None:
    raise _invalid_json(f"is not JSON: {name} is not a number")
