"""Tenants share KV memory by weight: a tenant with too much gives some to one with less. Nothing else preempts."""

from __future__ import annotations

import pytest

from specdec.engine.kv.blocks import BLOCK
from tests.verifier_service.fakes import Client, TextEngine, run, step_loop
from tests.verifier_service.step_loop.helpers import NO_BAD, check_over, client, expect_no_growth, text, turns
from verifier_service.scheduling.shares import competing_sessions, held, youngest_beyond, youngest_of_largest

SHORT, LONG = 40, 70
"""Prompt lengths in tokens, of one block and of two."""


def test_a_tenant_with_too_much_memory_gives_some_to_one_with_less() -> None:
    """Immediately, without waiting for the tenant's texts to end; the oldest one keeps its memory."""
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
    """A tenant with a quarter more memory would give up all texts except its oldest, which others never preempt."""
    engine = TextEngine(30)
    loop = step_loop(engine)
    flood = [client(loop, SHORT, seed, 20, tenant="flood") for seed in range(4)]
    mine = client(loop, SHORT, 5, 20, tenant="mine")
    turns(loop, 1)
    running, waits = [each.running for each in (*flood, mine)], client(loop, SHORT, 6, 20, tenant="mine").running
    assert competing_sessions(running, waits, BLOCK) == [flood[0].running, mine.running]
    assert competing_sessions(running, waits, 3 * BLOCK) == running
    late = client(loop, SHORT, 7, 20, tenant="late").running
    assert competing_sessions([flood[0].running, mine.running], late, BLOCK // 2) == [flood[0].running, mine.running]
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
