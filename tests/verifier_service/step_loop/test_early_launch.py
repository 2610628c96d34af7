"""Steps launched before the tokens of the step before them are committed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from specdec.engine.batch import PackedBatch
from specdec.engine.engine import Pass
from specdec.engine.kv.blocks import BLOCK
from tests.verifier_service.fakes import (
    BAD,
    DEAR,
    END,
    Client,
    Decided,
    QueuedTextEngine,
    run,
    step_loop,
)
from tests.verifier_service.step_loop.helpers import WARM, check_over, client, expect_no_growth, turns
from verifier_service.backend.request import Policy
from verifier_service.backend.result import LENGTH
from verifier_service.speculation.controller import Mode
from verifier_service.step_loop import StepLoop


class Queued(QueuedTextEngine):
    """Raises `launch_failure` at the next launch."""

    launch_failure: Exception | None = None

    def launch(self, batch: PackedBatch) -> Pass:
        if self.launch_failure is not None:
            failure, self.launch_failure = self.launch_failure, None
            raise failure
        return super().launch(batch)


def begun(blocks: int = 30, **options: Any) -> tuple[StepLoop, Queued]:
    """Return a loop without speculation, past its first steps."""
    engine = Queued(blocks)
    loop = step_loop(engine, controller=Decided(Mode.OFF), **options)
    run(loop, client(loop))
    return loop, engine


def decoding(loop: StepLoop, *clients: Client) -> None:
    """Turn until all have generated two tokens, sent or not."""
    while not all(each.session.generated > 1 for each in clients):
        turns(loop, 1)


def early(loop: StepLoop, engine: Queued, count: int) -> list[bool]:
    """Turn `count` times; return for each turn whether a pass was in progress after it."""
    found = []
    for _ in range(count):
        turns(loop, 1)
        found.append(engine.computes)
    return found


def test_the_next_pass_is_launched_before_tokens_are_committed() -> None:
    loop, engine = begun()
    clients = [client(loop, 30 * i + 1, i, 60, sampling=WARM, top_logprobs=2 * i) for i in range(3)]
    decoding(loop, *clients)
    passes = len(engine.steps)
    assert early(loop, engine, 20) == [True] * 20
    assert len(engine.steps) == passes + 20
    run(loop, *clients)
    check_over(loop, engine, *clients)


def test_the_step_in_progress_is_reported_with_its_own_begin() -> None:
    loop, engine = begun()
    one = client(loop, 5, 1, 60)
    decoding(loop, one)
    before = loop.stats.step_begun
    turns(loop, 1)
    assert engine.computes
    assert loop.stats.step_begun > before > 0
    run(loop, one)
    assert loop.stats.step_begun == 0


def test_a_text_that_ends_leaves_the_pass_in_progress() -> None:
    loop, engine = begun()
    one, other = client(loop, 5, 1, 20), client(loop, 5, 2, 60)
    decoding(loop, one, other)
    assert early(loop, engine, 30) == [True] * 30
    assert one.mail.finish == LENGTH
    run(loop, other)
    check_over(loop, engine, one, other)


def test_a_row_of_a_text_with_an_end_token_changes_nothing() -> None:
    loop, engine = begun(8)
    expect_no_growth(loop)
    ends = frozenset({END})
    clients = [client(loop, BLOCK - 4, seed, 150, end_tokens=ends, sampling=WARM) for seed in range(12)]
    run(loop, *clients)
    check_over(loop, engine, *clients)
    assert sum(len(each.tokens) < 150 for each in clients) > 6
    assert loop.turn() is None
    assert loop.pool.held == 0


def _joins(loop: StepLoop, one: Client) -> list[Client]:
    return [client(loop, 7, 9, 30)]


def _leaves(loop: StepLoop, one: Client) -> list[Client]:
    one.cancel()
    return []


def _gets_candidates(loop: StepLoop, one: Client) -> list[Client]:
    one.offer(right=2, wrong=[3])
    return []


@pytest.mark.parametrize("comes", [_joins, _leaves, _gets_candidates])
def test_whatever_comes_during_a_pass_waits_for_its_end(comes: Callable[[StepLoop, Client], list[Client]]) -> None:
    loop, engine = begun()
    one, other = client(loop, 5, 1, 60), client(loop, 5, 2, 60)
    decoding(loop, one, other)
    assert engine.computes
    more = comes(loop, one)
    left = [each for each in (one, other, *more) if each is not one or comes is not _leaves]
    decoding(loop, *left)
    assert early(loop, engine, 5)[-1]
    run(loop, *left)
    check_over(loop, engine, *left)


def test_a_pass_whose_texts_have_all_left_is_dropped() -> None:
    loop, engine = begun()
    one = client(loop, 5, 1, 60)
    decoding(loop, one)
    assert engine.computes
    session = weakref.ref(one.session)
    one.cancel()
    assert loop.turn() == 0.0
    assert loop.turn() is None
    assert loop.stats.step_begun == 0
    del one
    gc.collect()
    assert session() is None
    other = client(loop, 5, 2, 30)
    run(loop, other)
    check_over(loop, engine, other)


def test_memory_of_a_text_that_left_serves_another_one() -> None:
    """The pass in progress still writes a slot of it."""
    loop, engine = begun(4)
    expect_no_growth(loop)
    one = client(loop, BLOCK - 3, 1, 120)
    decoding(loop, one)
    assert engine.computes
    one.cancel()
    others = [client(loop, BLOCK - 3, seed, 40) for seed in (2, 3)]
    run(loop, *others)
    check_over(loop, engine, *others)


def test_no_pass_is_launched_early_for_a_reader_that_falls_behind() -> None:
    loop, engine = begun(max_unread_tokens=8)
    one = client(loop, 5, 1, 60)
    while loop.turn() is not None:
        pass
    assert len(one.tokens) == 9
    run(loop, one)
    check_over(loop, engine, one)


def test_no_pass_is_launched_early_while_texts_wait_for_memory() -> None:
    loop, engine = begun(5)
    expect_no_growth(loop)
    clients = [client(loop, BLOCK + 1, seed, 30) for seed in range(4)]
    decoding(loop, *clients[:2])
    assert loop.stats.waiting
    assert not any(early(loop, engine, 10))
    run(loop, *clients)
    check_over(loop, engine, *clients)


def test_tenants_that_share_all_steps_share_early_ones() -> None:
    """Except for those that measure one tenant's rows alone."""
    loop, engine = begun()
    clients = [client(loop, 5, 1, 60, tenant=tenant) for tenant in "ab"]
    decoding(loop, *clients)
    assert early(loop, engine, 40).count(False) <= 4
    run(loop, *clients)
    check_over(loop, engine, *clients)


