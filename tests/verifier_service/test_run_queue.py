"""The run queue alone: its work stays bounded with many sessions."""

from __future__ import annotations

from typing import Any

from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.decoding.speculation import NO_DRAFTERS
from specdec.engine.kv.blocks import BLOCK, BlockPool
from testing.mailbox import Mailbox
from tests.cpu_time import taking_less_than
from tests.verifier_service.fakes import VOCABULARY, TextEngine
from tests.verifier_service.step_loop.helpers import text
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.backend.stats import VerifierStats
from verifier_service.scheduling.run_queue import RunQueue
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import VerifierSession

SESSIONS = 250
PROMPT = 500 * BLOCK
"""Tokens that all sessions begin with, and share in memory."""

READER_LIMIT = 10


def running(prompt: list[int]) -> RunningSession:
    request = VerifierSessionRequest(prompt, [], RequestSampler(Sampling()), frozenset(), 1, None, 1_000_000)
    session = VerifierSession(request, Policy(NO_DRAFTERS, 0, 0.0), 64, VOCABULARY)
    message: Any = None  # nothing is sent
    return RunningSession(session, Mailbox(), message)


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
