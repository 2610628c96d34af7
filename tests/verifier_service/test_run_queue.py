"""The run queue alone: its work stays bounded with many sessions."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.decoding.speculation import NO_DRAFTERS
from specdec.engine.kv.blocks import BLOCK, BlockPool, BlockTable
from specdec.engine.kv.slots import Slots
from testing.mailbox import Mailbox
from tests.cpu_time import taking_less_than
from tests.replay.clock import Clock
from tests.verifier_service.fakes import VOCABULARY, TextEngine
from tests.verifier_service.step_loop.helpers import text
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.backend.stats import VerifierStats
from verifier_service.scheduling.run_queue import ADMISSION_RETRY_SECONDS, RunQueue
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import VerifierSession

SESSIONS = 250
PROMPT = 500 * BLOCK
"""Tokens that all sessions begin with, and share in memory."""

READER_LIMIT = 10


def running(prompt: list[int]) -> RunningSession:
    request = VerifierSessionRequest(prompt, [], RequestSampler(Sampling()), frozenset(), 1, None, 1_000_000)
    session = VerifierSession(request, Policy(NO_DRAFTERS, 0, 0.0), 64, VOCABULARY)
    return RunningSession(session, Mailbox())


def test_a_prompt_that_waits_for_memory_costs_little_beside_many_throttled_texts() -> None:
    """Every step tries to admit it."""
    blocks = PROMPT // BLOCK + 2 * SESSIONS
    engine = TextEngine(blocks, 0)
    queue = RunQueue(engine, BlockPool(blocks), VerifierStats(), READER_LIMIT, lambda _: None)
    prompt = text(PROMPT, 1)
    throttled = [running([*prompt, 2]) for _ in range(SESSIONS)]
    for entry in throttled:
        queue.add(entry)
        queue.admit()
        assert entry.session.table is not None
        entry.session.table.publish(prompt, PROMPT)
        entry.session.consumed = 0
    large = running(text(2 * blocks * BLOCK, 2))
    queue.add(large)
    with taking_less_than(0.1):
        queue.admit()
    assert queue.running == throttled
    assert not any(entry.preemptions for entry in throttled)


class CountingPool(BlockPool):
    opened = 0

    def open(self, tokens: Sequence[int], scope: bytes = b"") -> tuple[BlockTable, Slots, Slots]:
        self.opened += 1
        return super().open(tokens, scope)


class Full:
    """A queue with a running session, and one too large for the rest of the memory, whose prefix the other shares."""

    def __init__(self) -> None:
        blocks = 2 * PROMPT // BLOCK
        self.pool = CountingPool(blocks)
        self.queue = RunQueue(TextEngine(blocks, 0), self.pool, VerifierStats(), READER_LIMIT, lambda _: None)
        prompt = text(PROMPT, 1)
        self.first, self.large = running(prompt), running([*prompt, *text(PROMPT + 2 * BLOCK, 2)])
        self.queue.add(self.first)
        self.queue.admit()
        assert self.first.session.table is not None
        self.first.session.table.publish(prompt, PROMPT)
        self.queue.add(self.large)

    def tries(self, turns: int) -> int:
        """Return the number of tries of the large session in `turns` steps."""
        before = self.pool.opened
        for _ in range(turns):
            self.queue.admit()
        return self.pool.opened - before


def test_a_session_that_does_not_fit_is_tried_again_only_now_and_then() -> None:
    """Each try walks its cached prefix, and every step tries."""
    clock = Clock()
    with clock.rules():
        full = Full()
        assert full.tries(turns=200) == 1
        clock.now += ADMISSION_RETRY_SECONDS
        assert full.tries(turns=200) == 1
        full.queue.remove(full.first.session)  # its own blocks become available
        assert full.tries(turns=1) == 1


def test_a_session_that_does_not_fit_is_tried_at_once_where_no_step_follows() -> None:
    """The loop would sleep, although the session could have the memory of one whose reader has stopped."""
    with Clock().rules():
        full = Full()
        assert full.tries(turns=1) == 1
        full.first.session.consumed = 0
        assert full.tries(turns=1) == 1
