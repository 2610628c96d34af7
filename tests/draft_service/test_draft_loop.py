"""The draft loop over many sessions: fair turns, and no session stalls another."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from draft_service.candidate_queue import Extension
from draft_service.draft_loop import DraftLoop
from draft_service.language_model import PROMPT_WIDTHS, LanguageModelDrafter
from draft_service.pass_times import PassTimes
from evaluation import virtual_time
from specdec.engine.batch import PackedBatch
from specdec.engine.cpu.layout import RaggedPacker
from specdec.engine.kv.slots import PoolFullError
from specdec.serving.engine_worker import CHECK_SECONDS
from specdec.serving.errors import EngineLostError, ModelFailureError
from tests.draft_service.fakes import ROWS, Engine, Listener, Pod, running, session


def test_everybody_gets_a_turn() -> None:
    """There are far more sessions than rows in a step. Growth lowers a session's best path logprob, so every other
    session gets ahead at some time."""
    pod = Pod(Engine())
    sessions = [session() for _ in range(4 * ROWS)]
    for each in sessions:
        pod.attach(each)
    pod.run(1 + 8 * 4)  # prompts, then eight levels each
    sizes = [each.tree.size for each in sessions]
    assert min(sizes) >= 0.5 * max(sizes) > 0
    assert all(len(tokens) <= ROWS for tokens in pod.engine.read[1:])


def test_who_does_not_listen_is_grown_no_further() -> None:
    """A session without a reader has no more pending messages than nodes; the others go on."""
    pod = Pod(Engine())
    deaf, listening = session(max_nodes=24), session(max_nodes=24)
    pod.attach(deaf)
    pod.attach(listening)
    for _ in range(20):
        pod.run(40)
        pod.commit(listening, [7])
    assert deaf.tree.size == 24
    assert len(pod.sent[id(deaf)]) <= 24
    assert listening.tree.base == 23
    assert {extension.base for extension in pod.sent[id(listening)]} == set(range(3, 23))


def test_with_nothing_worth_guessing_it_sleeps() -> None:
    pod = Pod(Engine())
    pod.attach(session(max_nodes=8))
    pod.run(40)
    assert pod.loop.turn() is None


def test_a_commit_takes_effect_at_the_next_step() -> None:
    """Nodes below a rejected token are not computed, and catching up takes one step."""
    pod = Pod(Engine())
    each = session()
    pod.attach(each)
    pod.run(10)
    pod.commit(each, [7, 7, 5])  # two as drafted, then another token
    steps = len(pod.engine.read)
    pod.run(2)
    caught_up, grown = pod.engine.read[steps:]
    assert caught_up == [5]
    assert set(grown) <= {node.token for node in each.tree.root.walk()}
    last = pod.sent[id(each)][-1]
    assert last.base == 6
    assert last.paths.tokens


BESIDE = PROMPT_WIDTHS * 4
"""Prompt rows in a pass with nodes, at the expansion width of these drafters."""


def test_who_lacks_a_token_does_not_wait_for_an_older_prompt() -> None:
    pod = Pod(Engine())
    long, young = session(prompt=[1] * 2000), session()
    pod.attach(long)
    pod.attach(young)
    pod.run(1)
    assert young.tree.size
    pod.commit(young, [9])
    pod.run(1)
    assert 9 in pod.engine.read[-1]
    assert len(pod.engine.read[-1]) <= 2 * (BESIDE + 1)  # two sessions with tokens to read, and no others


def test_a_long_prompt_is_read_while_shorter_ones_keep_coming() -> None:
    pod = Pod(Engine())
    other, long = session(max_nodes=24), session(prompt=[1] * 200)
    pod.attach(other)
    pod.run(2)
    pod.attach(long)
    for _ in range(100):
        pod.attach(session(prompt=[2] * 100))
        pod.run(1)
        if long.tree.size:
            return
    pytest.fail("it is never read")


def test_a_long_prompt_is_read_beside_an_older_text_that_is_corrected_again_and_again() -> None:
    """The quota is for the text that has waited longest, not for the oldest one."""
    pod = Pod(Engine())
    corrected, other = session(max_nodes=24), session(max_nodes=24)
    for each in (corrected, other):
        pod.attach(each)
    pod.run(2)
    long = session(prompt=[1] * 200)
    pod.attach(long)
    for _ in range(100):
        pod.commit(corrected, [9])
        pod.attach(session(prompt=[2] * 100))
        pod.run(1)
        if long.tree.size:
            return
    pytest.fail("it is never read")


def test_a_prompt_is_read_a_little_in_a_pass_while_others_expand_nodes() -> None:
    """With no nodes left to expand, the prompt fills the pass."""
    pod = Pod(Engine())
    other = session(max_nodes=24)
    pod.attach(other)
    pod.run(2)
    long = session(prompt=[1] * 2000)
    pod.attach(long)
    while pod.drafter.best_logprob(other) > -np.inf:
        pod.run(1)
        nodes = len(pod.engine.read[-1]) - BESIDE
        assert 0 < nodes <= ROWS
    pod.run(1)
    assert len(pod.engine.read[-1]) == 512
    pod.run(4)
    assert long.tree.size


def test_prompts_are_not_held_up_by_a_few_that_expand_nodes() -> None:
    pod = Pod(Engine())
    few, many = [session(), session()], [session(prompt=[1] * 100) for _ in range(20)]
    for each in few:
        pod.attach(each)
    pod.run(2)
    for each in many:
        pod.attach(each)
    pod.run(1)
    assert sum(each.tree.size > 0 for each in many) == 10 * BESIDE // 100


def test_many_corrections_are_read_in_one_pass() -> None:
    """Even while as many other sessions expand nodes: no node is worth more than the next token."""
    pod = Pod(Engine())
    sessions = [session() for _ in range(4 * BESIDE)]
    for each in sessions:
        pod.attach(each)
    pod.run(1)
    corrected = sessions[: 2 * BESIDE]
    for each in corrected:
        pod.commit(each, [9])
    pod.run(1)
    assert pod.engine.read[-1].count(9) == len(corrected)


def test_paused_sessions_read_after_all_others() -> None:
    pod = Pod(Engine())
    paused = [session(prompt=[1] * 600, paused=True) for _ in range(20)]
    for each in paused:
        pod.attach(each)
    wanted = session(prompt=[2] * 700)
    pod.attach(wanted)
    pod.run(2)
    assert wanted.tree.size
    assert sum(tokens.count(1) for tokens in pod.engine.read) <= 2 * BESIDE
    pod.run(1)
    assert len(pod.engine.read[-1]) <= ROWS + BESIDE  # however many are paused


@pytest.mark.parametrize(("a_node", "nodes"), [(1e-9, ROWS), (0.1, 2)])
def test_a_pass_takes_no_nodes_that_lower_its_rate(a_node: float, nodes: int) -> None:
    """Two texts, each with one likely child and a few improbable ones: if a node costs a tenth of an empty pass, the
    improbable ones are not worth it."""
    engine = Engine(sureness=3.0)
    times = PassTimes({n: 1.0 + n * a_node for n in (4, 8)})
    loop = DraftLoop(LanguageModelDrafter(engine, rows=ROWS, rows_per_session=ROWS // 2, times=times))
    listeners = [Listener(loop, session(min_path_probability=0.0)) for _ in range(2)]
    for _ in range(3):  # the prompts, their children, further nodes
        loop.turn()
    assert len(engine.read[-1]) == nodes
    assert not any(listener.failed for listener in listeners)


def test_the_loop_wakes_when_a_message_is_due_and_nothing_else_happens() -> None:
    """With a tree at its limit, it sleeps until just before the verifier's next step begins."""
    period, round_trip = 0.030, 0.006
    sent: list[tuple[float, Extension]] = []
    failed: list[Exception] = []

    async def main() -> None:
        loop = DraftLoop(LanguageModelDrafter(Engine(), rows=ROWS))
        each = session(max_nodes=8, extend_interval=period, round_trip=round_trip)
        loop.attach(running(each, lambda extension: sent.append((time.monotonic(), extension)), failed.append))
        for _ in range(40):
            commit = time.monotonic()
            loop.commit(each, each.tree.base, [7], commit)
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
                assert last.base_age == pytest.approx(when - commit, abs=1e-6)

    virtual_time.run(main())
    assert len(sent) >= 39
    assert not failed


