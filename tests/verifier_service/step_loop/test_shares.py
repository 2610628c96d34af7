"""Tenants take turns by weight, regardless of arrival order and demand."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.serving.errors import TooLateError
from tests.examples import examples
from tests.verifier_service.fakes import Client, TextEngine, run, step_loop
from tests.verifier_service.step_loop.helpers import check_over, client, turns
from verifier_service.scheduling import shares as module
from verifier_service.scheduling.shares import BURST
from verifier_service.step_loop import StepLoop

SHORT, LONG = 40, 70
"""Prompt lengths in tokens, of one block and of two."""


def order_of(loop: StepLoop, clients: list[Client]) -> list[Client]:
    """Turn the loop until all clients are over; return them in the order of their first admission."""
    order: list[Client] = []
    while not all(each.over for each in clients):
        for each in clients:
            each.read()
        assert loop.turn() == 0.0
        order += [each for each in clients if each not in order and (each.has_memory or each.over)]
    return order


@pytest.mark.parametrize("weight", [pytest.param(1.0, marks=pytest.mark.verify), 3.0])
def test_turns_go_by_weight(weight: float) -> None:
    """One text fits at a time, and one tenant queued all of its texts first. The other is next nevertheless, and then
    gets its share of the turns."""
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
    """The idle tenant needs nothing for a while, then more: it saves up no credit meanwhile. A third tenant, whose only
    competitor is this one, does not start with such credit either. The idle session has lost its memory and may need
    it again."""
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


def test_newcomers_do_not_starve_a_tenant_that_was_served_before() -> None:
    """Two new tenants are present at any time, each with a text."""
    engine, numbers, newcomers = TextEngine(3), itertools.count(100), list[Client]()
    loop = step_loop(engine)
    old = [client(loop, LONG, seed, 30, tenant="old") for seed in range(6)]
    while sum(each.over for each in old) < 3:
        for each in old:
            each.read()
        loop.turn()
    for _ in range(3000):
        newcomers = [each for each in newcomers if not each.over]
        while len(newcomers) < 2:
            number = next(numbers)
            newcomers.append(client(loop, LONG, number, 30, tenant=f"new {number}"))
        for each in (*old, *newcomers):
            each.read()
        loop.turn()
    assert all(each.over for each in old)


def test_the_virtual_time_is_of_all_tenants_that_compute() -> None:
    """Nine tenants compute long prompts while one decodes. In most steps only the one gets a token."""
    loop = step_loop(TextEngine(200))
    decoder, prompts = client(loop, SHORT, 0, 400, tenant="decoder"), dict[int, Client]()
    for step in range(300):
        for tenant in range(9):
            if tenant not in prompts or prompts[tenant].over:
                prompts[tenant] = client(loop, 400, 10 * step + tenant, 1, tenant=f"prompts {tenant}")
        for each in (decoder, *prompts.values()):
            each.read()
        loop.turn()
    shares = loop._queue.memory_shares
    assert shares._level <= max(shares._counters.values())


def test_no_text_is_too_late_by_a_pace_that_is_over() -> None:
    """The only text waits for its reader: there is no step in which the pace could change."""
    loop = step_loop(TextEngine(8), max_unread_tokens=6)
    lazy = client(loop, 10, 1, 40)
    while loop.turn() == 0.0:
        pass
    assert loop._queue.throttled(lazy.running)
    loop.stats.interval, loop.stats.usual_tokens = 1000.0, 30.0
    late = client(loop, 10, 2, 30, deadline=time.monotonic() + 60)
    loop.turn()
    assert late.mail.error is None


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
    assert loop._queue.memory_shares._counters["gone"] == computed
    run(loop, stays)
    check_over(loop, engine, stays)


def test_tenants_that_are_gone_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most recent tenants keep their counters: leaving and returning immediately does not reset a high counter."""
    monkeypatch.setattr(module, "REMEMBERED", 100)
    loop = step_loop(TextEngine(8))
    shares = loop._queue.memory_shares
    early = client(loop, 5, 0, 1, tenant="early")
    gone = [client(loop, 5, seed, 1, tenant=f"tenant {seed}") for seed in range(150)]
    for each in (*gone, early):
        each.cancel()
    assert set(shares._counters) == {"early", *(each.session.request.tenant for each in gone[51:])}


@settings(max_examples=examples(12), deadline=None)
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
    """Even with little memory and uneven weights, no session starves, and no token differs."""
    engine = TextEngine(blocks + 2)
    loop = step_loop(engine)
    weights = {tenant: weight for tenant, _, _, weight in asked}
    clients = [
        client(loop, length, seed, most, tenant=tenant, weight=weights[tenant])
        for seed, (tenant, length, most, _) in enumerate(asked)
    ]
    run(loop, *clients, turns=5000)
    check_over(loop, engine, *clients)
    assert not loop._queue.memory_shares._sessions
