"""Steps launched before the tokens of the step before them are committed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import numpy as np
import pytest

from specdec.decoding.query import SamplingQuery, TokenMask
from specdec.decoding.sampling import Sampling
from specdec.decoding.step_logits import StepLogits
from specdec.engine.batch import PackedBatch
from specdec.engine.engine import Pass
from specdec.engine.kv.blocks import BLOCK
from specdec.grammar.text_grammar import TextGrammar
from tests.verifier_service.fakes import (
    BAD,
    DEAR,
    END,
    VOCABULARY,
    Client,
    Decided,
    DeviceTextEngine,
    QueuedTextEngine,
    run,
    step_loop,
)
from tests.verifier_service.step_loop.helpers import SAMPLINGS, WARM, check_over, client, expect_no_growth, turns
from verifier_service.backend.request import Policy
from verifier_service.backend.result import LENGTH, Mode
from verifier_service.costs.step_latency import StepLatency
from verifier_service.step_loop import StepLoop


@dataclass(frozen=True)
class FailingPass:
    """A pass that fails on the device: the host learns of it when it waits."""

    error: Exception

    def logits(self, asked: Callable[[], Mapping[int, SamplingQuery]]) -> StepLogits:
        raise self.error


class Queued(QueuedTextEngine):
    """Counts rows of texts that have ended. The next pass fails with the inherited `failure` when launched, or with
    `device_failure` when waited for."""

    ended_rows = 0
    device_failure: Exception | None = None

    def launch(self, batch: PackedBatch) -> Pass:
        self.ended_rows += int(np.count_nonzero(batch.tokens == END))
        launched = super().launch(batch)
        failure, self.device_failure = self.device_failure, None
        return launched if failure is None else FailingPass(failure)


class Alternates:
    """A grammar that allows even and odd tokens in turn."""

    def __init__(self) -> None:
        self._length = 0

    def commit(self, tokens: Sequence[int]) -> None:
        self._length += len(tokens)

    def allowed(self, path: Sequence[int]) -> TokenMask:
        odd = (self._length + len(path)) % 2
        return np.full(-(-VOCABULARY // 8), 0b10101010 if odd else 0b01010101, dtype=np.uint8)


class Unsure(StepLatency):
    """A step latency that stays as uncertain as at start."""

    def observe(self, rows: int, seconds: float) -> None: ...


def begun(blocks: int = 30, **options: Any) -> tuple[StepLoop, Queued]:
    """Return a loop without speculation, past its first steps."""
    engine = Queued(blocks)
    loop = step_loop(engine, controller=Decided(Mode.OFF), **options)
    run(loop, client(loop))
    return loop, engine


def decoding(loop: StepLoop, *clients: Client) -> None:
    """Turn the loop until all clients have generated two tokens, sent or not."""
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
    assert engine.ended_rows > 0


def _joins(loop: StepLoop, one: Client) -> list[Client]:
    return [client(loop, 7, 9, 30)]


def _leaves(loop: StepLoop, one: Client) -> list[Client]:
    one.cancel()
    return []


@pytest.mark.parametrize("comes", [_joins, _leaves])
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


@pytest.mark.parametrize("tenants", ["a", "ab"])
def test_a_pass_whose_texts_have_all_left_is_dropped(tenants: str) -> None:
    loop, engine = begun()
    clients = [client(loop, 5, 1, 60, tenant=tenant) for tenant in tenants]
    decoding(loop, *clients)
    while not engine.computes:  # a step that measures one tenant's rows is not launched early
        turns(loop, 1)
    sessions = [weakref.ref(one.session) for one in clients]
    while clients:
        clients.pop().cancel()
    assert loop.turn() == 0.0
    assert loop.turn() is None
    assert loop.stats.step_begun == 0
    gc.collect()
    assert not any(session() for session in sessions)
    other = client(loop, 5, 2, 30)
    run(loop, other)
    check_over(loop, engine, other)


def test_memory_of_a_text_that_left_serves_another_one() -> None:
    """The pass in progress still writes one of its slots."""
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
    """Only steps that measure one tenant's rows alone are not launched early."""
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


@pytest.mark.parametrize("failure", [RuntimeError("it failed once"), MemoryError()], ids=["error", "shortage"])
@pytest.mark.parametrize("when", ["failure", "device_failure"])
def test_a_pass_that_fails_is_repeated(when: str, failure: Exception) -> None:
    loop, engine = begun()
    clients = [client(loop, 5, seed, 40) for seed in range(2)]
    decoding(loop, *clients)
    assert engine.computes
    setattr(engine, when, failure)
    run(loop, *clients)
    assert getattr(engine, when) is None
    check_over(loop, engine, *clients)


def test_a_text_that_breaks_in_an_early_pass_ends_alone() -> None:
    loop, engine = begun()
    good, broken = client(loop, 5, 1, 60), client(loop, 5, 2, 60, sampling=Sampling())
    decoding(loop, good, broken)
    assert BAD in broken.want[2:-1]
    run(loop, good, broken)
    assert isinstance(broken.mail.error, FloatingPointError)
    assert broken.tokens == broken.want[: broken.want.index(BAD) + 1]
    check_over(loop, engine, good)


def test_a_grammar_is_asked_after_the_commit() -> None:
    loop, engine = begun()
    one, other = client(loop, 5, 1, 60), client(loop, 5, 2, 60)
    one.session.grammar = cast("TextGrammar", Alternates())
    decoding(loop, one, other)
    assert early(loop, engine, 10) == [True] * 10
    run(loop, one, other)
    assert [token % 2 for token in one.tokens] == [n % 2 for n in range(60)]
    check_over(loop, engine, other)


def test_the_price_of_candidates_is_that_of_steps_that_are_due() -> None:
    """Early steps and others observe the same break-even: otherwise it would depend on which other sessions exist."""
    found = []
    for engine in (Queued(30), DeviceTextEngine(30)):
        loop = step_loop(engine, Unsure((1, 256), [1.0, 256.0]), controller=Decided(Mode.OFF))
        run(loop, client(loop, max_tokens=40))
        found.append(loop._speculation.eligibility.break_even)
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0] > 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.verify) for seed in (1, 2))])
def test_a_storm_without_speculation(seed: int) -> None:
    dice = Random(seed)
    loop, engine = begun(30)
    clients: list[Client] = []
    early_passes = 0
    for turn in range(400):
        alive = [each for each in clients if not each.over]
        if dice.random() < 0.1:
            ends = frozenset({END}) if dice.random() < 0.5 else frozenset[int]()
            length, most = dice.choice([1, BLOCK - 1, BLOCK, 100]), dice.randint(2, 80)
            sampling = dice.choice(SAMPLINGS)
            tenant = dice.choice("aaab")
            clients.append(
                client(loop, length, dice.randrange(4), most, end_tokens=ends, sampling=sampling, tenant=tenant)
            )
        if alive and dice.random() < 0.05:
            one = dice.choice(alive)
            one.cancel()
            assert one.tokens == one.want[: len(one.tokens)]
            clients.remove(one)
        if turn % 100 == 50:
            engine.device_failure = RuntimeError("it failed once")
        for each in alive:
            each.read()
        loop.turn()
        early_passes += engine.computes
    run(loop, *clients)
    check_over(loop, engine, *clients)
    assert early_passes > 100
    assert engine.ended_rows > 0
