"""The trial of a version has the stated error probability at any time, and finds a difference within its budget."""

from __future__ import annotations

import itertools
import math
import pickle
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.version_trial import (
    MIN_TOKENS,
    SPEED_PASSES,
    WINDOW_TOKENS,
    Bettor,
    Outcome,
    TrialLimits,
    VersionTrial,
)

ALPHA = 0.05
LIMITS = TrialLimits(share=0.25, tokens=40_000, alpha=ALPHA)


@given(st.lists(st.floats(-1.0, 1.0, allow_nan=False), max_size=60))
def test_a_bettor_is_never_broke(differences: list[float]) -> None:
    bettor = Bettor()
    for difference in differences:
        bettor.observe(difference)
    assert math.isfinite(bettor.log_wealth)


@pytest.mark.parametrize("size", [0.05, 0.4, 1.0])
def test_a_fair_game_leaves_the_mean_wealth_as_it_is(size: float) -> None:
    """Over all sequences of ten equally likely gains and losses: the wealth is a martingale, as Ville's inequality
    requires."""
    wealths = []
    for signs in itertools.product((1.0, -1.0), repeat=10):
        bettor = Bettor()
        for sign in signs:
            bettor.observe(sign * size)
        wealths.append(math.exp(bettor.log_wealth))
    assert fmean(wealths) == pytest.approx(1.0, rel=1e-9)


def text(rates: random.Random, rate: float) -> list[bool]:
    """Return which tokens of a text of random length were guessed. Some texts are easier than others, and each has easy
    and hard passages."""
    easiness = rates.betavariate(8 * rate, 8 * (1 - rate))
    found: list[bool] = []
    length = rates.choice((20, 60, 200, 400))
    while len(found) < length:
        found += [rates.random() < easiness] * rates.randint(4, 24)
    return found[:length]


COMMIT = 20
"""Tokens of a commit."""


def tried(seed: int, serving: float, new: float, limits: TrialLimits = LIMITS, texts: int = 600) -> VersionTrial[int]:
    """Return the trial of a version that guesses the share `new` of its tokens, beside one that guesses `serving`. It
    goes on until a verdict, or for this many texts."""
    chance = random.Random(seed)
    trial: VersionTrial[int] = VersionTrial(limits)
    for session in range(texts):
        is_new = chance.random() < limits.share
        guessed = text(chance, new if is_new else serving)
        trial.opened(session, is_new=is_new)
        for start in range(0, len(guessed), COMMIT):
            part = guessed[start : start + COMMIT]
            trial.committed(session, len(part), sum(part), paused=False)
            if trial.verdict is not None:
                return trial
        trial.closed(session)
        if trial.verdict is not None:
            return trial
    return trial


TRIALS = 200


def test_equal_versions_are_told_apart_as_rarely_as_it_says() -> None:
    """Even if looked at after every text. The expected number of wrong verdicts is at most 10 of 200; 26 or more have a
    probability of 1e-5 (binomial)."""
    verdicts = [tried(seed, 0.5, 0.5).verdict for seed in range(TRIALS)]
    assert sum(verdict in (Outcome.PROMOTED, Outcome.WORSE) for verdict in verdicts) < 26


def test_tokens_counted_one_by_one_would_tell_them_apart_too_often() -> None:
    """Negative control: a test of the same texts at the same level, looked at after every text, that takes tokens for
    independent. It is wrong many times more often than it states."""
    wrong = 0
    for seed in range(TRIALS):
        chance = random.Random(seed)
        counts = {True: [0, 0], False: [0, 0]}
        for session in range(200):
            guessed = text(chance, 0.5)
            of_one = counts[chance.random() < LIMITS.share]
            of_one[0] += sum(guessed)
            of_one[1] += len(guessed)
            if session >= 20 and min(tokens for _, tokens in counts.values()) and _differ(counts):
                wrong += 1
                break
    assert wrong > 10 * ALPHA * TRIALS / 2


def _differ(counts: dict[bool, list[int]]) -> bool:
    """Return whether a z-test at the level ALPHA finds a difference of two proportions."""
    (a, n), (b, m) = counts.values()
    pooled = (a + b) / (n + m)
    deviation = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    return deviation > 0 and abs(a / n - b / m) > 1.96 * deviation


@pytest.mark.parametrize(
    ("new", "verdict", "tokens"),
    [(0.7, Outcome.PROMOTED, 40_000), (0.3, Outcome.WORSE, 40_000), (0.03, Outcome.WORSE, 6_000)],
)
def test_a_difference_is_found_within_the_budget(new: float, verdict: Outcome, tokens: int) -> None:
    found = [tried(seed, 0.5, new) for seed in range(40)]
    assert {trial.verdict for trial in found} == {verdict}
    assert max(trial.tokens for trial in found) <= tokens


