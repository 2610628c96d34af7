"""The step loop, turned by hand over an engine that finds every wrong slot: who gets memory, who gives it up, and
that through all of it every session gets the tokens it would get alone.

Nothing here depends on time: costs are fixed, sessions have no patience, and turns are counted.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.decoding.logprobs import log_softmax
from specdec.decoding.lookahead import Lookahead
from specdec.decoding.sampling import Sampling
from specdec.decoding.speculation import NO_DRAFTERS, OWN_DRAFTERS, Drafter
from specdec.decoding.tree import Paths
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.row_counts import InvariantRowCounts
from specdec.serving.engine_worker import CHECK_SECONDS
from specdec.serving.errors import EngineLostError, ModelFailureError
from tests.verifier_service.fakes import (
    BAD,
    DEAR,
    END,
    FREE,
    LANGUAGE,
    VOCABULARY,
    Client,
    Decided,
    DeviceTextEngine,
    FixedLatency,
    TextEngine,
    ThreadedTextEngine,
    run,
    step_loop,
)
from verifier_service.backend.request import Policy
from verifier_service.backend.result import BONUS, CONTEXT, CORRECTION, LENGTH, PLAIN, REMOTE_DRAFT, STOP
from verifier_service.costs.step_latency import StepLatency
from verifier_service.settings.tuning import DEFAULTS, CommitTuning, Tuning
from verifier_service.speculation.controller import Mode, SpeculationController
from verifier_service.step_loop import MOST_CANDIDATES, StepLoop

REMOTE = frozenset({Drafter.REMOTE})

NO_BAD = Sampling(banned_tokens=frozenset({BAD}))
WARM = Sampling(temperature=0.9, seed=5, banned_tokens=frozenset({BAD}))
SAMPLINGS = [
    NO_BAD,
    WARM,
    Sampling(temperature=1.0, seed=3, top_k=4, repetition_penalty=1.3, banned_tokens=frozenset({BAD})),
]


def text(length: int, seed: int) -> list[int]:
    """Of ordinary tokens."""
    return [int(token) for token in np.random.default_rng([seed, length]).integers(2, BAD, length)]


def client(loop: StepLoop, length: int = 5, seed: int = 0, max_tokens: int = 20, **fields: Any) -> Client:
    return Client(loop, text(length, seed), max_tokens, **{"sampling": NO_BAD} | fields)


def turns(loop: StepLoop, count: int) -> None:
    for _ in range(count):
        assert loop.turn() == 0.0


def check_over(loop: StepLoop, engine: TextEngine, *clients: Client) -> None:
    """All got what they should, and nothing is left."""
    for each in clients:
        assert each.mail.error is None
        assert each.tokens == each.want
        assert not each.has_memory
    assert engine.faults == []
    assert loop.pool.held == 0
    assert (loop.stats.running, loop.stats.waiting) == (0, 0)
    assert loop.turn() is None


class TestTokens:
    @pytest.mark.parametrize("rows", [None, InvariantRowCounts((4, 6, 16))], ids=["any-rows", "row-class"])
    @pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "penalised"])
    def test_many_get_what_each_would_get_alone(self, sampling: Sampling, rows: InvariantRowCounts | None) -> None:
        """Drafted well and badly and not at all, by an engine that pads and one that does not."""
        engine = TextEngine(30, rows=rows)
        loop = step_loop(engine)
        clients = [client(loop, 30 * i + 1, i, 40, sampling=sampling) for i in range(5)]
        for _ in range(60):
            for i, each in enumerate(clients):
                if i and not each.over and not each.session.remaining_prompt:
                    each.offer(right=i, wrong=[2, 3, 4] if i % 2 else [])
                each.read()
            loop.turn()
        check_over(loop, engine, *clients)
        sources = {source for each in clients for result in each.mail.results for source in result.sources}
        assert sources == {REMOTE_DRAFT, CORRECTION, BONUS, PLAIN}
        assert 0 < loop.stats.accepted < loop.stats.drafted

    @pytest.mark.parametrize(
        ("fields", "finish"),
        [
            ({"max_tokens": 7}, LENGTH),
            ({"max_tokens": 1000}, CONTEXT),
            ({"max_tokens": 150, "end_tokens": frozenset({END})}, STOP),
        ],
    )
    def test_texts_end(self, fields: dict[str, Any], finish: int) -> None:
        engine = TextEngine(4)
        loop = step_loop(engine)
        one = client(loop, **fields)
        run(loop, one)
        assert one.mail.finish == finish
        check_over(loop, engine, one)

    def test_a_text_is_taken_up_again(self) -> None:
        engine = TextEngine(8)
        loop = step_loop(engine)
        whole = client(loop, 80, 1, 30, sampling=WARM)
        run(loop, whole)
        rest = client(loop, 80, 1, 30, sampling=WARM, generated=whole.tokens[:11])
        run(loop, rest)
        assert rest.tokens == whole.tokens[11:]
        check_over(loop, engine, whole, rest)

    @pytest.mark.parametrize("always", [False, True])
    def test_the_controller_says_whether_candidates_are_used(self, always: bool) -> None:
        """And drafts are told; a session that speculates always does not listen."""
        loop = step_loop(TextEngine(8), controller=Decided(Mode.OFF))
        one = client(loop, 10, 1, 12)
        one.session.policy = Policy(REMOTE, 8, 10.0, forced=always)
        turns(loop, 1)
        one.offer(right=4)
        while not one.over:
            one.read()
            assert loop.turn() == 0.0  # nothing is waited for: what is there will do
        offered = sum(result.offered for result in one.mail.results)
        assert offered == (4 if always else 0)
        assert {times.drafting_wanted for times in one.mail.times[1:]} == {always}

    def test_a_draft_hears_at_once_that_it_may_pause(self) -> None:
        """Else it would be at work for nothing, beside a step that wants its core."""
        controller = Decided(Mode.REMOTE_DRAFT)
        loop = step_loop(TextEngine(8), controller=controller)
        one = client(loop, 10, 1, 12)
        one.session.policy = Policy(REMOTE, 8, 0.0)
        turns(loop, 2)
        heard = len(one.mail.times)
        controller.decided = Mode.OFF
        turns(loop, 1)
        (times,) = one.mail.times[heard:]
        assert not times.drafting_wanted

    def test_drafts_that_share_the_cores_wait_until_prompts_are_read(self) -> None:
        """While more texts go on than prompts are read, they do not."""
        engine = ThreadedTextEngine(40)
        loop = step_loop(engine, step_rows=16, controller=Decided(Mode.REMOTE_DRAFT))
        first = client(loop, 40, 1, 50)
        assert not loop.drafting_outlook(first.session, 1)[0]
        while first.session.remaining_prompt:
            turns(loop, 1)
            assert engine.used == 2
        assert first.mail.times[0].drafting_wanted
        turns(loop, 1)
        assert engine.used == 1
        clients = [client(loop, 40, seed, 50) for seed in (2, 3)]
        turns(loop, 1)
        assert not first.mail.times[-1].drafting_wanted  # for how long it keeps its core: test_cpu_threads.py
        while any(each.session.remaining_prompt for each in clients):
            turns(loop, 1)
        turns(loop, 1)
        assert first.mail.times[-1].drafting_wanted
        client(loop, 40, 4, 50)
        turns(loop, 1)
        assert first.mail.times[-1].drafting_wanted

    @pytest.mark.parametrize("mode", list(Mode))
    def test_a_session_that_comes_is_told_whether_others_like_it_are_drafted(self, mode: Mode) -> None:
        loop = step_loop(TextEngine(8), controller=Decided(mode))
        wanted, _ = loop.drafting_outlook(client(loop, 10, 1, 12).session, 16)
        assert wanted is (mode is Mode.REMOTE_DRAFT)

    @pytest.mark.parametrize("forced", [False, True])
    def test_a_draft_that_is_forced_is_wanted_though_nothing_pays(self, forced: bool) -> None:
        """A second row costs more than a step: the break-even probability goes up to 1."""

        class Steep(StepLatency):
            def observe(self, rows: int, seconds: float) -> None:
                pass

        loop = step_loop(TextEngine(8), Steep((1, 2), [1.0, 3.0]), controller=Decided(Mode.REMOTE_DRAFT))
        one = client(loop, 10, 1, 300, policy=Policy(REMOTE, 8, 0.0, forced=forced))
        run(loop, one)
        assert one.mail.times[-1].min_candidate_probability == pytest.approx(1.0)
        assert one.mail.times[-1].drafting_wanted is forced

    def test_candidates_come_at_any_time(self) -> None:
        """Before there is memory, in the prompt, and late: they are kept for as long as they can be taken."""
        engine = TextEngine(3)
        loop = step_loop(engine, step_rows=16)
        first, second = client(loop, 100, 1, 10), client(loop, 100, 2, 10)
        second.offer(right=4)
        first.offer(right=4)
        turns(loop, 1)
        assert first.session.remaining_prompt
        assert not second.has_memory
        while not first.tokens:
            turns(loop, 1)
        assert first.mail.results[0].accepted == 0  # the step that ends a prompt has no room for candidates
        turns(loop, 1)
        assert first.mail.results[1].accepted == 3
        late = first.session.tree.base - 2
        first.session.extend(late, Paths(first.tokens[-2:], [0, 1], [-0.1, -0.1]), 0.0)
        run(loop, first, second)
        assert sum(result.accepted for result in second.mail.results) == 3
        check_over(loop, engine, first, second)

    def test_more_candidates_than_side_slots(self) -> None:
        """In the smallest memory there is."""
        engine = TextEngine(2, tree_slots=3)
        loop = step_loop(engine)
        one = client(loop, 10, 1, 30)
        turns(loop, 1)
        while not one.over:
            one.offer(right=2, wrong=[2, 3, 4])
            assert loop.turn() == 0.0
            assert engine.steps[-1] <= 1 + 3
        assert max(engine.steps[1:]) == 4
        check_over(loop, engine, one)

    def test_dear_rows_verify_nothing(self) -> None:
        engine = TextEngine(12)
        loop = step_loop(engine, FixedLatency(1e9))
        one, other = client(loop, 10, 1, 10), client(loop, 10, 2, 10)
        turns(loop, 1)
        one.offer(right=3)
        turns(loop, 1)
        assert loop.stats.drafted == 0
        run(loop, one, other)
        check_over(loop, engine, one, other)

    def test_the_controller_hears_of_no_step_in_which_a_prompt_ends(self) -> None:
        """It takes longer than one that speculates, and brings a token."""

        class Listening(SpeculationController):
            heard = 0

            def update(self, batch: Any, **_: Any) -> None:
                self.heard += 1

        controller = Listening()
        loop = step_loop(TextEngine(12), controller=controller)
        early = client(loop, 10, 1, 30)
        turns(loop, 1)
        assert (len(early.tokens), controller.heard) == (1, 0)
        turns(loop, 2)
        assert controller.heard == 2
        late = client(loop, 10, 2, 30)
        turns(loop, 1)
        assert (len(late.tokens), controller.heard) == (1, 2)
        turns(loop, 1)
        assert controller.heard == 3

    def test_nobody_speculates(self) -> None:
        """Candidates are not used, and commits may be told together."""
        engine = TextEngine(12)
        loop = step_loop(engine)
        plain = client(loop, 10, 1, 30, top_logprobs=1)
        plain.session.policy = Policy(NO_DRAFTERS, 8, 0.0)
        plain.offer(right=5)
        run(loop, plain)
        assert loop.stats.drafted == 0
        assert {s for result in plain.mail.results for s in result.sources} == {PLAIN}
        bases = [result.base for result in plain.mail.results]
        assert bases == [10 + sum(len(v.tokens) for v in plain.mail.results[:i]) for i in range(len(bases))]
        assert len(plain.logprobs) == 30
        check_over(loop, engine, plain)

    def test_who_has_time_hears_less_often(self) -> None:
        """Unless a draft must hear."""
        engine = TextEngine(12)
        loop = step_loop(engine)
        undrafted, begin = Policy(NO_DRAFTERS, 8, 0.0), time.monotonic()
        patient = client(loop, 10, 1, 60, coalesce_commits=True, policy=undrafted)
        drafted = client(loop, 10, 2, 60, coalesce_commits=True)
        run(loop, patient, drafted)
        assert len(patient.mail.results) <= 2 + (time.monotonic() - begin) / DEFAULTS.commits.relaxed_coalesce_seconds
        assert len(drafted.mail.results) == 60
        check_over(loop, engine, patient, drafted)

    def test_tokens_of_an_undrafted_text_that_come_fast_are_told_together(self) -> None:
        engine = TextEngine(12)
        loop = step_loop(engine)
        begin = time.monotonic()
        alone = client(loop, 10, 1, 60, policy=Policy(NO_DRAFTERS, 8, 0.0))
        run(loop, alone)
        assert len(alone.mail.results) <= 2 + (time.monotonic() - begin) / DEFAULTS.commits.coalesce_seconds
        assert len(alone.mail.results[0].tokens) == 1  # nobody waits for the first
        check_over(loop, engine, alone)

    def test_another_tuning_sends_every_commit(self) -> None:
        engine = TextEngine(12)
        at_once = CommitTuning(messages_a_second=math.inf, coalesce_seconds=0.0, relaxed_coalesce_seconds=0.0)
        loop = step_loop(engine, tuning=Tuning(commits=at_once))
        alone = client(loop, 10, 1, 60, policy=Policy(NO_DRAFTERS, 8, 0.0))
        run(loop, alone)
        assert len(alone.mail.results) == 60
        check_over(loop, engine, alone)

    def test_a_reader_hears_of_everything_before_it_is_waited_for(self) -> None:
        """However many commits are told together."""
        engine = TextEngine(12)
        loop = step_loop(engine, max_unread_tokens=3)
        clients = [client(loop, 10, seed, 60) for seed in range(3)]
        for each in clients:
            each.session.policy = Policy(NO_DRAFTERS, 8, 0.0)
        run(loop, *clients)
        check_over(loop, engine, *clients)


class TestLogprobs:
    def test_they_are_those_of_each_token(self) -> None:
        """In a step with accepted candidates, among sessions that want others or none."""
        engine = TextEngine(12)
        loop = step_loop(engine)
        wants = (3, None, 0, 11)
        clients = [client(loop, 10, i, 12, sampling=WARM, top_logprobs=want) for i, want in enumerate(wants)]
        turns(loop, 1)
        for each in clients:
            each.offer(right=3, wrong=[2, 3])
        run(loop, *clients)
        assert all(max(result.accepted for result in each.mail.results) == 3 for each in clients)
        for each, want in zip(clients, wants, strict=True):
            assert len(each.logprobs) == (0 if want is None else len(each.tokens))
            prefix = list(each.session.request.prompt)
            for token, found in zip([] if want is None else each.tokens, each.logprobs, strict=True):
                right = log_softmax(LANGUAGE.logits(LANGUAGE.number_of(prefix)))
                best = np.argsort(-right)[:want]
                assert found.chosen == pytest.approx(right[token])
                assert found.top_tokens == best.tolist()
                assert found.top_logprobs == pytest.approx(right[best].tolist())
                prefix.append(token)
        check_over(loop, engine, *clients)


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
        assert engine.steps[:-1] == [32] * (len(engine.steps) - 1)  # full as long as there is enough to do
        assert sum(engine.steps) == 20 + 101 + 102 + 103
        check_over(loop, engine, *clients)

    def test_those_who_decode_go_on(self) -> None:
        """Each step of a long prompt, short pieces of it if rows are dear, brings them a token."""
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


class TestSharing:
    @pytest.mark.parametrize("over", [True, False])
    def test_what_was_computed_is_not_computed_again(self, over: bool) -> None:
        """By a session that has gone, and by one that still goes on."""
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
        assert [each.mail.times[0].cached for each in (first, same, other)] == [0, found, 0]
        assert {times.cached for times in same.mail.times[1:]} == {0}
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
        assert second.mail.times[0].cached == 170
        assert engine.steps[1] == 3
        check_over(loop, engine, first, second)

    def test_generated_text_is_found_too(self) -> None:
        engine = TextEngine(30)
        loop = step_loop(engine)
        first = client(loop, 60, 1, 10)
        run(loop, first)
        second = Client(loop, text(60, 1) + first.tokens, 10, sampling=NO_BAD)
        run(loop, second)
        assert second.mail.times[0].cached == BLOCK
        check_over(loop, engine, first, second)

    def test_tenants_share_nothing(self) -> None:
        engine = TextEngine(30)
        loop = step_loop(engine)
        for tenant in ("a", "b", ""):
            before = len(engine.steps)
            one = client(loop, 200, 1, 5, tenant=tenant)
            run(loop, one)
            assert engine.steps[before] == 200
            assert one.mail.times[0].cached == 0
            check_over(loop, engine, one)
        again = client(loop, 200, 1, 5, tenant="b")
        run(loop, again)
        assert again.mail.times[0].cached == 3 * BLOCK

    def test_what_is_shared_is_never_written(self) -> None:
        """Five sessions on one prefix, each with candidates of its own, the first among the others' ancestors."""
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
        """Even if there is room for one that came later."""
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
        clients = [client(loop, 60, seed, 20) for seed in range(3)]
        old, middle, young = clients
        turns(loop, 5)
        assert all(each.has_memory for each in clients)
        turns(loop, 1)  # all need a second block
        assert [each.has_memory for each in clients] == [True, False, False]
        run(loop, *clients)
        assert [each.running.preemptions for each in clients] == [0, 1, 1]
        assert [each.mail.times[-1].preemptions for each in clients] == [0, 1, 1]
        assert loop.stats.preemptions == 2
        assert len(old.mail.results) == len(middle.mail.results) == len(young.mail.results) == 20
        check_over(loop, engine, *clients)

    def test_the_preempted_go_before_the_new(self) -> None:
        """They have waited longer, though they come to wait later; and in order of arrival."""
        engine = TextEngine(4)
        loop = step_loop(engine)
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
        assert order == [clients[1], clients[2], new] or order == [clients[1], new]  # the last was in between turns
        check_over(loop, engine, *clients, new)

    def test_room_to_grow_stays_for_those_who_run(self) -> None:
        """A part of the memory is not given to newcomers."""
        engine = TextEngine(DEFAULTS.spare_share + 1)
        loop = step_loop(engine)
        first = client(loop, (DEFAULTS.spare_share - 2) * BLOCK + 1, 1, 70)  # all blocks but one
        second = client(loop, 10, 2, 5)
        turns(loop, 1)
        assert loop.pool.available == 1
        assert not second.has_memory
        run(loop, first, second)
        assert loop.stats.preemptions == 0
        check_over(loop, engine, first, second)

    @pytest.mark.parametrize("blocks", [2, 3, 4, 6])
    def test_the_smallest_memory_serves_everyone(self, blocks: int) -> None:
        """One after the other if need be: the tokens are those of a large one."""
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
        """The memory of the preempted is found again if nobody took it."""
        engine = TextEngine(5)
        loop = step_loop(engine)
        old, young = client(loop, 120, 1, 30), client(loop, 125, 2, 10)
        turns(loop, 3)
        assert all(each.has_memory for each in (old, young))
        run(loop, young)
        run(loop, old)
        assert old.running.preemptions == 0
        assert young.running.preemptions == 1
        assert sum(engine.steps) < 120 + 30 + 125 + 10 + 125 - BLOCK // 2
        assert {times.cached for times in young.mail.times} == {0}  # none was there when it first came
        assert loop.stats.cached_tokens == 0
        check_over(loop, engine, old, young)