def test_no_pass_is_launched_early_while_a_tenant_sits_out() -> None:
    loop, engine = begun(latency=DEAR)
    few, many = client(loop, 5, 1, 60, tenant="a"), [client(loop, 5, seed, 60, tenant="b") for seed in range(5)]
    decoding(loop, few, *many)
    assert not any(early(loop, engine, 10))
    run(loop, few, *many)
    check_over(loop, engine, few, *many)


def test_no_pass_is_launched_early_for_a_text_that_speculates() -> None:
    loop, engine = begun()
    one = client(loop, 5, 1, 60)
    forced = client(loop, 5, 2, 60, policy=Policy(one.session.policy.drafters, 8, 0.0, forced=True))
    decoding(loop, one, forced)
    assert not any(early(loop, engine, 10))
    run(loop, one, forced)
    check_over(loop, engine, one, forced)


def test_a_pass_that_cannot_be_launched_early_is_launched_when_due() -> None:
    loop, engine = begun()
    clients = [client(loop, 5, seed, 40) for seed in range(2)]
    decoding(loop, *clients)
    engine.launch_failure = RuntimeError("it failed once")
    assert early(loop, engine, 2) == [False, True]
    run(loop, *clients)
    check_over(loop, engine, *clients)


def test_a_broken_text_ends_alone() -> None:
    loop, engine = begun()
    good, broken = client(loop, 5, 1, 60), Client(loop, [5, 6, BAD], 60)
    run(loop, good, broken)
    assert isinstance(broken.mail.error, FloatingPointError)
    check_over(loop, engine, good)