def test_memory_is_for_who_has_it() -> None:
    """An excess session is refused, the others keep growing, and freed memory serves the next one."""
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
    assert pod.drafter.slots_used == 0


class FailingEngine(Engine):
    """An engine with scripted failures."""

    failures = 0  # number of passes still to fail
    poison: int | None = None  # every pass over this token fails
    dead = False

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        if self.failures:
            self.failures -= 1
            raise MemoryError
        if self.dead or self.poison in batch.tokens:
            raise RuntimeError("broken")
        return super().forward(batch)


def test_a_step_that_fails_is_made_up_for() -> None:
    """After a failed step the text is read again, and the tree grows as without the failure."""
    pods = Pod(FailingEngine()), Pod(Engine())
    trees = []
    for pod in pods:
        several = [session(max_nodes=24), session(max_nodes=24)]
        for each in several:
            pod.attach(each)
        pod.run(4)
        if isinstance(pod.engine, FailingEngine):
            pod.engine.failures = 1
        pod.run(40)
        for each in several:
            pod.commit(each, [7, 7])
        pod.run(40)
        assert not pod.failed
        trees.append([[node.token for node in each.tree.root.walk()] for each in several])
    assert trees[0] == trees[1]


class Unpackable(Engine):
    """An engine whose batches fail to pack a given number of times."""

    refusals = 0

    def packer(self) -> RaggedPacker:
        if not self.refusals:
            return super().packer()
        self.refusals -= 1
        return Refusing()


