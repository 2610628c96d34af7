"""Tenants share a verifier by weight, regardless of arrival order and demand."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec.engine.batch import PackedBatch
from specdec.engine.kv.blocks import BLOCK
from specdec.serving.errors import TooLateError
from tests.verifier_service.fakes import DEAR, FREE, Client, FixedLatency, TextEngine, run, step_loop
from tests.verifier_service.step_loop.helpers import NO_BAD, check_over, client, expect_no_growth, text, turns
from verifier_service.backend.request import Policy
from verifier_service.costs.step_latency import StepLatency
from verifier_service.scheduling.shares import BURST, REMEMBERED, held, who_counts, youngest_beyond, youngest_of_largest
from verifier_service.settings.tuning import DEFAULTS
from verifier_service.step_loop import StepLoop

SHORT, LONG = 40, 70
"""Prompt lengths in tokens: within one block, and two."""


def order_of(loop: StepLoop, clients: list[Client]) -> list[Client]:
    """Turn until all are over; return the clients in the order of their first admission."""
    order: list[Client] = []
    while not all(each.over for each in clients):
        for each in clients:
            each.read()
        assert loop.turn() == 0.0
        order += [each for each in clients if each not in order and (each.has_memory or each.over)]
    return order


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_turns_go_by_weight(weight: float) -> None:
    """One text fits at a time, and one tenant queued all of its own first: the other is next nevertheless, then gets
    its share of the turns."""
    engine = TextEngine(3)
    loop = step_loop(engine)
    flood = [client(loop, LONG, seed, 30, tenant="flood") for seed in range(24)]
    turns(loop, 1)
    others = [client(loop, LONG, 100 + seed, 30, tenant="other", weight=weight) for seed in range(12)]
    order = order_of(loop, [*flood, *others])
    first = Counter(each.session.request.tenant for each in order[:16])
    assert first["other"] == pytest.approx(16 * weight / (1 + weight), abs=2)
    check_over(loop, engine, *flood, *others)


def test_who_was_away_gets_its_share_and_no_more() -> None:
    """Unused turns are not saved up."""
    engine = TextEngine(3)
    loop = step_loop(engine)
    early = client(loop, LONG, 1, 5, tenant="late")
    run(loop, early)
    busy = [client(loop, LONG, 10 + seed, 30, tenant="busy") for seed in range(20)]
    for _ in range(100):
        for each in busy:
            each.read()
        turns(loop, 1)
    late = [client(loop, LONG, 50 + seed, 30, tenant="late") for seed in range(8)]
    left = [each for each in busy if not (each.over or each.has_memory)]
    assert len(left) > 8
    order = order_of(loop, [*left, *late])
    assert Counter(each.session.request.tenant for each in order[:8])["late"] in (4, 5)
    check_over(loop, engine, early, *busy, *late)


def test_what_a_tenant_had_while_nobody_wanted_any_is_not_held_against_it() -> None:
    """A tenant need not wait until a newcomer has caught up; the newcomer's lead is limited to a few texts."""
    engine = TextEngine(3)
    loop = step_loop(engine)
    alone = [client(loop, LONG, seed, 30, tenant="early") for seed in range(12)]
    run(loop, *alone)
    flood = [client(loop, LONG, 50 + seed, 30, tenant="flood") for seed in range(16)]
    turns(loop, 1)
    early = [client(loop, LONG, 80 + seed, 30, tenant="early") for seed in range(16)]
    order = order_of(loop, [*flood, *early])
    count = Counter(each.session.request.tenant for each in order[:16])["early"]
    assert (16 - BURST) / 2 - 1 <= count <= 16 / 2 + 1
    check_over(loop, engine, *alone, *flood, *early)


@pytest.mark.parametrize("read", [False, True], ids=["not read", "read at last"])
def test_a_session_that_is_left_open_saves_nothing_up(read: bool) -> None:
    """The tenant has all it wants, and wants more later: it took nothing from others meanwhile. A third tenant,
    whose only competitor is this one, does not start with that credit either. The idle session has lost its memory
    and may want it back."""
    engine = TextEngine(4)
    loop = step_loop(engine, max_unread_tokens=20)
    idle = client(loop, 5, 1, 50, tenant="idle")
    turns(loop, 21)
    assert loop.turn() is None
    assert loop._queue.throttled(idle.running)
    busy = [client(loop, 5, 10 + seed, 50, tenant="busy") for seed in range(20)]
    for _ in range(150):
        for each in busy:
            each.read()
        turns(loop, 1)
    left = [each for each in busy if not (each.over or each.has_memory)]
    assert len(left) > 8
    if read:
        idle.read()
    more = [client(loop, 5, 50 + seed, 50, tenant="idle") for seed in range(8)]
    third = [client(loop, 5, 70 + seed, 50, tenant="third") for seed in range(8)]
    order = order_of(loop, [*left, *more, *third])
    counts = Counter(each.session.request.tenant for each in order[:12])
    assert max(counts.values()) <= BURST + 2, counts
    run(loop, idle)
    check_over(loop, engine, idle, *busy, *more, *third)


