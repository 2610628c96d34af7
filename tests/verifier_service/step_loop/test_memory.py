"""Prompts, shared prefixes, admission and preemption."""

from __future__ import annotations

import pytest

from specdec.decoding.sampling import Sampling
from specdec.engine.kv.blocks import BLOCK
from tests.verifier_service.fakes import (
    BAD,
    DEAR,
    Client,
    PagedTextEngine,
    TextEngine,
    run,
    step_loop,
)
from tests.verifier_service.step_loop.helpers import (
    NO_BAD,
    SAMPLINGS,
    check_over,
    client,
    expect_no_growth,
    text,
    turns,
)
from verifier_service.settings.tuning import DEFAULTS


class TestPrompts:
    def test_pieces_are_bounded_and_equal(self) -> None:
        engine = TextEngine(30)
        loop = step_loop(engine, step_rows=32)
        clients = [client(loop, length, length, 1) for length in (20, 101, 102, 103)]
        turns(loop, 1)
        assert [each.session.computed for each in clients] == [8] * 4
        while not clients[0].over:
            turns(loop, 1)
        turns(loop, 1)
        rest = {each.session.computed for each in clients[1:]}
        assert max(rest) - min(rest) <= 2
        run(loop, *clients)
        assert engine.steps[:-1] == [32] * (len(engine.steps) - 1)  # full while enough prompt tokens remain
        assert sum(engine.steps) == 20 + 101 + 102 + 103
        check_over(loop, engine, *clients)

    def test_those_who_decode_go_on(self) -> None:
        """Each step of a long prompt brings decoding texts a token; chunks are short where rows are expensive."""
        engine = TextEngine(30)
        loop = step_loop(engine, DEAR, step_rows=64)
        decoding = client(loop, 10, 1, 60)
        turns(loop, 1)
        before = len(decoding.tokens)
        prompt = client(loop, 200, 2, 5)
        while not prompt.tokens:
            decoding.read()
            turns(loop, 1)
        steps = engine.steps[1:]
        assert all(rows <= 1 + DEFAULTS.prefill.min_chunk_tokens for rows in steps)
        assert len(decoding.tokens) == before + len(steps)
        assert len(steps) == 200 / DEFAULTS.prefill.min_chunk_tokens
        run(loop, decoding, prompt)
        check_over(loop, engine, decoding, prompt)


def test_where_chains_are_taken_alone_all_memory_is_for_texts() -> None:
    engine = PagedTextEngine(8)
    loop = step_loop(engine)
    assert loop.context == 7 * BLOCK
    drafted = client(loop, 10, 1, 20)
    turns(loop, 1)
    drafted.offer(right=4)
    turns(loop, 1)
    assert len(drafted.tokens) == 1 + 5  # candidates were verified nevertheless
    longest = client(loop, 7 * BLOCK - 10, 2, 10)
    run(loop, drafted, longest)
    check_over(loop, engine.inner, drafted, longest)


class TestSharing:
    @pytest.mark.parametrize("over", [True, False])
    def test_what_was_computed_is_not_computed_again(self, over: bool) -> None:
        """A prefix is shared while the first session runs, and reused after its end."""
        engine = TextEngine(30)
        loop = step_loop(engine)
        first = client(loop, 200, 1, 20)
        turns(loop, 1)
        if over:
            run(loop, first)
        same, other = client(loop, 200, 1, 20), client(loop, 200, 2, 20)
        before = len(engine.steps)
        turns(loop, 1)
        found = 3 * BLOCK
        assert engine.steps[before] == (200 - found) + 200 + (not over)
        run(loop, first, same, other)
        assert [each.mail.details[0].cached for each in (first, same, other)] == [0, found, 0]
        assert {details.cached for details in same.mail.details[1:]} == {0}
        assert (loop.stats.prompt_tokens, loop.stats.cached_tokens) == (600, found)
        check_over(loop, engine, first, same, other)

    def test_a_beginning_inside_a_block_is_copied(self) -> None:
        engine = TextEngine(30)
        loop = step_loop(engine)
        first = client(loop, 200, 1, 1)
        run(loop, first)
        prompt = [*text(200, 1)[:170], 3, 4, 5]
        assert text(200, 1)[170] != 3
        second = Client(loop, prompt, 30, sampling=NO_BAD)
        run(loop, second)
        assert second.mail.details[0].cached == 170
        assert engine.steps[1] == 3
        check_over(loop, engine, first, second)

    def test_generated_text_is_found_too(self) -> None:
        engine = TextEngine(30)
        loop = step_loop(engine)
        first = client(loop, 60, 1, 10)
        run(loop, first)
        second = Client(loop, text(60, 1) + first.tokens, 10, sampling=NO_BAD)
        run(loop, second)
        assert second.mail.details[0].cached == BLOCK
        check_over(loop, engine, first, second)

    def test_tenants_share_nothing(self) -> None:
        engine = TextEngine(30)
        loop = step_loop(engine)
        for tenant in ("a", "b", ""):
            before = len(engine.steps)
            one = client(loop, 200, 1, 5, tenant=tenant)
            run(loop, one)
            assert engine.steps[before] == 200
            assert one.mail.details[0].cached == 0
            check_over(loop, engine, one)
        again = client(loop, 200, 1, 5, tenant="b")
        run(loop, again)
        assert again.mail.details[0].cached == 3 * BLOCK

    def test_what_is_shared_is_never_written(self) -> None:
        """Five sessions share a prefix, each with its own candidates; the first is decoding when the others join."""
        engine = TextEngine(30)
        loop = step_loop(engine)
        first = client(loop, 2 * BLOCK - 3, 1, 40, sampling=SAMPLINGS[1])
        turns(loop, 8)
        clients = [
            client(loop, 2 * BLOCK - 3, 1, 40, sampling=Sampling(temperature=1.0, seed=seed, banned_tokens={BAD}))  # type: ignore[arg-type]
            for seed in range(4)
        ]
        turns(loop, 1)
        while not all(each.over for each in clients):
            for each in (first, *clients):
                if not each.over:
                    each.offer(right=3, wrong=[2, 3, 4, 5])
                each.read()
            assert loop.turn() == 0.0
        run(loop, first, *clients)
        check_over(loop, engine, first, *clients)


