"""Slow readers, and clients that disconnect."""

from __future__ import annotations

from specdec.decoding.tree import Paths
from specdec.engine.kv.blocks import BLOCK
from tests.verifier_service.fakes import (
    Client,
    TextEngine,
    run,
    step_loop,
)
from tests.verifier_service.step_loop.helpers import check_over, client, expect_no_growth, turns


class TestReaders:
    def test_one_far_behind_is_waited_for(self) -> None:
        engine = TextEngine(8)
        loop = step_loop(engine, max_unread_tokens=6)
        lazy, eager = client(loop, 10, 1, 40), client(loop, 10, 2, 40)
        run(loop, eager)
        assert loop.turn() is None
        assert len(lazy.tokens) == 7
        assert lazy.has_memory  # no other session needs the memory
        lazy.read()
        turns(loop, 1)
        assert len(lazy.tokens) == 8
        run(loop, lazy)
        assert loop.stats.preemptions == 0
        check_over(loop, engine, lazy, eager)

    def test_it_gives_up_its_memory_to_who_waits(self) -> None:
        """This holds even for the oldest session. It is readmitted once its reader has caught up."""
        engine = TextEngine(3)
        loop = step_loop(engine, max_unread_tokens=6)
        lazy = client(loop, 70, 1, 30)
        turns(loop, 7)
        assert loop.turn() is None
        eager = client(loop, 70, 2, 10)
        run(loop, eager)
        assert lazy.running.preemptions == 1
        assert not lazy.has_memory
        assert loop.turn() is None  # not readmitted before it reads
        late = client(loop, 70, 3, 10)
        lazy.read()
        turns(loop, 1)
        assert lazy.has_memory
        assert not late.has_memory
        run(loop, lazy, late)
        check_over(loop, engine, lazy, eager, late)

    def test_coming_back_it_is_as_old_as_ever(self) -> None:
        """Age is by arrival, not by readmission: of two running sessions, the later arrival is preempted."""
        engine = TextEngine(3)
        loop = step_loop(engine, max_unread_tokens=6)
        expect_no_growth(loop)
        lazy, large, young = client(loop, 40, 1, 40), client(loop, 100, 2, 10), client(loop, 60, 3, 10)
        run(loop, large)
        turns(loop, 1)
        assert young.has_memory
        assert not lazy.has_memory
        run(loop, lazy, young)
        assert (lazy.running.preemptions, young.running.preemptions) == (1, 1)
        check_over(loop, engine, lazy, large, young)

    def test_an_old_one_that_does_not_read_stops_nobody_who_grows(self) -> None:
        """The young session is preempted for lack of memory, then gets the memory of the old one."""
        engine = TextEngine(3)
        loop = step_loop(engine, max_unread_tokens=6)
        expect_no_growth(loop)
        lazy, eager = client(loop, 30, 1, 30), client(loop, 30, 2, 80)
        run(loop, eager)
        assert not lazy.over
        run(loop, lazy)
        check_over(loop, engine, lazy, eager)

    def test_a_waiting_one_that_does_not_read_lets_others_pass(self) -> None:
        engine = TextEngine(3)
        loop = step_loop(engine, max_unread_tokens=6)
        expect_no_growth(loop)
        old, lazy = client(loop, 60, 1, 30), client(loop, 60, 2, 30)
        for _ in range(7):
            old.read()
            turns(loop, 1)
        assert lazy.running.preemptions == 1
        assert not lazy.has_memory
        late = client(loop, 60, 3, 4)
        run(loop, old)
        assert lazy.session.tree.base - lazy.session.consumed <= 6
        run(loop, lazy, late)
        check_over(loop, engine, old, lazy, late)


class TestCancel:
    def test_in_every_state(self) -> None:
        """Cancelled while waiting, in prefill, decoding, with candidates, throttled, preempted, over; others go on."""
        engine = TextEngine(8)
        loop = step_loop(engine, max_unread_tokens=10, step_rows=64)

        def stays(seed: int) -> Client:
            return client(loop, 60, seed, 12)

        kept = [stays(1)]
        turns(loop, 1)
        decoding = client(loop, 10, 2, 40)
        turns(loop, 3)
        decoding.offer(right=3, wrong=[2])
        decoding.cancel()
        in_prompt = client(loop, 200, 3, 40)
        turns(loop, 1)
        assert in_prompt.session.remaining_prompt > 0
        assert in_prompt.session.computed > 0
        in_prompt.cancel()
        large = client(loop, 7 * BLOCK - 1, 4, 2)
        kept[0].read()
        turns(loop, 1)
        assert not large.has_memory
        large.cancel()
        run(loop, *kept)
        stalled = client(loop, 10, 5, 40)
        while loop.turn() is not None:
            pass
        assert stalled.has_memory
        stalled.cancel()
        assert loop.pool.held == 0
        kept[0].cancel()  # already over: the end of the stream also detaches
        check_over(loop, engine, *kept)
        assert [each.tokens for each in (in_prompt, large)] == [[], []]
        assert decoding.tokens == decoding.want[: len(decoding.tokens)]

    def test_preempted(self) -> None:
        engine = TextEngine(3)
        loop = step_loop(engine)
        expect_no_growth(loop)
        old, young = client(loop, 60, 1, 20), client(loop, 60, 2, 20)
        turns(loop, 6)
        assert not young.has_memory
        young.cancel()
        assert loop.stats.waiting == 0
        run(loop, old)
        check_over(loop, engine, old)

    def test_twice(self) -> None:
        engine = TextEngine(3)
        loop = step_loop(engine)
        one, other = client(loop), client(loop, seed=1)
        turns(loop, 1)
        one.cancel()
        one.cancel()
        run(loop, other)
        check_over(loop, engine, other)

    def test_what_comes_for_one_that_has_gone(self) -> None:
        engine = TextEngine(3)
        loop = step_loop(engine)
        one = client(loop)
        run(loop, one)
        one.session.extend(one.session.tree.base, Paths([3], [0], [-0.1]), 0.0)
        one.read()
        check_over(loop, engine, one)