def test_priority_orders_the_requests_of_a_tenant_alone() -> None:
    engine = TextEngine(3)
    loop = step_loop(engine)
    first = client(loop, LONG, 1, 30, tenant="a")
    turns(loop, 1)
    low = client(loop, LONG, 2, 30, tenant="a", priority=5)
    usual = client(loop, LONG, 3, 30, tenant="a")
    urgent = client(loop, LONG, 4, 30, tenant="a", priority=-5)
    other = client(loop, LONG, 5, 30, tenant="b", priority=100)
    order = order_of(loop, [first, low, usual, urgent, other])
    assert [each for each in order if each is not other] == [first, urgent, usual, low]
    assert order.index(other) == 1  # its counter is 0
    check_over(loop, engine, *order)


def test_a_tenant_with_too_much_memory_gives_some_to_one_with_less() -> None:
    """At once, without waiting for its texts to end; its oldest text keeps its memory."""
    engine = TextEngine(5)
    loop = step_loop(engine)
    expect_no_growth(loop)
    flood = [client(loop, SHORT, seed, 200, tenant="flood") for seed in range(4)]
    turns(loop, 2)
    assert sum(each.has_memory for each in flood) >= 3
    other = client(loop, SHORT, 9, 5, tenant="other")
    turns(loop, 1)
    assert other.has_memory
    assert flood[0].has_memory
    assert loop.stats.preemptions >= 1
    run(loop, *flood, other)
    check_over(loop, engine, *flood, other)