class TestMemory:
    def test_who_comes_first_is_let_in_first(self) -> None:
        """Even if only a later one fits."""
        engine = TextEngine(5)
        loop = step_loop(engine)
        first, large, small = client(loop, 100, 1, 20), client(loop, 200, 2, 20), client(loop, 10, 3, 20)
        turns(loop, 1)
        assert [each.has_memory for each in (first, large, small)] == [True, False, False]
        assert (loop.stats.running, loop.stats.waiting) == (1, 2)
        run(loop, first)
        turns(loop, 1)
        assert large.has_memory
        run(loop, large, small)
        assert loop.stats.preemptions == 0
        check_over(loop, engine, first, large, small)

    def test_the_youngest_gives_way(self) -> None:
        engine = TextEngine(4)
        loop = step_loop(engine)
        expect_no_growth(loop)
        clients = [client(loop, 60, seed, 20) for seed in range(3)]
        old, middle, young = clients
        turns(loop, 5)
        assert all(each.has_memory for each in clients)
        turns(loop, 1)  # all need a second block
        assert [each.has_memory for each in clients] == [True, False, False]
        run(loop, *clients)
        assert [each.running.preemptions for each in clients] == [0, 1, 1]
        assert [each.mail.details[-1].preemptions for each in clients] == [0, 1, 1]
        assert loop.stats.preemptions == 2
        assert len(old.mail.results) == len(middle.mail.results) == len(young.mail.results) == 20
        check_over(loop, engine, *clients)

    def test_the_preempted_go_before_the_new(self) -> None:
        """Preempted sessions rejoin the queue later but have waited longer; among themselves, order of arrival
        decides."""
        engine = TextEngine(4)
        loop = step_loop(engine)
        expect_no_growth(loop)
        clients = [client(loop, 60, seed, 20) for seed in range(3)]
        turns(loop, 3)
        new = client(loop, 60, 9, 2)
        turns(loop, 3)
        assert [each.has_memory for each in (*clients, new)] == [True, False, False, False]
        order: list[Client] = []
        while not all(each.over for each in (*clients, new)):
            for each in (*clients[1:], new):
                each.read()
                if each.has_memory and each not in order:
                    order.append(each)
            clients[0].read()
            assert loop.turn() == 0.0
        assert order == [clients[1], clients[2], new] or order == [clients[1], new]  # one may run unobserved
        check_over(loop, engine, *clients, new)

    def test_room_to_grow_stays_for_those_who_run(self) -> None:
        """Four blocks hold four prompts, but not three whole texts."""
        engine = TextEngine(5)
        loop = step_loop(engine)
        clients = [client(loop, 60, seed, 20) for seed in range(4)]
        turns(loop, 1)
        assert loop.pool.available == 2
        assert [each.has_memory for each in clients] == [True, True, False, False]
        run(loop, *clients)
        assert loop.stats.preemptions == 0
        check_over(loop, engine, *clients)

    def test_who_ends_first_makes_room(self) -> None:
        """A newcomer is admitted if memory will be free by the time it needs it."""
        engine = TextEngine(5)
        loop = step_loop(engine)
        ending, first, second = client(loop, 60, 1, 3), client(loop, 60, 2, 20), client(loop, 50, 3, 20)
        turns(loop, 1)
        assert all(each.has_memory for each in (ending, first, second))
        assert loop.pool.available == 1
        run(loop, ending, first, second)
        assert loop.stats.preemptions == 0
        check_over(loop, engine, ending, first, second)

    @pytest.mark.parametrize("blocks", [2, 3, 4, 6])
    def test_the_smallest_memory_serves_everyone(self, blocks: int) -> None:
        """One session at a time if necessary: tokens equal those with large memory."""
        answers = []
        for engine in (TextEngine(blocks), TextEngine(100)):
            loop = step_loop(engine)
            clients = [
                Client(loop, text(20 + 3 * seed, seed % 3), 20 + seed, sampling=SAMPLINGS[seed % 3], top_logprobs=0)
                for seed in range(7)
            ]
            run(loop, *clients, turns=1000)
            check_over(loop, engine, *clients)
            answers.append([(each.tokens, each.logprobs) for each in clients])
        assert answers[0] == answers[1]

    def test_preemption_keeps_what_was_computed_where_it_can(self) -> None:
        """A preempted session finds its blocks again if no other session took them."""
        engine = TextEngine(5)
        loop = step_loop(engine)
        expect_no_growth(loop)
        old, young = client(loop, 120, 1, 30), client(loop, 125, 2, 10)
        turns(loop, 3)
        assert all(each.has_memory for each in (old, young))
        run(loop, young)
        run(loop, old)
        assert old.running.preemptions == 0
        assert young.running.preemptions == 1
        assert sum(engine.steps) < 120 + 30 + 125 + 10 + 125 - BLOCK // 2
        assert {details.cached for details in young.mail.details} == {0}  # nothing was cached on first admission
        assert loop.stats.cached_tokens == 0
        check_over(loop, engine, old, young)
