"""The growth loop over many sessions: everybody gets a turn, nobody is stalled by another."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.simulation import clock
from draft_service.growth_loop import Attached, GrowthLoop
from draft_service.session import Extension, GrowthPolicy, Session, SessionRequest
from specdec.decoding.calibration import Calibration
from specdec.decoding.choice import Chooser
from specdec.decoding.sampling import Sampling
from specdec.engine.batch import PackedBatch
from specdec.engine.kv import PoolFullError, Slots
from specdec.engine.paths import PathPacker

VOCABULARY = 16
ROWS = 16


class Engine:
    """As sure of every next token as `sureness`, the same one everywhere."""

    numerics, exact, vocabulary = "fake", False, VOCABULARY
    threads: tuple[int, ...] = (1,)

    def __init__(self, capacity: int = 100_000, sureness: float = 5.0) -> None:
        self.capacity = capacity
        self.sureness = sureness
        self.read: list[list[int]] = []  # tokens of each step

    def packer(self) -> PathPacker:
        return PathPacker()

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        self.read.append(batch.tokens.tolist())
        logits = np.linspace(0.0, -8.0, VOCABULARY, dtype=np.float32)
        logits[7] = self.sureness
        return np.tile(logits, (len(batch.wanted), 1))

    def copy(self, source: Slots, target: Slots) -> None:
        raise AssertionError("nothing is copied")

    def use_threads(self, count: int) -> None:
        raise AssertionError("there is one")


def session(tokens: int = 200, **policy: Any) -> Session:
    request = SessionRequest([1, 2, 3], [], Chooser(Sampling()), frozenset(), tokens, 10_000)
    return Session(request, GrowthPolicy(**policy), VOCABULARY, Calibration())


class Pod:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = GrowthLoop(engine, rows=ROWS)
        self.sent: dict[int, list[Extension]] = {}
        self.failed: list[Exception] = []

    def attach(self, session: Session) -> None:
        sent = self.sent[id(session)] = []
        self.loop.attach(Attached(session, sent.append, self.failed.append))

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.loop.turn()


def test_everybody_gets_a_turn() -> None:
    """Many more sessions than a step has rows: each is the likeliest some time, since growing makes what is left
    less likely."""
    pod = Pod(Engine())
    sessions = [session() for _ in range(4 * ROWS)]
    for each in sessions:
        pod.attach(each)
    pod.run(1 + 8 * 4)  # the texts are read; eight levels for each
    sizes = [each.tree.size for each in sessions]
    assert min(sizes) >= 0.5 * max(sizes) > 0
    assert all(len(tokens) <= ROWS for tokens in pod.engine.read[1:])


def test_who_does_not_listen_is_grown_no_further() -> None:
    """There are at most as many messages for it as it has nodes; the others go on."""
    pod = Pod(Engine())
    deaf, listening = session(max_nodes=24), session(max_nodes=24)
    pod.attach(deaf)
    pod.attach(listening)
    for _ in range(20):
        pod.run(40)
        listening.commit(listening.tree.base, [7])
    assert deaf.tree.size == 24
    assert len(pod.sent[id(deaf)]) <= 24
    assert listening.tree.base == 23
    assert {extension.base for extension in pod.sent[id(listening)]} == set(range(3, 23))


def test_with_nothing_worth_guessing_it_sleeps() -> None:
    pod = Pod(Engine())
    pod.attach(session(max_nodes=8))
    pod.run(40)
    assert pod.loop.turn() is None


def test_a_verdict_takes_effect_at_the_next_step() -> None:
    """Nothing is read below what it has cut off, and catching up is one step."""
    pod = Pod(Engine())
    each = session()
    pod.attach(each)
    pod.run(10)
    each.commit(3, [7, 7, 5])  # two as guessed, then another token
    steps = len(pod.engine.read)
    pod.run(2)
    caught_up, grown = pod.engine.read[steps:]
    assert caught_up == [5]
    assert set(grown) <= {node.token for node in each.tree.root.walk()}
    last = pod.sent[id(each)][-1]
    assert last.base == 6
    assert last.paths.tokens


def test_the_loop_wakes_when_a_message_is_due_and_nothing_else_happens() -> None:
    """With a tree as large as it may be, it sleeps until just before the next step of the verifier begins."""
    period, round_trip = 0.030, 0.006
    sent: list[tuple[float, Extension]] = []
    failed: list[Exception] = []

    async def main() -> None:
        loop = GrowthLoop(Engine(), rows=ROWS)
        each = session(max_nodes=8, extend_interval=period, round_trip=round_trip)
        loop.attach(Attached(each, lambda extension: sent.append((time.monotonic(), extension)), failed.append))
        for _ in range(40):
            commit = time.monotonic()
            each.heard(commit)
            each.commit(each.tree.base, [7])
            while True:  # as a worker does
                wait = loop.turn()
                left = commit + period - time.monotonic()
                if wait is None or wait >= left:
                    break
                await asyncio.sleep(wait)
            await asyncio.sleep(max(0.0, left))
            if len(sent) > 20:
                when, last = sent[-1]
                assert commit + period - round_trip - 0.001 < when < commit + period - round_trip
                assert last.base == each.tree.base
                assert last.held == pytest.approx(when - commit, abs=1e-6)

    clock.run(main())
    assert len(sent) >= 39
    assert not failed


def test_memory_is_for_who_has_it() -> None:
    """A session too many is refused, the others keep growing, and what one leaves serves the next."""
    pod = Pod(Engine(capacity=1 + 2 * (3 + 200 + 256)))
    first, second, third = session(), session(), session()
    pod.attach(first)
    pod.attach(second)
    with pytest.raises(PoolFullError):
        pod.attach(third)
    pod.run(5)
    assert first.tree.size
    assert second.tree.size
    pod.loop.detach(first)
    pod.attach(third)
    pod.run(5)
    assert third.tree.size
    pod.loop.detach(second)
    pod.loop.detach(third)
    assert pod.loop.slots_used == 0


def test_a_failed_step_ends_its_sessions_and_not_the_loop() -> None:
    pod = Pod(Engine())
    lost = session()
    pod.attach(lost)
    forward, pod.engine.forward = pod.engine.forward, _fail  # type: ignore[method-assign]
    pod.run(1)
    assert [str(error) for error in pod.failed] == ["broken"]
    pod.engine.forward = forward  # type: ignore[method-assign]
    new = session()
    pod.attach(new)
    pod.run(5)
    assert new.tree.size
    assert not lost.tree.size


def _fail(batch: PackedBatch) -> NDArray[np.float32]:
    raise RuntimeError("broken")
