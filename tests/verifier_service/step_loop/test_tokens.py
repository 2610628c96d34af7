"""Every session gets the tokens, logprobs and results that it would get alone."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdec.decoding.logprobs import log_softmax
from specdec.decoding.sampling import Sampling
from specdec.decoding.speculation import NO_DRAFTERS
from specdec.decoding.tree import Paths
from specdec.engine.row_counts import InvariantRowCounts
from tests.verifier_service.fakes import (
    END,
    LANGUAGE,
    Decided,
    FixedLatency,
    TextEngine,
    ThreadedTextEngine,
    run,
    step_loop,
)
from tests.verifier_service.step_loop.helpers import REMOTE, SAMPLINGS, WARM, check_over, client, turns
from verifier_service.backend.request import Policy
from verifier_service.backend.result import (
    BONUS,
    CONTEXT,
    CORRECTION,
    LENGTH,
    PLAIN,
    REMOTE_DRAFT,
    STOP,
    Mode,
    RejectedCandidate,
)
from verifier_service.proposers.draft_model import DraftModelProposer
from verifier_service.settings.tuning import DEFAULTS, CommitTuning, Tuning
from verifier_service.speculation.controller import SpeculationController
from verifier_service.step_loop import StepLoop


class PlacedEngine(TextEngine):
    """An engine that names its device (`Placed`)."""

    dtype, threads = "float32", ()

    def __init__(self, texts: int, device: str) -> None:
        super().__init__(texts)
        self.device = device


class TestTokens:
    @pytest.mark.parametrize("rows", [None, InvariantRowCounts((4, 6, 16))], ids=["any-rows", "row-class"])
    @pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "penalised", "banned"])
    def test_many_get_what_each_would_get_alone(self, sampling: Sampling, rows: InvariantRowCounts | None) -> None:
        """With good, bad and no drafts; on engines with and without padding."""
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
        assert 0 < loop.stats.accepted < loop.stats.offered

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

    @pytest.mark.parametrize("most", [2, 3])
    def test_the_last_token_waits_for_no_candidate(self, most: int) -> None:
        """The step brings it anyway."""
        loop = step_loop(TextEngine(10), FixedLatency(1e-5, of_any=0.005), controller=Decided(Mode.REMOTE_DRAFT))
        one = client(loop, 5, 1, most, policy=Policy(REMOTE, 8, 0.05))
        turns(loop, 1)
        one.read()
        assert (loop.turn() == 0.0) is (most == 2)  # else: the delay until candidates are likely here

    @pytest.mark.parametrize("asked", [False, True])
    def test_rejected_candidates_are_reported(self, asked: bool) -> None:
        """In preorder: those on side branches, and those below the last accepted candidate. Only if asked for."""
        loop = step_loop(TextEngine(8), controller=Decided(Mode.REMOTE_DRAFT))
        one = client(loop, 10, 1, 12, rejected_candidates=asked)
        turns(loop, 1)
        at = len(one.tokens)
        right, then = one.want[at : at + 2]
        wrong, other, last = [token for token in range(2, 7) if token not in (right, then)][:3]
        # Below the text: `right` with `other` and `last` in a chain below it, and `wrong` beside it.
        paths = Paths([right, other, last, wrong], [0, 1, 2, 0], [-0.1, -0.1, -0.1, -2.0])
        one.session.extend(one.session.tree.base, paths, 0.0)
        turns(loop, 1)
        result = one.mail.results[-1]
        assert (result.offered, result.accepted, result.tokens) == (4, 1, [right, then])
        want = [(at, 0, wrong), (at + 1, 0, other), (at + 2, 1, last)]
        assert result.rejected == [RejectedCandidate(*each, REMOTE_DRAFT) for each in want if asked]

    @pytest.mark.parametrize("always", [False, True])
    def test_the_controller_says_whether_candidates_are_used(self, always: bool) -> None:
        """Drafts are informed; a session with forced speculation ignores the controller."""
        loop = step_loop(TextEngine(8), controller=Decided(Mode.OFF))
        one = client(loop, 10, 1, 12)
        one.session.policy = Policy(REMOTE, 8, 10.0, forced=always)
        turns(loop, 1)
        one.offer(right=4)
        while not one.over:
            one.read()
            assert loop.turn() == 0.0  # no step delay: existing candidates suffice
        offered = sum(result.offered for result in one.mail.results)
        assert offered == (4 if always else 0)
        assert {details.outlook.drafting_wanted for details in one.mail.details[1:]} == {always}

    def test_a_draft_hears_at_once_that_it_may_pause(self) -> None:
        """Without a message, the draft would work for nothing, on a core that the step needs."""
        controller = Decided(Mode.REMOTE_DRAFT)
        loop = step_loop(TextEngine(8), controller=controller)
        one = client(loop, 10, 1, 12)
        one.session.policy = Policy(REMOTE, 8, 0.0)
        turns(loop, 2)
        heard = len(one.mail.details)
        controller.decided = Mode.OFF
        turns(loop, 1)
        (details,) = one.mail.details[heard:]
        assert not details.outlook.drafting_wanted

    def test_drafts_that_share_the_cores_wait_until_prompts_are_read(self) -> None:
        """Drafts keep drafting while more texts decode than prompts are prefilled."""
        engine = ThreadedTextEngine(40)
        loop = step_loop(engine, step_rows=16, controller=Decided(Mode.REMOTE_DRAFT))
        first = client(loop, 40, 1, 50)
        assert not loop.outlook(first.session, 1).drafting_wanted
        while first.session.remaining_prompt:
            turns(loop, 1)
            assert engine.used == 2
        assert first.mail.details[0].outlook.drafting_wanted
        turns(loop, 1)
        assert engine.used == 1
        clients = [client(loop, 40, seed, 50) for seed in (2, 3)]
        turns(loop, 1)
        assert not first.mail.details[-1].outlook.drafting_wanted  # test_cpu_threads.py: how long it keeps its core
        while any(each.session.remaining_prompt for each in clients):
            turns(loop, 1)
        turns(loop, 1)
        assert first.mail.details[-1].outlook.drafting_wanted
        client(loop, 40, 4, 50)
        turns(loop, 1)
        assert first.mail.details[-1].outlook.drafting_wanted

    @pytest.mark.parametrize("mode", list(Mode))
    def test_a_session_that_comes_is_told_whether_others_like_it_are_drafted(self, mode: Mode) -> None:
        loop = step_loop(TextEngine(8), controller=Decided(mode))
        wanted = loop.outlook(client(loop, 10, 1, 12).session, 16).drafting_wanted
        assert wanted is (mode is Mode.REMOTE_DRAFT)

    @pytest.mark.parametrize("forced", [False, True])
    def test_a_draft_that_is_forced_is_wanted_though_nothing_pays(self, forced: bool) -> None:
        """An additional row costs more than a step: the break-even probability rises to 1."""

        loop = step_loop(TextEngine(8), FixedLatency(2.0, of_any=-1.0), controller=Decided(Mode.REMOTE_DRAFT))
        one = client(loop, 10, 1, 300, policy=Policy(REMOTE, 8, 0.0, forced=forced))
        run(loop, one)
        assert one.mail.details[-1].outlook.break_even == pytest.approx(1.0)
        assert one.mail.details[-1].outlook.drafting_wanted is forced

    def test_candidates_come_at_any_time(self) -> None:
        """Before admission, during prefill, and late: they are kept while they can still be accepted."""
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
        assert first.mail.results[0].accepted == 0  # the step ending a prompt has no room for candidates
        turns(loop, 1)
        assert first.mail.results[1].accepted == 3
        late = first.session.tree.base - 2
        first.session.extend(late, Paths(first.tokens[-2:], [0, 1], [-0.1, -0.1]), 0.0)
        run(loop, first, second)
        assert sum(result.accepted for result in second.mail.results) == 3
        check_over(loop, engine, first, second)

    def test_more_candidates_than_side_slots(self) -> None:
        """With the smallest memory."""
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
        assert loop.stats.offered == 0
        run(loop, one, other)
        check_over(loop, engine, one, other)

    def test_the_controller_hears_of_no_step_in_which_a_prompt_ends(self) -> None:
        """A step ending a prompt takes longer than a speculating one, and brings a token."""

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
        """Candidates are ignored, and commits may be coalesced."""
        engine = TextEngine(12)
        loop = step_loop(engine)
        plain = client(loop, 10, 1, 30, top_logprobs=1)
        plain.session.policy = Policy(NO_DRAFTERS, 8, 0.0)
        plain.offer(right=5)
        run(loop, plain)
        assert loop.stats.offered == 0
        assert {s for result in plain.mail.results for s in result.sources} == {PLAIN}
        bases = [result.base for result in plain.mail.results]
        assert bases == [10 + sum(len(v.tokens) for v in plain.mail.results[:i]) for i in range(len(bases))]
        assert len(plain.logprobs) == 30
        check_over(loop, engine, plain)

    def test_who_has_time_hears_less_often(self) -> None:
        """Unless a draft needs each commit."""
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
        assert len(alone.mail.results[0].tokens) == 1  # the first token is never delayed
        check_over(loop, engine, alone)

    def test_another_tuning_sends_every_commit(self) -> None:
        engine = TextEngine(12)
        at_once = CommitTuning(messages_a_second=math.inf, coalesce_seconds=0.0, relaxed_coalesce_seconds=0.0)
        loop = step_loop(engine, tuning=Tuning(commits=at_once))
        alone = client(loop, 10, 1, 60, policy=Policy(NO_DRAFTERS, 8, 0.0))
        run(loop, alone)
        assert len(alone.mail.results) == 60
        check_over(loop, engine, alone)

    @pytest.mark.parametrize("device", [None, "cpu", "cuda:0"])
    def test_commits_of_an_engine_on_a_device_have_a_budget_of_their_own(self, device: str | None) -> None:
        engine = TextEngine(12) if device is None else PlacedEngine(12, device)
        commits = CommitTuning(messages_a_second=1e-3, device_messages_a_second=math.inf, coalesce_seconds=0.0)
        loop = step_loop(engine, tuning=Tuning(commits=commits))
        alone = client(loop, 10, 1, 60, policy=Policy(NO_DRAFTERS, 8, 0.0))
        run(loop, alone)
        assert len(alone.mail.results) == (
            60 if device == "cuda:0" else 2
        )  # the first token and the end are never delayed
        check_over(loop, engine, alone)

    def test_a_reader_hears_of_everything_before_it_is_waited_for(self) -> None:
        """However many commits are coalesced."""
        engine = TextEngine(12)
        loop = step_loop(engine, max_unread_tokens=3)
        clients = [client(loop, 10, seed, 60) for seed in range(3)]
        for each in clients:
            each.session.policy = Policy(NO_DRAFTERS, 8, 0.0)
        run(loop, *clients)
        check_over(loop, engine, *clients)


class TestLogprobs:
    def test_they_are_those_of_each_token(self) -> None:
        """In a step with accepted candidates, among sessions that ask for other numbers of logprobs, or none."""
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


def test_every_group_of_a_tuning_reaches_who_uses_it() -> None:
    tuning = Tuning(
        controller=replace(DEFAULTS.controller, min_steps=11),
        commits=replace(DEFAULTS.commits, coalesce_seconds=0.02),
        draft_timing=replace(DEFAULTS.draft_timing, smoothing=0.3),
        ngrams=replace(DEFAULTS.ngrams, depth=23),
        draft_model=replace(DEFAULTS.draft_model, max_depth=15),
        latency=replace(DEFAULTS.latency, step_error=0.2),
        threads=replace(DEFAULTS.threads, min_steps=6),
    )
    draft = DraftModelProposer(TextEngine(8), 512, tuning=tuning)
    loop = StepLoop(ThreadedTextEngine(12), draft_model=draft, tuning=tuning)
    session = loop.session(client(loop).session.request, Policy(NO_DRAFTERS, 8, 0.0), 24, 16)
    used: list[object] = [
        loop._speculation._controllers._tuning,
        loop._publisher._tuning,
        session.draft_timing._tuning,
        session.ngrams._tuning,
        draft._tuning,
        draft._latency._tuning,
        loop._threads.latency._tuning,
        loop._threads._tuning,  # type: ignore[attr-defined]
        loop._planner._tuning,
    ]
    assert used == [
        tuning.controller,
        tuning.commits,
        tuning.draft_timing,
        tuning.ngrams,
        tuning.draft_model,
        tuning.latency,
        tuning.latency,
        tuning.threads,
        tuning,
    ]