class TestReaders:
    def test_one_far_behind_is_waited_for(self) -> None:
        engine = TextEngine(8)
        loop = step_loop(engine, max_unread_tokens=6)
        lazy, eager = client(loop, 10, 1, 40), client(loop, 10, 2, 40)
        run(loop, eager)
        assert loop.turn() is None
        assert len(lazy.tokens) == 7
        assert lazy.has_memory  # nobody else wants it
        lazy.read()
        turns(loop, 1)
        assert len(lazy.tokens) == 8
        run(loop, lazy)
        assert loop.stats.preemptions == 0
        check_over(loop, engine, lazy, eager)

    def test_it_gives_up_its_memory_to_who_waits(self) -> None:
        """Though it is the oldest; and gets some again when it has caught up."""
        engine = TextEngine(3)
        loop = step_loop(engine, max_unread_tokens=6)
        lazy = client(loop, 70, 1, 30)
        turns(loop, 7)
        assert loop.turn() is None
        eager = client(loop, 70, 2, 10)
        run(loop, eager)
        assert lazy.running.preemptions == 1
        assert not lazy.has_memory
        assert loop.turn() is None  # it is not let in before it reads
        late = client(loop, 70, 3, 10)
        lazy.read()
        turns(loop, 1)
        assert lazy.has_memory
        assert not late.has_memory
        run(loop, lazy, late)
        check_over(loop, engine, lazy, eager, late)

    def test_coming_back_it_is_as_old_as_ever(self) -> None:
        """Of two that run, the one that came later gives way, though it was let in first."""
        engine = TextEngine(3)
        loop = step_loop(engine, max_unread_tokens=6)
        lazy, large, young = client(loop, 40, 1, 40), client(loop, 100, 2, 10), client(loop, 60, 3, 10)
        run(loop, large)
        turns(loop, 1)
        assert young.has_memory
        assert not lazy.has_memory
        run(loop, lazy, young)
        assert (lazy.running.preemptions, young.running.preemptions) == (1, 1)
        check_over(loop, engine, lazy, large, young)

    def test_an_old_one_that_does_not_read_stops_nobody_who_grows(self) -> None:
        """The young one finds no room, gives up its own, and gets the old one's."""
        engine = TextEngine(3)
        loop = step_loop(engine, max_unread_tokens=6)
        lazy, eager = client(loop, 30, 1, 30), client(loop, 30, 2, 80)
        run(loop, eager)
        assert not lazy.over
        run(loop, lazy)
        check_over(loop, engine, lazy, eager)

    def test_a_waiting_one_that_does_not_read_lets_others_pass(self) -> None:
        engine = TextEngine(3)
        loop = step_loop(engine, max_unread_tokens=6)
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
        """Waiting, in the prompt, decoding, with candidates, throttled, preempted, over: the others go on."""
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
        kept[0].cancel()  # over, as the stream's end tells
        check_over(loop, engine, *kept)
        assert [each.tokens for each in (in_prompt, large)] == [[], []]
        assert decoding.tokens == decoding.want[: len(decoding.tokens)]

    def test_preempted(self) -> None:
        engine = TextEngine(3)
        loop = step_loop(engine)
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


