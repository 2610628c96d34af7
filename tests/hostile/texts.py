"""What callers ask for while somebody lies, what they get, and whether that is as it should be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from specdec.v1 import generation_pb2
from tests.stack import request_of

PROMPT = [50, 60, 70, 80, 90]

GOOD = frozenset(
    {
        "INVALID_ARGUMENT",
        "FAILED_PRECONDITION",
        "RESOURCE_EXHAUSTED",
        "UNIMPLEMENTED",
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
    }
)
"""Statuses that say what is wrong, and whose fault it is."""

MOST_DETAILS = 1024
"""Bytes of what is said with one."""


@dataclass(frozen=True)
class Text:
    """A completion as far as it does not depend on time."""

    tokens: list[int]
    text: str
    reason: int
    logprobs: list[float]

    def __str__(self) -> str:
        return f"{len(self.tokens)} tokens, reason {self.reason}, {self.text[:40]!r}"


@dataclass(frozen=True)
class Outcome:
    """How a request ended."""

    text: Text | None
    status: str
    details: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.status} after {self.seconds:.2f} s: {self.text or self.details[:200]}"

    def fault(self, wanted: Text | None, most_seconds: float, *, refusable: bool) -> str:
        """What is wrong with it; empty if the text is the `wanted` one (None: any), or is refused as it may be."""
        if self.seconds > most_seconds:
            return f"took more than {most_seconds:.1f} s: {self}"
        if self.text is not None:
            return "" if wanted in (None, self.text) else f"another text: {self}, not {wanted}"
        if not refusable or self.status not in GOOD:
            return f"no text: {self}"
        if len(self.details.encode()) > MOST_DETAILS:
            return f"refused in {len(self.details.encode())} bytes: {self}"
        return ""


async def ask(stub: Any, deadline: float, fields: Mapping[str, Any]) -> Outcome:
    """Ask for a completion, as a stream; `fields` are those of GenerateRequest."""
    begun = time.monotonic()
    request = request_of(PROMPT, **{name: value for name, value in fields.items() if name != "prompt"})
    call = stub.Generate(request, timeout=deadline)
    try:
        responses = [response async for response in call]
    except grpc.aio.AioRpcError as error:
        return Outcome(None, error.code().name, error.details() or "", time.monotonic() - begun)
    return Outcome(_text_of(responses), "OK", "", time.monotonic() - begun)


def _text_of(responses: list[generation_pb2.GenerateResponse]) -> Text:
    return Text(
        tokens=[token for response in responses for token in response.tokens],
        text="".join(response.text for response in responses),
        reason=responses[-1].finish.reason if responses else 0,
        logprobs=[entry.chosen for response in responses for entry in response.logprobs],
    )


@dataclass
class Pulse:
    """The longest time that a service took to answer the least of all questions."""

    seconds: float = 0.0


@asynccontextmanager
async def pulse_of(stub: Any) -> AsyncIterator[Pulse]:
    """Ask an orchestrator for its models, again and again."""
    pulse = Pulse()

    async def feel() -> None:
        while True:
            begun = time.monotonic()
            await stub.ListModels(generation_pb2.ListModelsRequest())
            pulse.seconds = max(pulse.seconds, time.monotonic() - begun)
            await asyncio.sleep(0.05)

    feeling = asyncio.create_task(feel())
    try:
        yield pulse
    finally:
        feeling.cancel()
        await asyncio.wait({feeling})
        if not feeling.cancelled():
            feeling.result()
