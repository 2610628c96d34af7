"""An answer as seen by its client, with its latencies; and Poisson arrival times for an open loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from specdec.client import AsyncStream


@dataclass
class Answer:
    """An answer to a streamed request; times are by perf_counter."""

    begin: float = field(default_factory=time.perf_counter)
    pieces: list[float] = field(default_factory=list)  # arrivals of pieces of text
    tokens: int = 0
    tokens_are_pieces: bool = False  # True: the server did not report the number of tokens
    end: float | None = None  # None: it has not ended
    error: str | None = None  # name of the error that ended it; None: no error so far
    message: str = ""  # of the error

    def piece(self, tokens: int) -> None:
        """Record the arrival of a piece with a number of tokens."""
        self.pieces.append(time.perf_counter())
        self.tokens += tokens

    async def record(self, stream: AsyncStream) -> Self:
        """Record a stream to its end, and return this answer; an error of the stream is raised."""
        async with stream:
            async for chunk in stream:
                if chunk.tokens:
                    self.piece(len(chunk.tokens))
        self.finish()
        return self

    def finish(self, error: str | None = None, message: str = "") -> None:
        self.end, self.error, self.message = time.perf_counter(), error, message

    @property
    def complete(self) -> bool:
        return self.end is not None and self.error is None

    @property
    def first(self) -> float:
        """Seconds to the first token (TTFT); infinity if there was none."""
        return self.pieces[0] - self.begin if self.pieces else float("inf")

    @property
    def seconds(self) -> float:
        """Seconds to the end; for an answer that has not ended, infinity."""
        return float("inf") if self.end is None else self.end - self.begin

    @property
    def a_token(self) -> float | None:
        """Seconds from the first piece to the last, divided by the tokens less one (TPOT); None for a single token or
        piece."""
        if len(self.pieces) < 2 or self.tokens < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1)

    @property
    def pauses(self) -> list[float]:
        """Seconds between consecutive pieces (ITL); a piece may have several tokens."""
        return [after - before for before, after in pairwise(self.pieces)]


def completed(answers: Iterable[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.complete]


async def at_poisson_times(rate: float, seconds: float, seed: int) -> AsyncIterator[float]:
    """Sleep until each arrival of a Poisson process of `rate` per second, for `seconds`; yield its due time in seconds
    since the start."""
    dice, begin, due = random.Random(seed), time.perf_counter(), 0.0
    while (due := due + dice.expovariate(rate)) <= seconds:
        await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        yield due
