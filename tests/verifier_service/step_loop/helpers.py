"""Clients of a hand-driven step loop over an engine that detects every wrong slot.

Nothing here depends on time: costs are fixed, sessions have no patience, and turns are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.query import TokenMask
from specdec.decoding.sampling import Sampling
from specdec.decoding.speculation import CandidateSource
from tests.replay.clock import Clock
from tests.verifier_service.fakes import BAD, Client, TextEngine
from verifier_service.scheduling.memory_forecast import TextLengths
from verifier_service.step_loop import StepLoop

REMOTE = frozenset({CandidateSource.REMOTE})

NO_BAD = Sampling(banned_tokens=frozenset({BAD}))
WARM = Sampling(temperature=0.9, seed=5, banned_tokens=frozenset({BAD}))
SAMPLINGS = [
    NO_BAD,
    WARM,
    Sampling(temperature=1.0, seed=3, top_k=4, repetition_penalty=1.3, banned_tokens=frozenset({BAD})),
    Sampling(
        temperature=0.9,
        seed=5,
        banned_tokens=frozenset({BAD}),
        banned_sequences=frozenset(
            [(one, other) for one in range(BAD) for other in range(BAD) if (one + 2 * other) % 3 == 0]
            + [(one, 2, other) for one in range(BAD) for other in range(3, 8)]
        ),
    ),
]


def text(length: int, seed: int) -> list[int]:
    """Return a random text of ordinary tokens."""
    return [int(token) for token in np.random.default_rng([seed, length]).integers(2, BAD, length)]


def client(loop: StepLoop, length: int = 5, seed: int = 0, max_tokens: int = 20, **fields: Any) -> Client:
    return Client(loop, text(length, seed), max_tokens, **{"sampling": NO_BAD} | fields)


class NoGrowth(TextLengths):
    """Expects every text to end immediately."""

    def expected(self, generated: NDArray[np.int64]) -> NDArray[np.int64]:
        return generated


def expect_no_growth(loop: StepLoop) -> None:
    """Make the loop admit sessions without regard to their growth."""
    loop._queue.lengths = NoGrowth()


def turns(loop: StepLoop, count: int) -> None:
    for _ in range(count):
        assert loop.turn() == 0.0


def check_over(loop: StepLoop, engine: TextEngine, *clients: Client) -> None:
    """Check that all clients got their tokens and nothing is left allocated."""
    for each in clients:
        assert each.mail.error is None
        assert each.tokens == each.want
        assert not each.has_memory
    assert engine.faults == []
    assert loop.pool.held == 0
    assert (loop.stats.running, loop.stats.waiting) == (0, 0)
    assert loop.turn() is None


class SlowGrammar:
    """Allows everything, and takes `seconds` for each mask."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def allowed(self, path: Sequence[int]) -> TokenMask | None:
        if not path:
            self._clock.now += self._seconds
        return None

    def forced(self) -> list[int]:
        return []

    def permits(self, path: Sequence[int], token: int) -> bool:
        return True

    def commit(self, tokens: Sequence[int]) -> None:
        pass
