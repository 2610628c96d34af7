"""Log-probabilities of prompts are sent once for every position, whatever steps compute and whatever is cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specdec.decoding.logprobs import log_softmax
from specdec.engine.working_memory import MAX_STEP_CANDIDATES
from tests.verifier_service.fakes import BAD, LANGUAGE, Client, PagedTextEngine, TextEngine, run, step_loop
from tests.verifier_service.plain_loop import PlainLoop
from tests.verifier_service.step_loop.helpers import NO_BAD, client, expect_no_growth, text, turns
from verifier_service.backend.result import MAX_SCORES_A_MESSAGE
from verifier_service.verification.tree_verification import NotFiniteError


def check_scores(scored: Client, first: int = 1) -> None:
    """Check that a session got the log-probabilities of all tokens of its prompt from `first`, each once, in order."""
    request, at = scored.session.request, first
    assert request.prompt_logprobs is not None
    for part in scored.mail.scores:
        assert part.first == at
        assert 0 < len(part.logprobs) <= MAX_SCORES_A_MESSAGE
        for found in part.logprobs:
            logits = LANGUAGE.logits(LANGUAGE.number_of(request.prompt[:at]))
            token, want = request.prompt[at], log_softmax(logits)
            assert found.chosen == want[token]
            assert found.rank == 1 + sum(logits > logits[token])
            assert found.top_tokens == sorted(range(len(want)), key=lambda v: -logits[v])[: request.prompt_logprobs]
            at += 1
    assert at == len(request.prompt)
    assert scored.tokens == scored.want
    assert scored.mail.error is None


@pytest.mark.parametrize("length", [1, 2, 3, 64, 65, 300])
@pytest.mark.parametrize("make", [TextEngine, PagedTextEngine])
def test_every_token_but_the_first_is_scored(make: Callable[[int], Any], length: int) -> None:
    engine = make(20)
    loop = step_loop(engine, step_rows=50)
    scored = client(loop, length, 1, 5, prompt_logprobs=3)
    run(loop, scored)
    check_scores(scored)


def test_the_loop_without_speculation_scores_the_same() -> None:
    engine = TextEngine(20)
    scored = Client(PlainLoop(engine, step_rows=7), text(40, 1), 5, sampling=NO_BAD, prompt_logprobs=2)
    run(scored._loop, scored)
    check_scores(scored)


def test_a_cached_prefix_is_computed_again() -> None:
    """Even beside a session that holds the prefix. A resumed session computes only the positions not scored yet."""
    engine = TextEngine(30)
    loop = step_loop(engine)
    cached = client(loop, 200, 1, 5)
    run(loop, cached)
    holds = client(loop, 200, 1, 90)
    turns(loop, 3)
    scored = client(loop, 200, 1, 5, prompt_logprobs=0)
    resumed = client(loop, 200, 1, 5, prompt_logprobs=0, scored_tokens=150)
    turns(loop, 1)
    assert holds.session.cached_tokens == 0  # already reported
    assert engine.steps[-1] == 1 + 200 + 51
    run(loop, scored, resumed, holds)
    check_scores(scored)
    check_scores(resumed, first=150)
    assert engine.faults == []


def test_two_prompts_share_the_memory_for_logits_with_candidates() -> None:
    """A step has at most MAX_STEP_CANDIDATES rows with logits besides one per session; other prompts are not cut."""
    engine = TextEngine(60)
    wanted: list[int] = []
    forward = engine.forward

    def counted(batch: Any) -> Any:
        wanted.append(len(batch.wanted))
        return forward(batch)

    engine.forward = counted  # type: ignore[method-assign]
    loop = step_loop(engine, step_rows=4096, max_unread_tokens=4096)
    drafted = client(loop, 5, 1, 60)
    turns(loop, 1)
    prompts = [client(loop, 400, seed, 5, prompt_logprobs=1) for seed in (2, 3)]
    plain = client(loop, 700, 4, 5)
    drafted.offer(right=8)
    turns(loop, 1)
    assert (plain.session.computed, wanted[-1]) == (700, 2 + MAX_STEP_CANDIDATES)
    assert min(scored.session.scored for scored in prompts) > 100
    run(loop, drafted, plain, *prompts)
    assert max(wanted) <= MAX_STEP_CANDIDATES + 4
    for scored in prompts:
        check_scores(scored)


def test_a_preempted_prompt_goes_on_where_it_was() -> None:
    engine = TextEngine(6)
    loop = step_loop(engine, step_rows=60)
    expect_no_growth(loop)
    old, scored = client(loop, 60, 1, 200), client(loop, 200, 2, 5, prompt_logprobs=1)
    while not 60 < scored.session.scored < 200:
        turns(loop, 1)
        scored.read()
    loop._queue._preempt(scored.running)
    run(loop, scored, old)
    assert scored.running.preemptions >= 1
    check_scores(scored)


def test_a_reader_that_does_not_read_holds_up_its_prompt_alone() -> None:
    engine = TextEngine(30)
    loop = step_loop(engine, max_unread_tokens=10, step_rows=20)
    scored, other = client(loop, 200, 1, 5, prompt_logprobs=1), client(loop, 20, 2, 30)
    run(loop, other)
    assert 10 < scored.session.scored < 60
    run(loop, scored)
    check_scores(scored)


def test_broken_logits_end_the_session_and_nobody_gets_them() -> None:
    engine = TextEngine(30)
    loop = step_loop(engine, step_rows=50)
    prompt = text(100, 1)
    scored = Client(loop, [*prompt[:70], BAD, *prompt[70:]], 5, sampling=NO_BAD, prompt_logprobs=1)
    other = client(loop, 30, 2, 20)
    run(loop, scored, other)
    assert isinstance(scored.mail.error, NotFiniteError)
    assert sum(len(part.logprobs) for part in scored.mail.scores) < 71
    assert other.tokens == other.want
    assert not scored.has_memory
