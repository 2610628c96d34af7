"""Block verification keeps the target's distribution, and never accepts fewer draws than testing one by one.

Over small vocabularies all outcomes are enumerated, with their exact probabilities. Runs with the random numbers of
`block_verification.verify` are tested by chi-square, with false-alarm probability FALSE_ALARM, on fixed seeds. Negative
controls must fail both kinds of test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.block_verification import AcceptedPrefix, ChainQuery, prefix, residual, verify
from specdec.decoding.noise import text_hash
from specdec.decoding.proposal import DraftDistribution, Proposal
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.rejection import propose
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.step_logits import HostLogits
from tests.decoding.small_models import (
    DRAFT_OF_PAPER,
    FALSE_ALARM,
    LENGTH,
    TARGET_OF_PAPER,
    VOCABULARY,
    Logits,
    Model,
    Path,
    Weights,
    certain,
    likelihood,
    logits_of,
    model,
    pvalue,
)

TOLERANCE = 1e-12

Ends = Callable[[Path], bool]
"""Whether a chain ends after these draws."""

Trial = tuple[float, Weights]
"""The probability that a prefix passes, and the distribution of the next token if it is the longest that does."""


def trials_of(p: Model, q: Model, draws: Path) -> list[Trial]:
    """Return the tests of all prefixes of a chain."""
    ratio, trials = 1.0, list[Trial]()
    for i, drawn in enumerate(draws):
        found = prefix(ratio, p(draws[:i]), q(draws[:i]), drawn)
        trials.append((found.acceptance, residual(ratio, p(draws[:i]), q(draws[:i]))))
        ratio = found.ratio
    return [*trials, (ratio, p(draws))]


def chains(q: Model, ends: Ends, vocabulary: int, draws: Path = ()) -> Iterator[tuple[Path, float]]:
    """Yield every chain that the draft can draw, with its probability."""
    if ends(draws):
        yield draws, 1.0
        return
    for token in np.flatnonzero(q(draws)).tolist():
        for chain, probability in chains(q, ends, vocabulary, (*draws, token)):
            yield chain, float(q(draws)[token]) * probability


Trials = Callable[[Model, Model, Path], list[Trial]]
Outcomes = dict[Path, float]
"""The probability of each outcome of a step: its accepted draws, and the token after them."""


def outcomes(p: Model, q: Model, ends: Ends, vocabulary: int, trials: Trials = trials_of) -> Outcomes:
    """Return the probabilities of all outcomes of a step."""
    found: Outcomes = {}
    for draws, probability in chains(q, ends, vocabulary):
        add(found, draws, probability, trials(p, q, draws))
    return found


def add(found: Outcomes, draws: Path, probability: float, trials: list[Trial]) -> None:
    """Add the outcomes of a chain that is drawn with this probability."""
    for length, (passes, weights) in reversed(list(enumerate(trials))):
        for token in np.flatnonzero(weights).tolist():
            share, outcome = float(weights[token] / weights.sum()), (*draws[:length], token)
            found[outcome] = found.get(outcome, 0.0) + probability * passes * share
        probability *= 1 - passes


def continued(found: Outcomes, p: Model, length: int, vocabulary: int) -> dict[Path, float]:
    """Return the probabilities of the first `length` tokens, if the target goes on after each outcome."""
    total: dict[Path, float] = dict.fromkeys(product(range(vocabulary), repeat=length), 0.0)
    for path in total:
        for known in range(1, length + 1):
            if probability := found.get(path[:known], 0.0):
                total[path] += probability * likelihood(p, path, known)
    return total


def deviation(found: Outcomes, p: Model, length: int, vocabulary: int) -> float:
    """Return the largest error of a path's probability."""
    total = continued(found, p, length, vocabulary)
    return max(abs(probability - likelihood(p, path)) for path, probability in total.items())


def accepted(found: Outcomes) -> float:
    """Return the expected number of accepted draws."""
    return sum(probability * (len(path) - 1) for path, probability in found.items())


def accepted_one_by_one(p: Model, q: Model, ends: Ends, vocabulary: int) -> float:
    """Return the expected number of accepted draws if each is tested alone (Leviathan et al. 2023)."""
    total = 0.0
    for draws, probability in chains(q, ends, vocabulary):
        reached = probability
        for i, drawn in enumerate(draws):
            reached *= min(1.0, float(p(draws[:i])[drawn] / q(draws[:i])[drawn]))
            total += reached
    return total


