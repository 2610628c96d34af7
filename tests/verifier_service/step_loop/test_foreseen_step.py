"""Steps packed while the device computes the previous one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from specdec.decoding.query import SamplingQuery
from specdec.decoding.step_logits import StepLogits
from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.cpu.layout import RaggedPacker
from specdec.engine.engine import Pass
from specdec.engine.gpu.layout import SplitKvPacker
from specdec.engine.kv.blocks import BLOCK, BlockPool
from specdec.engine.row_counts import InvariantRowCounts
from specdec.engine.vllm.layout import BlockPacker
from tests.verifier_service.fakes import END, Announced, Client, DeviceTextEngine, TextEngine, run, step_loop
from tests.verifier_service.step_loop.helpers import WARM, check_over, client, expect_no_growth, text, turns
from verifier_service.backend.result import LENGTH, PLAIN, VerifyResult
from verifier_service.scheduling.foreseen_step import ForeseenStep
from verifier_service.scheduling.run_queue import RunQueue
from verifier_service.sessions.session import VerifierSession
from verifier_service.sessions.step_rows import ScheduledRows
from verifier_service.step_loop import StepLoop


class Watched(DeviceTextEngine):
    """Records for each batch whether it was launched while the device was computing."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.computes = False
        self.ahead: list[bool] = []
        self.fails_ahead = False

    def packer(self) -> RaggedPacker:
        if self.computes and self.fails_ahead:
            raise RuntimeError("no packer")
        self.ahead.append(self.computes)
        return super().packer()

    def launch(self, batch: PackedBatch) -> Pass:
        return WatchedPass(self, batch)


@dataclass(frozen=True)
class WatchedPass:
    engine: Watched
    batch: PackedBatch

    def logits(self, asked: Callable[[], Mapping[int, SamplingQuery]]) -> StepLogits:
        self.engine.computes = True
        try:
            queries = asked()
        finally:
            self.engine.computes = False
        return Announced(torch.from_numpy(self.engine.forward(self.batch)), queries)


def begun(engine: Watched) -> StepLoop:
    """Return a loop past its first steps, which measure and compile."""
    loop = step_loop(engine)
    run(loop, client(loop))
    return loop


def decoding(loop: StepLoop, *clients: Client) -> None:
    """Turn the loop until all clients have a token or are over."""
    while not all(each.tokens or each.over for each in clients):
        turns(loop, 1)
        for each in clients:
            each.read()


def test_a_step_is_packed_while_the_device_computes_the_one_before() -> None:
    engine = Watched(30)
    loop = begun(engine)
    clients = [client(loop, 30 * i + 1, i, 60, sampling=WARM) for i in range(3)]
    decoding(loop, *clients)
    engine.ahead.clear()
    turns(loop, 20)
    assert engine.ahead == [True] * 20
    run(loop, *clients)
    check_over(loop, engine, *clients)


def test_a_text_whose_last_token_is_foreseen_changes_nothing() -> None:
    engine = Watched(30)
    loop = begun(engine)
    one, other = client(loop, 5, 1, 20), client(loop, 5, 2, 60)
    decoding(loop, one, other)
    engine.ahead.clear()
    turns(loop, 30)
    assert one.mail.finish == LENGTH
    assert engine.ahead == [True] * 30
    run(loop, other)
    check_over(loop, engine, one, other)


def _joins(loop: StepLoop, one: Client) -> list[Client]:
    return [client(loop, 7, 9, 30)]


def _leaves(loop: StepLoop, one: Client) -> list[Client]:
    one.cancel()
    return []


def _has_candidates(loop: StepLoop, one: Client) -> list[Client]:
    one.offer(right=2, wrong=[3])
    return []


@pytest.mark.parametrize(("comes", "planned"), [(_joins, 1), (_leaves, 1), (_has_candidates, 2)])
def test_what_was_not_foreseen_is_planned_when_it_is_due(
    comes: Callable[[StepLoop, Client], list[Client]], planned: int
) -> None:
    """`planned`: number of steps packed late. The step after one with candidates is never packed ahead."""
    engine = Watched(30)
    loop = begun(engine)
    one, other = client(loop, 5, 1, 60), client(loop, 5, 2, 60)
    decoding(loop, one, other)
    more = comes(loop, one)
    engine.ahead.clear()
    turns(loop, 10)
    assert engine.ahead.count(False) == planned
    assert engine.ahead[-1]
    left = [each for each in (one, other, *more) if each.has_memory]
    run(loop, *left)
    check_over(loop, engine, *left)


