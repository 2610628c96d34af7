"""Ways to behave in a call, whatever its messages: hang up, not read, stay silent, be late.

Every method is called as a bidirectional stream of bytes: the wire knows no other kind.
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
"""Exceptions of reading from or writing to an ended call: CancelledError if cancelled locally."""

MOMENT = 0.3
"""Seconds for which an idle caller keeps its call."""


@dataclass(frozen=True)
class Talk:
    """One call in progress, and the messages to send in it."""

    call: Any
    messages: Sequence[bytes]
    generator: random.Random
    sent: Callable[[bytes], None]  # called with each message
    heard: Callable[[bytes], None]  # called with each response

    async def say(self, count: int | None = None) -> None:
        """Send the first `count` messages, or all, unless the call ends earlier."""
        with contextlib.suppress(*OVER):
            for message in self.messages[:count]:
                await self.call.write(message)
                self.sent(message)

    async def close(self) -> None:
        """Half-close: send nothing more."""
        with contextlib.suppress(*OVER):
            await self.call.done_writing()

    async def listen(self) -> None:
        """Read until the call ends."""
        with contextlib.suppress(*OVER):
            while (answer := await self.call.read()) is not grpc.aio.EOF:
                self.heard(answer)

    async def listen_for(self, seconds: float) -> None:
        """Read for at most `seconds`, then hang up."""
        listening = asyncio.ensure_future(self.listen())
        await asyncio.wait({listening}, timeout=seconds)
        self.call.cancel()
        await listening


async def politely(talk: Talk) -> None:
    """Reads while it sends, half-closes, and waits for the end."""
    listening = asyncio.ensure_future(talk.listen())
    await talk.say()
    await talk.close()
    await asyncio.wait({listening}, timeout=MOMENT)  # a draft's sessions last until the caller leaves
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
    """Hangs up at any point of the conversation."""
    await talk.say(talk.generator.randrange(len(talk.messages) + 1))
    if talk.generator.random() < 0.5:
        await talk.listen_for(0.05 * talk.generator.random())
    talk.call.cancel()


async def half_closing_at_once(talk: Talk) -> None:
    await talk.close()
    await talk.listen_for(MOMENT)


async def silently(talk: Talk) -> None:
    """Opens the stream and sends nothing."""
    await talk.listen_for(MOMENT)


@dataclass(frozen=True)
class Conduct:
    """A way to behave, the deadlines of its calls in seconds, and its relative frequency."""

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
"""Possible metadata of a call."""