class TestFailures:
    @pytest.mark.parametrize("steps", [0, 1, 4])
    def test_a_pass_that_fails_costs_nobody_a_token(self, steps: int) -> None:
        """Whether it reads prompts, candidates or neither: its sessions are tried again, one by one."""
        engine = TextEngine(20)
        loop = step_loop(engine)
        several = [client(loop, 100, 1, 20), client(loop, 10, 2, 20), client(loop, 30, 3, 20)]
        turns(loop, steps)
        several[0].offer(right=3, wrong=[4])
        engine.failure = MemoryError()
        turns(loop, 1)
        assert all(each.mail.error is None for each in several)
        run(loop, *several)
        check_over(loop, engine, *several)

    def test_what_no_pass_takes_is_ended_alone(self) -> None:
        """And nothing of it stays."""
        engine = TextEngine(20)
        engine.poison = BAD
        loop = step_loop(engine)
        to_poison = Sampling(logit_bias={BAD: 100.0})
        good = [client(loop, 100, 1, 20), client(loop, 10, 3, 20)]
        doomed = client(loop, 100, 2, 20, sampling=to_poison)
        run(loop, *good, doomed)
        assert isinstance(doomed.mail.error, ModelFailureError)
        assert doomed.tokens == [BAD]
        assert not engine.broken.any()
        again = client(loop, 100, 2, 5)
        run(loop, again)
        assert again.mail.times[0].cached == 0
        check_over(loop, engine, *good, again)

    def test_one_that_leaves_on_trial_holds_up_nobody(self) -> None:
        engine = TextEngine(20)
        loop = step_loop(engine)
        left, stays = client(loop, 10, 1, 20), client(loop, 10, 2, 20)
        engine.failure = MemoryError()
        turns(loop, 1)
        left.cancel()
        run(loop, stays)
        check_over(loop, engine, stays)

    def test_an_engine_that_does_not_recover_ends_all_until_it_does(self) -> None:
        """Those who run and those who wait can go elsewhere; nothing is found of what they had computed."""
        engine = TextEngine(8)
        loop = step_loop(engine)
        several = [client(loop, 130, 2, 30), client(loop, 200, 4, 5), client(loop, 100, 1, 30)]
        turns(loop, 3)
        assert not all(each.has_memory for each in several)
        engine.dead = True
        turns(loop, 1)
        assert all(isinstance(each.mail.error, EngineLostError) for each in several)
        assert several[0].tokens == several[0].want[: len(several[0].tokens)] != []
        assert not loop.works
        assert loop.turn() == CHECK_SECONDS
        with pytest.raises(EngineLostError):
            client(loop, 10, 3, 5)
        engine.dead = False
        assert loop.turn() is None
        assert loop.works
        again = client(loop, 130, 2, 5)
        run(loop, again)
        assert again.mail.times[0].cached == 0
        check_over(loop, engine, again)

    @pytest.mark.parametrize("offered", [0, 4])
    def test_logits_that_are_no_numbers_end_one_session(self, offered: int) -> None:
        """At the tip, or below it; the others of the step get their tokens, and no NaN stays."""
        engine = TextEngine(20)
        loop = step_loop(engine)
        to_bad = Sampling(logit_bias={BAD: 100.0})
        good, doomed = client(loop, 100, 1, 20), client(loop, 100, 2, 20, sampling=to_bad)
        turns(loop, 1)
        assert doomed.tokens == [BAD]  # itself it was chosen from numbers
        for each in (good, doomed):
            each.offer(right=offered, wrong=[2, 3])
        turns(loop, 1)
        assert isinstance(doomed.mail.error, FloatingPointError)
        assert doomed.tokens == [BAD]
        assert not engine.broken[: 20 * BLOCK].any()
        run(loop, good)
        again = client(loop, 100, 2, 20)
        run(loop, again)
        assert again.mail.times[0].cached == 0  # nor is anything found of the text
        check_over(loop, engine, good, again)

    def test_a_prompt_of_no_numbers(self) -> None:
        """Computed in pieces: it is known at its end only, and nobody shares it before."""
        engine = TextEngine(20)
        loop = step_loop(engine, step_rows=64)
        good = client(loop, 10, 1, 20)
        prompt = text(150, 2)
        prompt[70] = BAD
        doomed = Client(loop, prompt, 5, sampling=NO_BAD)
        turns(loop, 2)
        beside = Client(loop, [*prompt[:65], 3], 5, sampling=NO_BAD)
        run(loop, good, beside)
        assert isinstance(doomed.mail.error, FloatingPointError)
        assert doomed.tokens == []
        assert not engine.broken[: 20 * BLOCK].any()
        assert beside.mail.times[0].cached == 0
        check_over(loop, engine, good, beside)

    def test_sharers_of_a_wiped_beginning_go_on(self) -> None:
        """It is theirs as long as they hold it, and nobody else's."""
        engine = TextEngine(20)
        loop = step_loop(engine)
        prompt = text(BLOCK + 10, 1)
        first = Client(loop, prompt, 40, sampling=NO_BAD)
        turns(loop, 1)
        doomed = Client(loop, [*prompt, BAD], 5, sampling=NO_BAD)
        turns(loop, 1)
        assert isinstance(doomed.mail.error, FloatingPointError)
        other = Client(loop, [*prompt, 5], 5, sampling=NO_BAD)
        run(loop, first, other)
        assert other.mail.times[0].cached == 0
        assert not engine.broken[: 20 * BLOCK].any()
        check_over(loop, engine, first, other)


