"""What callers ask for while somebody lies, what they get, and whether that is as it should be."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from specdec.v2 import generation_pb2, model_pb2
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
    nonsense: str = field(default="", compare=False)  # in what is told of how it came about

    def __str__(self) -> str:
        return f"{len(self.tokens)} tokens, reason {self.reason}, {self.text[:40]!r}"


@dataclass(frozen=True)
class Outcome:
    """How a request ended."""

    text: Text | None
    received: list[int]  # tokens, whether or not the text came to its end
    status: str
    details: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.status} after {self.seconds:.2f} s: {self.text or self.details[:200]}"

    def fault(self, wanted: Text | None, most_seconds: float, *, refusable: bool) -> str:
        """What is wrong with it; empty if the text is the `wanted` one (None: any), or is refused as it may be."""
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
        if len(self.details.encode()) > MOST_DETAILS:
            return f"refused in {len(self.details.encode())} bytes: {self}"
        return ""


async def ask(stub: Any, deadline: float, fields: Mapping[str, Any]) -> Outcome:
    """Ask for a completion, as a stream; `fields` are those of GenerateRequest."""
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
    """What cannot be of the counts that came with a text; empty if all is well."""
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
    """The longest time that a service took to answer the least of all questions."""

    seconds: float = 0.0


PULSE_PAUSE = 0.05
"""Seconds between two such questions."""


def waited_for_a_core() -> float:
    """Return the seconds for which this thread could have run, and others did; 0 where the kernel does not tell."""
    try:
        return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


@asynccontextmanager
async def pulse_of(stub: Any) -> AsyncIterator[Pulse]:
    """Ask an orchestrator for its models, again and again. An event loop that stands still is noticed too: the question
    is late, and so is its answer. Time in which the event loop has waited for a core is the machine's, not ours."""
    pulse, answered, waited = Pulse(), time.monotonic(), waited_for_a_core()

    def note() -> None:
        nonlocal answered, waited
        now, waited_now = time.monotonic(), waited_for_a_core()
        pulse.seconds = max(pulse.seconds, now - answered - PULSE_PAUSE - (waited_now - waited))
        answered, waited = now, waited_now

    async def feel() -> None:
        while True:
            await stub.ListModels(generation_pb2.ListModelsRequest())
            note()
            await asyncio.sleep(PULSE_PAUSE)

    feeling = asyncio.create_task(feel())
    try:
        yield pulse
    finally:
        feeling.cancel()
        await asyncio.wait({feeling})
        note()
        if not feeling.cancelled():
            feeling.result()
