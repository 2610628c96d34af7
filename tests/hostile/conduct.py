"""Ways to behave in a call, whatever is said in it: to hang up, not to read, to be silent, to be late.

Every method is called as a stream both ways, of bytes: on the wire there is no other kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

OVER = (asyncio.InvalidStateError, grpc.aio.BaseError, grpc.aio.AioRpcError, asyncio.CancelledError)
"""What reading from or writing to a call that has ended raises: CancelledError where it was cancelled from here."""

MOMENT = 0.3
"""Seconds that a caller who does nothing more keeps its call."""


@dataclass(frozen=True)
class Talk:
    """One call under way, and what is to be said in it."""

    call: Any
    messages: Sequence[bytes]
    generator: random.Random
    sent: Callable[[bytes], None]  # called with each message
    heard: Callable[[bytes], None]  # called with each answer

    async def say(self, count: int | None = None) -> None:
        """Send the first `count` messages, or all, unless the call ends before."""
        with contextlib.suppress(*OVER):
            for message in self.messages[:count]:
                await self.call.write(message)
                self.sent(message)

    async def close(self) -> None:
        """Half-close: nothing more is said from here."""
        with contextlib.suppress(*OVER):
            await self.call.done_writing()

    async def listen(self) -> None:
        """Read until the call ends."""
        with contextlib.suppress(*OVER):
            while (answer := await self.call.read()) is not grpc.aio.EOF:
                self.heard(answer)

    async def listen_for(self, seconds: float) -> None:
        """Read for so long at most, and hang up."""
        listening = asyncio.ensure_future(self.listen())
        await asyncio.wait({listening}, timeout=seconds)
        self.call.cancel()
        await listening


async def politely(talk: Talk) -> None:
    """Reads while it speaks, half-closes, and waits for the end."""
    listening = asyncio.ensure_future(talk.listen())
    await talk.say()
    await talk.close()
    await asyncio.wait({listening}, timeout=MOMENT)  # sessions of a draft go on until they are left
    talk.call.cancel()
    await listening


async def without_half_closing(talk: Talk) -> None:
    await talk.say()
    await talk.listen_for(MOMENT * talk.generator.random())


async def without_reading(talk: Talk) -> None:
    await talk.say()
    await asyncio.wait({asyncio.ensure_future(talk.call.code())}, timeout=MOMENT)
    talk.call.cancel()


async def hanging_up(talk: Talk) -> None:
    """At any point, mid-sentence."""
    await talk.say(talk.generator.randrange(len(talk.messages) + 1))
    if talk.generator.random() < 0.5:
        await talk.listen_for(0.05 * talk.generator.random())
    talk.call.cancel()


async def half_closing_at_once(talk: Talk) -> None:
    await talk.close()
    await talk.listen_for(MOMENT)


async def silently(talk: Talk) -> None:
    """Opens the stream and says nothing."""
    await talk.listen_for(MOMENT)


@dataclass(frozen=True)
class Conduct:
    """A way to behave, the deadlines of its calls in seconds, and how often it is chosen."""

    behave: Callable[[Talk], Awaitable[None]]
    weight: int
    deadlines: tuple[float, ...] = (0.1, 2.0, 5.0)


CONDUCTS: dict[str, Conduct] = {
    "politely": Conduct(politely, 10),
    "without half-closing": Conduct(without_half_closing, 6),
    "without reading": Conduct(without_reading, 3),
    "hanging up": Conduct(hanging_up, 6),
    "half-closing at once": Conduct(half_closing_at_once, 2),
    "silently": Conduct(silently, 1),
    "late": Conduct(politely, 4, deadlines=(0.001, 0.003)),
}

Metadata = tuple[tuple[str, str | bytes], ...]

METADATA: tuple[Metadata, ...] = (
    (("x-request-id", "r" * 4000),),
    (("x-request-id", '"} {"level":"error"'),),
    (("x-request-id", ""), ("x-request-id", "twice")),
    (("grpc-status-details-bin", b"\xff\x00\xfe"), ("x-other-bin", bytes(2000))),
    tuple((f"x-header-{number}", "v" * 50) for number in range(40)),
)
"""What may come beside a call."""