class TestLoad:
    def test_counters(self) -> None:
        engine = TextEngine(20)
        loop = step_loop(engine)
        clients = [client(loop, 100, seed, 10) for seed in (1, 1, 2)]
        turns(loop, 1)
        clients[0].offer(right=3, wrong=[2])
        run(loop, *clients)
        load = loop.stats
        assert load.steps == len(engine.steps)
        assert load.rows == sum(engine.steps)
        assert load.committed == 30
        assert (load.accepted, load.drafted) == (3, sum(v.offered for each in clients for v in each.mail.results))
        assert load.prompt_tokens == 300
        assert load.busy > 0
        check_over(loop, engine, *clients)

    def test_the_expected_wait_grows_with_the_queue(self) -> None:
        engine = TextEngine(20)
        load = step_loop(engine).stats
        waits = [load.expected_wait(waiting) for waiting in range(100)]
        assert waits == sorted(waits)
        assert all(0.1 <= wait <= 60 for wait in waits)
        assert waits[-1] > waits[0]


PROMPTS = st.tuples(
    st.sampled_from([1, 10, BLOCK - 1, BLOCK, BLOCK + 1, 100]),  # of a common text
    st.sampled_from([0, 0, 1, 5, 40]),  # of an own one
)


WHO = st.integers(0, 99)
COSTS = [FREE, FixedLatency(0.05), DEAR]