DEPTH = 3


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Model, Model, Ends, int]:
    """Draw a target, a draft, where chains end, and the size of the vocabulary. The end depends on the draws so far."""
    seeds, vocabulary = st.integers(0, 10_000), draw(st.integers(2, 3))
    p, q = (model(draw(seeds), vocabulary, sparse=draw(st.booleans())) for _ in range(2))
    if draw(st.integers(0, 4)) == 0:
        q = certain(draw(seeds), vocabulary)
    depth, seed, share = draw(st.integers(1, DEPTH)), draw(seeds), draw(st.sampled_from([0.0, 0.3]))

    def ends(draws: Path) -> bool:
        return len(draws) == depth or (bool(draws) and np.random.default_rng([seed, *draws]).random() < share)

    return p, q, ends, vocabulary


@given(pairs())
def test_all_outcomes_together_are_distributed_as_the_target(pair: tuple[Model, Model, Ends, int]) -> None:
    p, q, ends, vocabulary = pair
    found = outcomes(p, q, ends, vocabulary)
    assert sum(found.values()) == pytest.approx(1.0, abs=TOLERANCE)
    assert deviation(found, p, DEPTH + 1, vocabulary) < TOLERANCE


@given(pairs())
def test_as_many_are_accepted_as_one_by_one_or_more(pair: tuple[Model, Model, Ends, int]) -> None:
    p, q, ends, vocabulary = pair
    alone = accepted_one_by_one(p, q, ends, vocabulary)
    assert accepted(outcomes(p, q, ends, vocabulary)) >= alone - TOLERANCE


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_guess_that_was_not_drawn_is_accepted_as_often_as_alone(of_target: int, of_guess: int) -> None:
    p, q = model(of_target, 3), certain(of_guess, 3)

    def ends(draws: Path) -> bool:
        return len(draws) == DEPTH

    assert accepted(outcomes(p, q, ends, 3)) == pytest.approx(accepted_one_by_one(p, q, ends, 3), abs=TOLERANCE)


def two(draws: Path) -> bool:
    return len(draws) == 2


def test_the_example_of_the_paper() -> None:
    """Section 2 of Sun et al. 2024: of two draws 11/9 are accepted, or 10/9 if tested one by one."""
    p, q = TARGET_OF_PAPER, DRAFT_OF_PAPER
    assert accepted(outcomes(p, q, two, 2)) == pytest.approx(11 / 9, abs=TOLERANCE)
    assert accepted_one_by_one(p, q, two, 2) == pytest.approx(10 / 9, abs=TOLERANCE)


def without_residual(p: Model, q: Model, draws: Path) -> list[Trial]:
    """Invalid: after a rejection the target draws as if nothing had been drawn."""
    return [(passes, p(draws[:i])) for i, (passes, _) in enumerate(trials_of(p, q, draws))]


def with_the_residual_of_one_draw(p: Model, q: Model, draws: Path) -> list[Trial]:
    """Invalid: residuals are those of testing one by one."""
    trials = trials_of(p, q, draws)
    residuals = [np.maximum(p(draws[:i]) - q(draws[:i]), 0.0) for i in range(len(draws))]
    return [(passes, left) for (passes, _), left in zip(trials, [*residuals, p(draws)], strict=True)]


def with_the_ratios_of_prefixes(p: Model, q: Model, draws: Path) -> list[Trial]:
    """Invalid: prefixes pass with their ratio, without the average over the next draw."""
    trials, ratio = trials_of(p, q, draws), 1.0
    found = [trials[0]]
    for i, drawn in enumerate(draws):
        ratio = min(1.0, ratio * float(p(draws[:i])[drawn] / q(draws[:i])[drawn]))
        found.append((ratio, trials[i + 1][1]))
    return found


@pytest.mark.parametrize("trials", [without_residual, with_the_residual_of_one_draw, with_the_ratios_of_prefixes])
def test_wrong_tests_are_found_out_by_enumeration(trials: Trials) -> None:
    """Negative controls."""
    p, q = model(9, 3), model(59, 3)
    assert deviation(outcomes(p, q, two, 3), p, 3, 3) < TOLERANCE
    assert deviation(outcomes(p, q, two, 3, trials), p, 3, 3) > 1e-3


def test_an_end_that_depends_on_the_draw_behind_it_is_found_out_by_enumeration() -> None:
    """Negative control: the second draw is left out if it is less probable in the target than in the draft. (Appendix A
    of DSpark 2026, arXiv 2607.05147, shows this fault for draws tested alone.)"""
    p, q = model(9, 3), model(59, 3)
    found: Outcomes = {}
    for draws, probability in chains(q, two, 3):
        kept = draws[:1] if p(draws[:1])[draws[1]] < q(draws[:1])[draws[1]] else draws
        add(found, kept, probability, trials_of(p, q, kept))
    assert sum(found.values()) == pytest.approx(1.0, abs=TOLERANCE)
    assert deviation(found, p, 3, 3) > 1e-3