def test_a_better_version_is_hardly_ever_called_worse() -> None:
    assert Outcome.WORSE not in {tried(seed, 0.5, 0.55).verdict for seed in range(50)}


def test_it_is_given_up_after_its_tokens() -> None:
    trial = tried(1, 0.5, 0.5, TrialLimits(share=0.5, tokens=1000))
    assert trial.verdict is Outcome.UNDECIDED
    assert 1000 <= trial.tokens < 1000 + COMMIT
    assert trial.reason.endswith(f"; {trial.tokens} tokens on trial")


def test_paused_drafts_do_not_use_up_the_trial() -> None:
    """While both versions are paused, as under load, there is no verdict, however long that lasts."""
    trial: VersionTrial[int] = VersionTrial(LIMITS)
    for session in range(2000):
        trial.opened(session, is_new=session % 2 == 0)
        trial.committed(session, 100, 0, paused=True)
        trial.closed(session)
    assert (trial.verdict, trial.tokens) == (None, 0)


def test_a_version_that_is_paused_because_it_is_bad_is_worse() -> None:
    """Its texts count as observations even while paused, like those of the other version."""
    trial: VersionTrial[int] = VersionTrial(LIMITS)
    for session in range(60):
        is_new = session % 2 == 0
        trial.opened(session, is_new=is_new)
        trial.committed(session, 8, 0 if is_new else 8, paused=False)
        trial.committed(session, 100, 0 if is_new else 100, paused=is_new)
        trial.closed(session)
    assert trial.verdict is Outcome.WORSE


@pytest.mark.parametrize(("tokens", "verdict"), [(MIN_TOKENS - 1, None), (MIN_TOKENS, Outcome.WORSE)])
def test_texts_that_are_too_short_do_not_count(tokens: int, verdict: Outcome | None) -> None:
    trial: VersionTrial[int] = VersionTrial(LIMITS)
    for session in range(60):
        is_new = session % 2 == 0
        trial.opened(session, is_new=is_new)
        trial.committed(session, tokens, 0 if is_new else tokens, paused=False)
        trial.closed(session)
    assert trial.verdict is verdict


def test_a_long_text_counts_with_its_beginning_and_before_its_end() -> None:
    """Later tokens change nothing, and the session need not be closed."""
    trial: VersionTrial[int] = VersionTrial(LIMITS)
    for session in range(60):
        is_new = session % 2 == 0
        trial.opened(session, is_new=is_new)
        trial.committed(session, WINDOW_TOKENS - 10, 0 if is_new else WINDOW_TOKENS - 10, paused=False)
        trial.committed(session, 100, 100, paused=False)
        trial.committed(session, 100, 100, paused=False)
        if trial.verdict is not None:
            break
    assert trial.verdict is Outcome.WORSE
    assert f"guessed {10 / WINDOW_TOKENS:.1%} of the tokens" in trial.reason
    assert "the serving version 100.0%" in trial.reason


def test_sessions_that_are_no_part_of_it_change_nothing() -> None:
    trial: VersionTrial[int] = VersionTrial(LIMITS)
    trial.committed(1, 100_000, 100_000, paused=False)
    trial.closed(1)
    assert (trial.verdict, trial.tokens) == (None, 0)
    assert trial.reason == "0 tokens, in too few texts to compare"


def test_its_memory_does_not_grow_with_its_texts() -> None:
    """It may last for as long as the canary gets no text, or is paused."""
    trial: VersionTrial[int] = VersionTrial(LIMITS)
    sizes = []
    for session in range(2000):
        trial.opened(session, is_new=session < 1000 and session % 2 == 0)
        trial.committed(session, 100, session % 100, paused=True)
        trial.closed(session)
        sizes.append(len(pickle.dumps(trial)))
    assert sizes[-1] < sizes[10] + 100


def test_it_is_slow_if_most_of_its_passes_are() -> None:
    """A few passes that lost their core, however long they took, do not make a version slow."""
    trial: VersionTrial[int] = VersionTrial(TrialLimits(max_slowdown=1.5))
    for number in range(4 * SPEED_PASSES):
        trial.passed(100.0 if number % 2 else 1.4, 1.0)
    assert trial.verdict is None
    trial.passed(1.6, 1.0)
    assert trial.verdict is Outcome.SLOW
    assert trial.reason == "101 of 201 passes took more than 1.5 times as long as the serving version's"


def test_a_few_passes_do_not_make_it_slow() -> None:
    trial: VersionTrial[int] = VersionTrial(LIMITS)
    for _ in range(SPEED_PASSES - 1):
        trial.passed(10.0, 1.0)
    assert trial.verdict is None