ENGINES = [TextEngine, DeviceTextEngine]


class ManySessions(RuleBasedStateMachine):
    """Whatever sessions do to a loop, and whatever is drafted for them."""

    @initialize(
        blocks=st.integers(2, 9),
        rows=st.sampled_from([None, InvariantRowCounts((4, 6, 16))]),
        latency=st.sampled_from(COSTS),
        step_rows=st.sampled_from([8, 40, 512]),
        max_unread_tokens=st.sampled_from([4, 256]),
        kind=st.sampled_from(ENGINES),
    )
    def start(
        self,
        blocks: int,
        rows: InvariantRowCounts | None,
        latency: FixedLatency,
        step_rows: int,
        max_unread_tokens: int,
        kind: type[TextEngine],
    ) -> None:
        self.engine = kind(blocks, 3 if blocks == 2 else MOST_CANDIDATES, rows)
        self.loop = step_loop(self.engine, latency, step_rows=step_rows, max_unread_tokens=max_unread_tokens)
        self.clients: list[Client] = []

    @property
    def alive(self) -> list[Client]:
        return [each for each in self.clients if not each.over]

    @rule(
        prompt=PROMPTS,
        seed=st.integers(0, 2),
        sampling=st.sampled_from([*SAMPLINGS, Sampling()]),
        max_tokens=st.integers(1, 60),
        tenant=st.sampled_from(["", "", "b"]),
        end=st.booleans(),
    )
    def arrive(
        self, prompt: tuple[int, int], seed: int, sampling: Sampling, max_tokens: int, tenant: str, end: bool
    ) -> None:
        shared, own = prompt
        tokens = (text(100, 1)[:shared] + text(own, seed))[: self.loop.context - 1]
        end_tokens = frozenset({END}) if end else frozenset[int]()
        self.clients.append(
            Client(self.loop, tokens, max_tokens, sampling=sampling, tenant=tenant, end_tokens=end_tokens)
        )

    @rule(count=st.integers(1, 12))
    def turn(self, count: int) -> None:
        for _ in range(count):
            self.loop.turn()

    @precondition(lambda self: self.alive)
    @rule(who=WHO, right=st.integers(0, 6), wrong=st.lists(st.integers(2, BAD - 1), max_size=6))
    def draft(self, who: int, right: int, wrong: list[int]) -> None:
        self.alive[who % len(self.alive)].offer(right, wrong)

    @precondition(lambda self: self.alive)
    @rule(who=WHO, back=st.integers(1, 3))
    def draft_late(self, who: int, back: int) -> None:
        """From a place that the text has passed since."""
        each = self.alive[who % len(self.alive)]
        base = max(1, each.session.tree.base - back)
        chain = (each.session.tree.committed + each.want[len(each.tokens) :])[base : base + 4]
        each.session.extend(base, Paths(chain, list(range(len(chain))), [-0.1] * len(chain)), 0.0)

    @precondition(lambda self: self.alive)
    @rule(
        who=WHO,
        speculate=st.booleans(),
        most=st.integers(1, 12),
        guess=st.booleans(),
        lookahead=st.sampled_from([None, None, Lookahead(4, 2, 1), Lookahead(3, 3, 2), Lookahead(5, 5, 5)]),
    )
    def change_policy(self, who: int, speculate: bool, most: int, guess: bool, lookahead: Lookahead | None) -> None:
        policy = Policy(
            (REMOTE if speculate else NO_DRAFTERS) | (OWN_DRAFTERS if guess else NO_DRAFTERS),
            most,
            0.0,
            lookahead=lookahead,
        )
        self.alive[who % len(self.alive)].session.policy = policy

    @precondition(lambda self: self.alive)
    @rule(who=WHO)
    def read(self, who: int) -> None:
        self.alive[who % len(self.alive)].read()

    @precondition(lambda self: self.clients)
    @rule(who=WHO)
    def cancel(self, who: int) -> None:
        each = self.clients[who % len(self.clients)]
        each.cancel()
        self.clients.remove(each)
        self.check_tokens(each)

    def check_tokens(self, each: Client) -> None:
        """The reference's, as far as they go; all of them at the end, or up to a BAD one if there is an error."""
        assert each.tokens == each.want[: len(each.tokens)]
        if each.mail.error is not None:
            assert isinstance(each.mail.error, FloatingPointError)
            assert BAD in each.session.request.prompt + each.want
            assert BAD not in each.tokens[:-1]
        elif each.mail.finish:
            assert each.tokens == each.want

    @invariant()
    def tokens_are_the_references(self) -> None:
        for each in self.clients:
            self.check_tokens(each)
        assert self.engine.faults == []

    @invariant()
    def memory_is_accounted_for(self) -> None:
        holders = [each for each in self.clients if each.has_memory]
        assert self.loop.stats.running == len(holders)
        assert self.loop.stats.waiting == len(self.alive) - len(holders)
        slots = [set(each.session.slots.tolist()) for each in holders]
        assert self.loop.pool.held == len(set().union(*slots)) / BLOCK

    def teardown(self) -> None:
        run(self.loop, *self.clients)
        for each in self.clients:
            self.check_tokens(each)
            assert not each.has_memory
        assert self.engine.faults == []
        assert self.loop.pool.held == 0
        assert self.loop.turn() is None