# --- by their random numbers ----------------------------------------------------------------------------

RUNS = 2000

Hash = Callable[[Path, Path], int]


def step(seed: int, text: Path, depth: int, p: Model, q: Model, hashed: Hash) -> tuple[Path, AcceptedPrefix]:
    """Verify a chain of `depth` draws below a text, with a row after each; return the draws and the outcome."""
    sampler = RequestSampler(Sampling(temperature=1.0, seed=seed), rule=Rule.REJECTION)
    draws, queries, rows = tuple[int, ...](), list[SamplingQuery](), list[Logits]()
    for _ in range(depth):
        query = SamplingQuery(sampler, len(text) + len(draws), text_hash=hashed(text, draws))
        proposal = propose(logits_of(q((*text, *draws))), query)
        assert proposal is not None
        queries.append(query._replace(proposal=proposal))
        rows.append(logits_of(p((*text, *draws))))
        draws += proposal.tokens
    queries.append(SamplingQuery(sampler, len(text) + len(draws)))
    rows.append(logits_of(p((*text, *draws))))
    return draws, verify(iter(rows), queries)


def run(
    seed: int,
    p: Model,
    q: Model,
    length: int = LENGTH,
    depth: Callable[[int, Path], int] = lambda seed, text: 1 + (seed + len(text)) % 3,
    hashed: Hash = text_hash,
) -> Path:
    """Generate tokens by steps of different depths. After a rejection, the draft draws again."""
    text: Path = ()
    while len(text) < length:
        draws, (count, token) = step(seed, text, depth(seed, text), p, q, hashed)
        text += draws[:count] + (() if token is None else (token,))
    return text[:length]


def test_runs_follow_the_target() -> None:
    p, q = model(1, VOCABULARY), model(2, VOCABULARY)
    assert pvalue(Counter(run(seed, p, q) for seed in range(RUNS)), p) > FALSE_ALARM


def where_the_draft_is_sure(q: Model) -> Callable[[int, Path], int]:
    """Return depths that depend on the distributions alone."""
    return lambda seed, text: 1 if q(text).max() < 0.6 else 3


@pytest.mark.verify
def test_they_do_if_a_chain_is_as_long_as_the_draft_is_sure() -> None:
    p, q = model(3, VOCABULARY), model(4, VOCABULARY)
    counts = Counter(run(seed, p, q, depth=where_the_draft_is_sure(q)) for seed in range(RUNS))
    assert pvalue(counts, p) > FALSE_ALARM