def test_texts_that_would_give_way_do_not_count() -> None:
    """For a tenant with a quarter more memory: all its texts but the oldest, which is never preempted for others."""
    engine = TextEngine(30)
    loop = step_loop(engine)
    flood = [client(loop, SHORT, seed, 20, tenant="flood") for seed in range(4)]
    mine = client(loop, SHORT, 5, 20, tenant="mine")
    turns(loop, 1)
    running, waits = [each.running for each in (*flood, mine)], client(loop, SHORT, 6, 20, tenant="mine").running
    assert who_counts(running, waits, BLOCK) == [flood[0].running, mine.running]
    assert who_counts(running, waits, 3 * BLOCK) == running
    late = client(loop, SHORT, 7, 20, tenant="late").running
    assert who_counts([flood[0].running, mine.running], late, BLOCK // 2) == [flood[0].running, mine.running]
    for each in (*flood, mine):
        each.cancel()


def test_nobody_is_preempted_for_a_text_that_would_not_fit_even_so() -> None:
    """By forecast, the newcomer and the flood's oldest text (never preempted for others) fill all memory."""
    engine = TextEngine(30)
    loop = step_loop(engine)
    loop._queue.lengths.add(900)
    first = client(loop, 100, 0, 900, tenant="flood")
    flood = [first, *(client(loop, 100, 1 + seed, 20, tenant="flood") for seed in range(13))]
    turns(loop, 1)
    assert all(each.has_memory for each in flood)
    newcomer = client(loop, 100, 50, 900, tenant="newcomer")
    turns(loop, 3)
    assert not newcomer.has_memory
    assert loop.stats.preemptions == 0
    for each in (*flood, newcomer):
        each.cancel()


def test_a_prefix_that_texts_share_is_counted_once() -> None:
    engine = TextEngine(40)
    loop = step_loop(engine)
    prefix = text(4 * BLOCK, 1)
    shared = [Client(loop, [*prefix, 3 + seed], 200, sampling=NO_BAD, tenant="shared") for seed in range(1)]
    turns(loop, 2)
    shared += [Client(loop, [*prefix, 3 + seed], 200, sampling=NO_BAD, tenant="shared") for seed in range(1, 6)]
    apart = [client(loop, 3 * BLOCK - 5, 9 + seed, 200, tenant="apart") for seed in range(4)]
    turns(loop, 1)
    running = [each.running for each in (*shared, *apart)]
    assert all(each.session.table is not None for each in running)
    found = held(running)
    assert found == pytest.approx({"shared": (4 + 6) * BLOCK, "apart": 4 * 3 * BLOCK})
    assert youngest_of_largest(running) is apart[-1].running
    for each in (*shared, *apart):
        each.cancel()


def test_texts_that_nobody_reads_give_up_the_prefix_that_they_share() -> None:
    """Preempting only one would free no shared block."""
    engine = TextEngine(12)
    loop = step_loop(engine, max_unread_tokens=5)
    prefix = text(8 * BLOCK, 1)
    unread = [Client(loop, [*prefix, 3], 100, sampling=NO_BAD, tenant="unread")]
    turns(loop, 3)
    unread.append(Client(loop, [*prefix, 4], 100, sampling=NO_BAD, tenant="unread"))
    while not all(loop._queue.throttled(each.running) for each in unread):
        loop.turn()
    assert all(each.has_memory for each in unread)
    newcomer = client(loop, 6 * BLOCK, 9, 2, tenant="newcomer")
    turns(loop, 1)
    assert newcomer.has_memory
    assert loop.stats.preemptions == 2
    for each in (*unread, newcomer):
        each.cancel()


def test_memory_is_taken_from_another_if_the_largest_cannot_spare_its_youngest_text() -> None:
    engine = TextEngine(40)
    loop = step_loop(engine)
    largest = [client(loop, tokens, seed, 20, tenant="largest") for seed, tokens in enumerate((BLOCK // 2, 9 * BLOCK))]
    others = [client(loop, BLOCK // 2, 5 + seed, 20, tenant="other") for seed in range(9)]
    turns(loop, 1)
    waits = client(loop, BLOCK // 2, 20, 20, tenant="newcomer").running
    assert youngest_beyond([each.running for each in (*largest, *others)], waits, BLOCK) is others[-1].running
    assert youngest_beyond([each.running for each in largest], waits, BLOCK) is None
    for each in (*largest, *others):
        each.cancel()


def test_memory_is_not_taken_from_who_has_no_more() -> None:
    engine = TextEngine(5)
    loop = step_loop(engine)
    mine = [client(loop, SHORT, seed, 20, tenant="a") for seed in range(2)]
    turns(loop, 2)
    theirs = [client(loop, SHORT, 5 + seed, 20, tenant="b") for seed in range(4)]
    turns(loop, 2)
    assert all(each.has_memory for each in mine)
    assert loop.stats.preemptions == 0
    run(loop, *mine, *theirs)
    check_over(loop, engine, *mine, *theirs)


def test_prompts_share_a_step_by_tenant() -> None:
    """Twenty prompts of one tenant progress no faster than one of another."""
    engine = TextEngine(200)
    loop = step_loop(engine, step_rows=64)
    flood = [client(loop, 3 * BLOCK, seed, 2, tenant="flood") for seed in range(20)]
    other = client(loop, 3 * BLOCK, 99, 2, tenant="other")
    turns(loop, 1)
    assert other.session.computed == 32
    assert max(each.session.computed for each in flood) <= 2
    turns(loop, 6)
    assert other.tokens
    assert not any(each.tokens for each in flood)
    run(loop, *flood, other)
    check_over(loop, engine, *flood, other)


@pytest.mark.parametrize("decoding", [2, 3])
def test_a_prompt_is_not_cut_up_for_a_tenant_that_has_more(decoding: int) -> None:
    """The flood has three or four texts, its own prompt included; the other tenant has three prompts."""
    engine = TextEngine(200)
    loop = step_loop(engine, latency=DEAR)
    flood = [client(loop, 5, seed, 200, tenant="flood") for seed in range(decoding)]
    while not all(each.tokens for each in flood):
        turns(loop, 1)
    others = [client(loop, 2 * BLOCK, 99 + seed, 2, tenant="other") for seed in range(3)]
    prompt = client(loop, 3 * BLOCK, 9, 2, tenant="flood")
    turns(loop, 1)
    least = DEFAULTS.prefill.min_chunk_tokens
    assert prompt.session.computed <= least
    if decoding == 3:
        assert all(each.tokens for each in others)
    else:
        assert max(each.session.computed for each in others) <= least
    for each in flood:
        each.read()
    run(loop, *flood, *others, prompt)
    check_over(loop, engine, *flood, *others, prompt)


@pytest.mark.parametrize("latency", [DEAR, FREE], ids=["dear rows", "free rows"])
def test_texts_of_a_flood_sit_out_a_step_with_a_prompt_of_another_if_it_is_shorter_so(latency: StepLatency) -> None:
    engine = TextEngine(200)
    loop = step_loop(engine, latency=latency)
    flood = [client(loop, 5, seed, 50, tenant="flood") for seed in range(12)]
    while not all(each.tokens for each in flood):
        turns(loop, 1)
    other = client(loop, 6, 99, 2, tenant="other")
    turns(loop, 1)
    assert other.tokens
    assert engine.steps[-1] == (6 if latency is DEAR else 6 + len(flood))
    run(loop, *flood, other)
    check_over(loop, engine, *flood, other)


def test_prompt_after_prompt_does_not_stop_a_flood() -> None:
    """The flood's texts sit out steps only while the other tenant has been served no more than it."""
    engine = TextEngine(200)
    loop = step_loop(engine, latency=DEAR)
    flood = [client(loop, 5, seed, 1000, tenant="flood") for seed in range(12)]
    while not all(each.tokens for each in flood):
        turns(loop, 1)
    before = sum(len(each.tokens) for each in flood)
    others = []
    for seed in range(100):
        others.append(client(loop, 30, 100 + seed, 1, tenant="other"))
        turns(loop, 1)
        for each in flood:
            each.read()
    assert sum(len(each.tokens) for each in flood) - before >= 50 * len(flood)
    for each in (*flood, *others):
        each.cancel()


def test_texts_of_a_third_tenant_go_on_beside_a_prompt_that_others_yield_to() -> None:
    """The third tenant has no more sessions than the tenant with the prompt."""
    engine = TextEngine(200)
    loop = step_loop(engine, latency=DEAR)
    flood = [client(loop, 5, seed, 200, tenant="flood") for seed in range(12)]
    third = client(loop, 5, 50, 200, tenant="third")
    while not all(each.tokens for each in (*flood, third)):
        turns(loop, 1)
    turns(loop, 1)
    for each in (*flood, third):
        each.read()
    before, had = len(third.tokens), [len(each.tokens) for each in flood]
    prompt = client(loop, BLOCK, 9, 2, tenant="other")
    turns(loop, 1)
    assert len(third.tokens) == before + 1
    assert sum(len(each.tokens) for each in flood) <= sum(had) + 1  # at most one text, its tenant's part
    assert prompt.tokens
    for each in (*flood, third, prompt):
        each.cancel()


def test_a_prompt_does_not_lengthen_each_step_where_texts_need_not_sit_out() -> None:
    """Each prompt has a new tenant; in every third step, prompts are cut to leave room for the texts."""
    engine = TextEngine(400)
    loop = step_loop(engine, latency=FixedLatency(0.01))
    texts = [client(loop, 5, seed, 1000, tenant="there") for seed in range(12)]
    while not all(each.tokens for each in texts):
        turns(loop, 1)
    before, newcomers = [len(each.tokens) for each in texts], []
    for seed in range(3):
        newcomers.append(client(loop, 400, 100 + seed, 1, tenant=f"newcomer {seed}"))
        turns(loop, 1)
    assert [len(each.tokens) for each in texts] == [count + 3 for count in before]
    assert min(engine.steps[-3:]) < 300 < 400 < max(engine.steps[-3:])
    for each in (*texts, *newcomers):
        each.cancel()


@pytest.mark.parametrize("name", ["newcomer", "newcomer {}"], ids=["one tenant", "a new tenant each"])
def test_newcomers_never_stop_the_texts_that_are_there(name: str) -> None:
    """A text takes part in at least every third step, even if each prompt has a new tenant with a zero counter."""
    engine = TextEngine(200)
    loop = step_loop(engine, latency=DEAR)
    texts = [client(loop, 5, seed, 1000, tenant="there") for seed in range(3)]
    while not all(each.tokens for each in texts):
        turns(loop, 1)
    newcomers = []
    for trio in range(40):
        before = [each.session.generated for each in texts]
        for seed in range(3 * trio, 3 * trio + 3):
            newcomers.append(client(loop, 6, 100 + seed, 1, tenant=name.format(seed)))
            turns(loop, 1)
        assert all(each.session.generated > count for each, count in zip(texts, before, strict=True))
        for each in texts:
            each.read()
    run(loop, *newcomers)  # requests beyond the newcomers' share wait
    for each in texts:
        each.cancel()


def test_no_step_is_spent_on_a_text_that_cannot_be_finished_in_time() -> None:
    """A late text is refused when its turn comes, before it starts; requests behind it are served."""
    engine = TextEngine(3)
    loop = step_loop(engine)
    first = client(loop, LONG, 1, 30)
    turns(loop, 3)
    loop.stats.interval, loop.stats.usual_tokens = 1000.0, 30.0  # seconds per token
    late = client(loop, LONG, 2, 30, deadline=time.monotonic() + 60)
    patient = client(loop, LONG, 3, 30)
    begun = client(loop, SHORT, 4, 30, deadline=time.monotonic() + 60)
    begun.running.preemptions = 1  # preempted: its reader has part of the text
    run(loop, first, late, patient, begun)
    assert isinstance(late.mail.error, TooLateError)
    assert not late.tokens
    late.mail.error = None
    check_over(loop, engine, first, patient, begun)


def test_what_is_not_computed_of_a_prompt_is_not_charged() -> None:
    engine = TextEngine(20)
    loop = step_loop(engine, step_rows=64)
    stays, gone = client(loop, LONG, 1, 5, tenant="stays"), client(loop, 900, 2, 5, tenant="gone")
    turns(loop, 1)
    computed = gone.session.computed
    assert 0 < computed < 100
    gone.cancel()
    assert loop._queue.shares._counters["gone"] == computed
    run(loop, stays)
    check_over(loop, engine, stays)


def test_texts_that_sit_out_a_long_step_are_told_what_they_have_before_it() -> None:
    """Readers would otherwise wait for the end of the step, though the tokens exist."""
    engine = TextEngine(200)
    loop = step_loop(engine, latency=DEAR)
    alone = Policy(frozenset(), 8, 0.0)  # no draft waits for commits
    flood = [client(loop, 5, seed, 200, tenant="flood", policy=alone) for seed in range(12)]
    while not all(each.tokens for each in flood):
        turns(loop, 1)
    turns(loop, 2)
    for each in flood:
        each.read()
    assert any(each.running.pending_result for each in flood)  # the last results are still being coalesced
    other = client(loop, 30, 100, 5, tenant="other")
    had, forward = [each.session.generated for each in flood], engine.forward
    pending: list[int] = []  # flood sessions with a pending result at the start of a pass

    def pass_begins(batch: PackedBatch) -> NDArray[np.float32]:
        pending.append(sum(each.running.pending_result is not None for each in flood))
        return forward(batch)

    engine.forward = pass_begins  # type: ignore[method-assign]
    turns(loop, 1)
    engine.forward = forward  # type: ignore[method-assign]
    assert [each.session.generated for each in flood] == had  # they sat the step out
    assert pending == [0]
    run(loop, *flood, other)
    check_over(loop, engine, *flood, other)


def test_tenants_that_are_gone_are_forgotten_in_time() -> None:
    """The most recent ones keep their counters: leaving with a high counter and returning at once does not reset it."""
    loop = step_loop(TextEngine(8))
    shares = loop._queue.shares
    early = client(loop, 5, 0, 1, tenant="early")
    gone = [client(loop, 5, seed, 1, tenant=f"tenant {seed}") for seed in range(REMEMBERED + 50)]
    for each in (*gone, early):
        each.cancel()
    assert set(shares._counters) == {"early", *(each.session.request.tenant for each in gone[51:])}


@settings(max_examples=30, deadline=None)
@given(
    st.integers(3, 6),
    st.lists(
        st.tuples(
            st.sampled_from("abcd"), st.integers(5, 150), st.integers(1, 60), st.sampled_from([0.01, 1.0, 100.0])
        ),
        min_size=1,
        max_size=14,
    ),
)
def test_everyone_gets_its_tokens(blocks: int, asked: list[tuple[str, int, int, float]]) -> None:
    """With little memory and uneven weights: no session starves, and no token differs."""
    engine = TextEngine(blocks + 2)
    loop = step_loop(engine)
    weights = {tenant: weight for tenant, _, _, weight in asked}
    clients = [
        client(loop, length, seed, most, tenant=tenant, weight=weights[tenant])
        for seed, (tenant, length, most, _) in enumerate(asked)
    ]
    run(loop, *clients, turns=5000)
    check_over(loop, engine, *clients)
    assert not loop._queue.shares._sessions