TestManySessions = ManySessions.TestCase
TestManySessions.settings = settings(max_examples=30, stateful_step_count=40)


@pytest.mark.parametrize("seed", range(6))
def test_a_storm(seed: int) -> None:
    """The same, with many more sessions than there is memory for."""
    dice = Random(seed)
    clients = ManySessions()
    clients.start(
        3 + seed,
        [None, InvariantRowCounts((4, 6, 16))][seed % 2],
        COSTS[seed % 3],
        [8, 40, 512][seed % 3],
        40,
        ENGINES[seed % 2],
    )
    for _ in range(300):
        who = dice.randrange(100)
        if dice.random() < 0.3:
            prompt = dice.choice([1, 60, 63, 64, 65, 100]), dice.choice([0, 1, 5, 40])
            sampling = dice.choice([*SAMPLINGS, Sampling()])
            clients.arrive(prompt, dice.randrange(3), sampling, dice.randint(20, 60), dice.choice("aab"), who < 20)
        if clients.alive:
            clients.draft(who, dice.randrange(6), [dice.randrange(2, BAD) for _ in range(5)])
            clients.draft_late(who + 1, dice.randint(1, 3))
            clients.read(who + 2)
        if clients.alive and dice.random() < 0.1:
            size = dice.choice([None, Lookahead(4, 2, 1), Lookahead(3, 3, 2)])
            clients.change_policy(who, dice.random() < 0.7, dice.randint(1, 12), dice.random() < 0.7, size)
        if clients.alive and dice.random() < 0.1:
            clients.cancel(who)
        clients.turn(2)
        clients.tokens_are_the_references()
        clients.memory_is_accounted_for()
    load = clients.loop.stats
    assert min(load.preemptions, load.accepted, load.drafted - load.accepted, load.cached_tokens) > 0
    assert any(each.mail.error for each in clients.clients)
    assert sum(bool(each.mail.finish) for each in clients.clients) > 10
    clients.teardown()


def test_the_fake_engine_finds_wrong_slots() -> None:
    """Or nothing here could fail."""
    engine = TextEngine(4)
    packer = engine.packer()
    packer.add_path(np.arange(64, 67), packer.add_rows([2, 3, 4], 0, np.arange(64, 67)))
    engine.forward(packer.pack())
    assert engine.faults == []
    for keys in ([65, 64, 70], [64, 66, 70], [64, 65, 71], [65, 66, 70]):
        packer = engine.packer()
        packer.want(packer.add_row(5, 2, 70))
        packer.add_path(np.array(keys), [0])
        engine.forward(packer.pack())
        assert engine.faults, keys
        engine.faults.clear()
    packer = engine.packer()
    packer.want(packer.add_row(5, 2, 70))
    packer.add_path(np.array([64, 65, 70]), [0])
    (logits,) = engine.forward(packer.pack())
    assert engine.faults == []
    assert logits.tolist() == LANGUAGE.logits(LANGUAGE.number_of([2, 3, 5])).tolist()
    assert len(logits) == VOCABULARY
    ends = [LANGUAGE.logits(LANGUAGE.number_of([2, 3, token])).tolist() for token in range(VOCABULARY)]
    assert all(a != b for a, b in pairwise(ends))