def test_they_do_with_guesses_that_were_not_drawn() -> None:
    """Each step has a guess of two tokens, as from n-grams."""
    p, guess = model(5, VOCABULARY), certain(6, VOCABULARY)
    counts: Counter[Path] = Counter()
    for seed in range(RUNS // 2):
        sampler = RequestSampler(Sampling(temperature=1.0, seed=seed), rule=Rule.REJECTION)
        text: Path = ()
        while len(text) < LENGTH:
            tokens, queries = tuple[int, ...](), list[SamplingQuery]()
            for _ in range(2):
                token = int(guess((*text, *tokens)).argmax())
                proposal = Proposal((token,), DraftDistribution.certain(token))
                queries.append(SamplingQuery(sampler, len(text) + len(tokens), proposal=proposal))
                tokens += (token,)
            queries.append(SamplingQuery(sampler, len(text) + 2))
            rows = (logits_of(p((*text, *tokens[:i]))) for i in range(3))
            count, token_after = verify(rows, queries)
            assert token_after is not None
            text += (*tokens[:count], token_after)
        counts[text[:LENGTH]] += 1
    assert pvalue(counts, p) > FALSE_ALARM


def test_draws_that_come_back_behind_a_rejection_are_found_out() -> None:
    """Negative control: draws depend on their positions alone, not on the text, so that a draw tested in a rejected
    block comes back. The test counts the token after the one that replaces the block."""
    p, q = TARGET_OF_PAPER, DRAFT_OF_PAPER

    def tested(hashed: Hash) -> float:
        counts: Counter[Path] = Counter()
        for seed in range(RUNS):
            _, (count, token) = step(seed, (), 2, p, q, hashed)
            if not count:
                assert token is not None
                draws, (count, after) = step(seed, (token,), 2, p, q, hashed)
                counts[(*draws[:count], *([] if after is None else [after]))[:1]] += 1
        return pvalue(counts, p, 1, 2)

    assert tested(text_hash) > FALSE_ALARM
    assert tested(lambda text, path: 0) < FALSE_ALARM


def test_a_forgotten_residual_is_found_out() -> None:
    """Negative control: the token after a rejection is drawn as if nothing had been drawn."""
    p, q = TARGET_OF_PAPER, DRAFT_OF_PAPER
    counts: Counter[Path] = Counter()
    for seed in range(RUNS):
        draws, (count, token) = step(seed, (), 2, p, q, text_hash)
        if count < 2:
            token = int(np.random.default_rng(seed).choice(2, p=p(())))
        assert token is not None
        counts[(*draws[:count], token)[:1]] += 1
    assert pvalue(counts, p, 1, 2) < FALSE_ALARM


def test_as_many_draws_are_accepted_as_were_enumerated() -> None:
    """Within five standard deviations; a run accepts at most 2 draws."""
    p, q = TARGET_OF_PAPER, DRAFT_OF_PAPER
    counts = [step(seed, (), 2, p, q, text_hash)[1].length for seed in range(RUNS)]
    assert abs(float(np.mean(counts)) - 11 / 9) < 5 * (1 / RUNS) ** 0.5


# --- a single chain -------------------------------------------------------------------------------------


def chain(seed: int, drawn: tuple[int, ...], bonus: bool = True) -> list[SamplingQuery]:
    """Return queries about draws from a uniform distribution."""
    sampler = RequestSampler(Sampling(temperature=1.0, seed=seed), rule=Rule.REJECTION)
    row = DraftDistribution(np.arange(VOCABULARY), np.ones(VOCABULARY, np.float16))
    queries = [SamplingQuery(sampler, 7 + i, proposal=Proposal((token,), row)) for i, token in enumerate(drawn)]
    return [*queries, *[SamplingQuery(sampler, 7 + len(drawn))] * bonus]


LIKED = np.log(np.array([0.98, 0.01, 0.01], np.float32))
"""Logits under which a uniform draw of token 0 is always accepted."""


def test_the_same_draws_have_the_same_outcome() -> None:
    rows = [LIKED[::-1]] * 3
    outcomes = {seed: verify(rows, chain(seed, (0, 2))) for seed in range(50)}
    assert outcomes == {seed: verify(iter(rows), chain(seed, (0, 2))) for seed in range(50)}
    assert len(set(outcomes.values())) > 1


def test_a_chain_without_a_row_behind_it_ends_with_its_last_draw() -> None:
    assert verify([LIKED] * 2, chain(1, (0, 0), bonus=False)) == AcceptedPrefix(2, None)
    assert verify([LIKED] * 3, chain(1, (0, 0))).length == 2


def test_what_the_target_rules_out_is_never_accepted_nor_anything_behind_it() -> None:
    ruled_out = np.array([-np.inf, 0.0, 0.0], np.float32)

    def rows() -> Iterator[Logits]:
        yield LIKED
        yield ruled_out
        raise AssertionError("a row that decides nothing")

    for seed in range(50):
        count, token = verify(rows(), chain(seed, (0, 0, 0)))
        assert count <= 1
        assert token is not None
        assert (count, token) != (1, 0)


@pytest.mark.parametrize("broken", [np.nan, np.inf, 1e31])
def test_a_broken_row_is_left_to_be_decided_alone(broken: float) -> None:
    """Only if the draws before it are accepted. 1e31 is finite, but so large that noise has no effect."""
    row = np.array([0.0, broken, 0.0], np.float32)
    assert verify([row, LIKED], chain(1, (0,))) == AcceptedPrefix(0, None)
    assert verify([LIKED, row, LIKED], chain(1, (0, 0))) == AcceptedPrefix(1, None)
    assert verify([LIKED, row], chain(1, (0,))) == AcceptedPrefix(1, None)
    rejected = np.array([-np.inf, 0.0, 0.0], np.float32)
    assert verify([rejected, row, LIKED], chain(1, (0, 0))).token is not None


def test_step_logits_verify_several_chains() -> None:
    logits = np.stack([LIKED, LIKED[::-1], LIKED, LIKED])
    queries = [ChainQuery([3, 0, 2], chain(1, (0, 0))), ChainQuery([1], chain(2, (0,), bonus=False))]
    found = HostLogits(logits).verify_chains(queries)
    assert found == [verify(logits[list(query.rows)], query.queries) for query in queries]
    assert queries[0].draws == [0, 0]
