"""Requests of callers beside a lying pod, their results, and the check of the results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from specdec.v2 import generation_pb2, model_pb2
from tests.hostile.standstill import io_stall, standstills, waited_for_a_core
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
"""Statuses that name the error and the party at fault."""

MAX_DETAILS = 1024
"""Maximum bytes of a status's details."""


@dataclass(frozen=True)
class Text:
    """The time-independent part of a completion."""

    tokens: list[int]
    text: str
    reason: int
    logprobs: list[float]
    nonsense: str = field(default="", compare=False)  # impossible statistics

    def __str__(self) -> str:
        return f"{len(self.tokens)} tokens, reason {self.reason}, {self.text[:40]!r}"


@dataclass(frozen=True)
class Outcome:
    """How a request ended."""

    text: Text | None
    received: list[int]  # tokens, whether or not the text was completed
    status: str
    details: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.status} after {self.seconds:.2f} s: {self.text or self.details[:200]}"

    def fault(self, wanted: Text | None, most_seconds: float, *, refusable: bool) -> str:
        """Return the fault; empty if the text equals `wanted` (None: any), or was refused where allowed."""
        if self.seconds > most_seconds:
            return f"took more than {most_seconds:.1f} s: {self}"
        if self.text is not None and wanted not in (None, self.text):
            return f"another text: {self}, not {wanted}"
        if self.text is not None:
            return self.text.nonsense
        if not refusable or self.status not in GOOD:
            return f"no text: {self}"
        if wanted is not None and self.received != wanted.tokens[: len(self.received)]:
            return f"tokens of another text: {self.received} before {self}"
        if len(self.details.encode()) > MAX_DETAILS:
            return f"refused in {len(self.details.encode())} bytes: {self}"
        return ""


async def ask(stub: Any, deadline: float, fields: Mapping[str, Any]) -> Outcome:
    """Stream a completion; `fields` are those of GenerateRequest."""
    begun = time.monotonic()
    call = stub.Generate(request_of(PROMPT, **fields), timeout=deadline)
    responses: list[generation_pb2.GenerateResponse] = []
    text, status, details = None, "OK", ""
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.append(response)
        text = _text_of(responses)
    except grpc.aio.AioRpcError as error:
        status, details = error.code().name, error.details() or ""
    received = [token for response in responses for token in response.tokens]
    return Outcome(text, received, status, details, time.monotonic() - begun)


def _text_of(responses: list[generation_pb2.GenerateResponse]) -> Text:
    return Text(
        tokens=[token for response in responses for token in response.tokens],
        text="".join(response.text for response in responses),
        reason=responses[-1].finish.reason,
        logprobs=[entry.chosen for response in responses for entry in response.logprobs],
        nonsense=_nonsense_of(responses),
    )


def _nonsense_of(responses: list[generation_pb2.GenerateResponse]) -> str:
    """Return impossible values among a text's counts; empty if there are none."""
    count = sum(len(response.tokens) for response in responses)
    sources = [source for response in responses for source in response.sources]
    told = responses[-1].finish.speculation
    if len(sources) != count or sum(told.sources.values()) != count or model_pb2.TOKEN_SOURCE_UNSPECIFIED in sources:
        return f"{count} tokens of {len(sources)} sources, by source {dict(told.sources)}"
    if not count - told.accepted <= told.steps <= count + told.overrun:
        return f"{count} tokens, {told.accepted} accepted, in {told.steps} steps"
    if told.accepted > told.offered:
        return f"{told.accepted} accepted of {told.offered}"
    return ""


@dataclass
class Pulse:
    """The longest response time of a service to its cheapest request."""

    seconds: float = 0.0
    io_stall: float = 0.0  # seconds for which any task of the machine waited for I/O meanwhile; not excluded

    def __str__(self) -> str:
        return f"pulse {self.seconds:.2f} s ({self.io_stall:.2f} s of I/O stalls)"


PULSE_PAUSE = 0.05
"""Seconds between two such requests."""


@asynccontextmanager
async def pulse_of(stub: Any) -> AsyncIterator[Pulse]:
    """List an orchestrator's models again and again. A blocked event loop shows too, since it delays the request and
    its response. The machine's share is excluded: time in which the event loop waited for a core, and pauses in which
    another process stood still as well. The result is set on exit."""
    pulse = Pulse()
    beats: list[tuple[float, float, float, float]] = []  # begin, end, seconds except those of waiting for a core, stall
    answered, waited, stalled = time.monotonic(), waited_for_a_core(), io_stall()

    def note() -> None:
        nonlocal answered, waited, stalled
        now, waited_now, stalled_now = time.monotonic(), waited_for_a_core(), io_stall()
        beats.append((answered, now, now - answered - PULSE_PAUSE - (waited_now - waited), stalled_now - stalled))
        answered, waited, stalled = now, waited_now, stalled_now

    async def feel() -> None:
        while True:
            await stub.ListModels(generation_pb2.ListModelsRequest())
            note()
            await asyncio.sleep(PULSE_PAUSE)

    async with standstills() as machine:
        feeling = asyncio.create_task(feel())
        try:
            yield pulse
        finally:
            feeling.cancel()
            await asyncio.wait({feeling})
            note()
    found = [(seconds - machine.within(begin, end), stall) for begin, end, seconds, stall in beats]
    pulse.seconds, pulse.io_stall = max(found)
    if not feeling.cancelled():
        feeling.result()