def test_a_text_that_ends_unforeseen_is_no_part_of_the_next_step() -> None:
    engine = Watched(30)
    loop = begun(engine)
    clients = [client(loop, 5, seed, 150, end_tokens=frozenset({END}), sampling=WARM) for seed in range(6)]
    run(loop, *clients)
    check_over(loop, engine, *clients)
    assert not all(engine.ahead[1:])


def test_a_failed_pass_is_repeated() -> None:
    engine = Watched(30)
    loop = begun(engine)
    clients = [client(loop, 5, seed, 40) for seed in range(2)]
    decoding(loop, *clients)
    engine.failure = RuntimeError("it failed once")
    run(loop, *clients)
    check_over(loop, engine, *clients)


def test_no_text_loses_its_memory_to_a_foreseen_token() -> None:
    """With little memory, packing ahead causes no further preemptions."""

    def preempted(engine: TextEngine) -> int:
        loop = step_loop(engine)
        expect_no_growth(loop)
        clients = [client(loop, 3 * BLOCK - 2, seed, 40) for seed in range(2)]
        run(loop, *clients)
        check_over(loop, engine, *clients)
        return loop.stats.preemptions

    assert preempted(Watched(8)) == preempted(TextEngine(8)) > 0


def test_a_step_is_sound_whatever_becomes_of_the_next_one() -> None:
    engine = Watched(30)
    loop = begun(engine)
    engine.fails_ahead = True
    clients = [client(loop, 5, seed, 40) for seed in range(2)]
    run(loop, *clients)
    check_over(loop, engine, *clients)


def test_nothing_is_kept_of_texts_that_have_left() -> None:
    loop = begun(Watched(30))
    one = client(loop, 5, 1, 60)
    decoding(loop, one)
    session = weakref.ref(one.session)
    one.cancel()
    assert loop.turn() is None
    del one
    gc.collect()
    assert session() is None


class Memory:
    """The part of a run queue that a foreseen step reads; it always has enough memory."""

    def reserve_ahead(self, session: VerifierSession, length: int) -> bool:
        assert session.table is not None
        session.table.reserve(length)
        return True


@pytest.mark.parametrize("packer", [RaggedPacker, SplitKvPacker, BlockPacker])
@pytest.mark.parametrize("rows", [None, InvariantRowCounts((4, 8))], ids=["any-rows", "row-class"])
def test_it_is_the_step_that_would_be_planned(packer: type[Packer], rows: InvariantRowCounts | None) -> None:
    """In every attention layout, whichever tokens are chosen. The first text is long."""
    if packer is BlockPacker:
        rows = None  # as with vLLM
    pool = BlockPool(40)
    loop: Any = SimpleNamespace(context=1000, enqueue=lambda _: None)
    entries = [Client(loop, text(length, length), 50).running for length in (300, 5, 70)]
    for entry in entries:
        entry.session.allocate(pool)
        entry.session.computed = entry.session.tree.base - 1
    foreseen = ForeseenStep(cast("RunQueue", Memory()))
    foreseen.prepare(packer(rows), [(entry, ScheduledRows(1, root_row=row)) for row, entry in enumerate(entries)])
    for token, entry in enumerate(entries, 2):
        entry.session.apply_result(VerifyResult(entry.session.tree.base, 0, [token], [PLAIN]), 1, 0.0)
    got = foreseen.take([entries[1], entries[2], entries[0]])  # in any order
    assert got is not None
    batch, scheduled = got
    planned = packer(rows)
    for entry in entries:
        entry.session.plan(planned, 1, [], [])
    want = planned.pack()
    for field in fields(want):
        np.testing.assert_array_equal(getattr(batch, field.name), getattr(want, field.name), field.name)
    assert {entry: rows.root_row for entry, rows in scheduled} == {entry: row for row, entry in enumerate(entries)}