class Refusing(RaggedPacker):
    def add_leaves(self, *_: object) -> None:
        raise MemoryError


def test_nodes_of_a_batch_that_cannot_be_packed_are_computed_later() -> None:
    """No node keeps an unwritten slot, and no node is forgotten."""
    pods = Pod(Unpackable()), Pod(Engine())
    trees = []
    for pod in pods:
        each = session(max_nodes=24)
        pod.attach(each)
        pod.run(4)
        if isinstance(pod.engine, Unpackable):
            pod.engine.refusals = 1
        pod.run(40)
        pod.commit(each, [7, 7])
        pod.run(40)
        assert not pod.failed
        trees.append([node.token for node in each.tree.root.walk()])
    assert trees[0] == trees[1]


def test_a_text_that_no_pass_takes_is_ended_alone() -> None:
    engine = FailingEngine()
    pod = Pod(engine)
    doomed, good = session(), session(max_nodes=24)
    pod.attach(doomed)
    pod.attach(good)
    pod.run(3)
    pod.commit(doomed, [9])
    engine.poison = 9
    pod.run(100)
    assert [type(error) for error in pod.failed] == [ModelFailureError]
    pod.commit(good, [7])
    pod.run(20)
    assert good.tree.size


@pytest.mark.parametrize("at", [0, 100, 600, 1400])
def test_a_token_that_no_pass_takes_is_found_wherever_it_is(at: int) -> None:
    """In any chunk of the text, and with any other session reading at the same time."""
    engine = FailingEngine()
    engine.poison = 9
    pod = Pod(engine)
    text = [1] * 1500
    text[at] = 9
    doomed, good = session(prompt=text), session(prompt=[1] * 1500, max_nodes=24)
    pod.attach(doomed)
    pod.attach(good)
    pod.run(30)
    assert [type(error) for error in pod.failed] == [ModelFailureError]
    assert good.tree.size


def test_an_engine_that_does_not_recover_ends_all_until_it_does() -> None:
    engine = FailingEngine()
    pod = Pod(engine)
    pod.attach(session())
    pod.attach(session())
    pod.run(3)
    engine.dead = True
    pod.run(1)
    assert [type(error) for error in pod.failed] == [EngineLostError] * 2
    assert pod.drafter.slots_used == 0
    assert pod.loop.turn() == CHECK_SECONDS
    with pytest.raises(EngineLostError):
        pod.attach(session())
    engine.dead = False
    pod.run(1)
    new = session()
    pod.attach(new)
    pod.run(5)
    assert new.tree.size


def test_who_takes_no_messages_is_sent_none() -> None:
    """A caller may request resends again and again without reading."""
    loop = DraftLoop(LanguageModelDrafter(Engine(), rows=ROWS))
    emitted: list[Extension] = []
    each = session(max_nodes=24)
    loop.attach(running(each, emitted.append, lambda error: None, lambda: len(emitted) < 5))
    for _ in range(50):
        loop.turn()
        each.outgoing.resend()
    assert len(emitted) == 5
