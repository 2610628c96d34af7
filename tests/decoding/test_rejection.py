"""Speculative sampling preserves the target's distribution for truncated, rounded and late drafts, and for several
draws at a position; negative controls show that the tests detect violations.

Chi-square tests of joint distributions, each with false-alarm probability FALSE_ALARM, on fixed seeds: the outcome
is deterministic. Outcomes of several draws are enumerated too, with their exact probabilities.
(`test_block_verification.py` is about draws tested as a whole.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from specdec.decoding import rejection
from specdec.decoding.choice import choose
from specdec.decoding.noise import TEXT_HASH_TOKENS, text_hash
from specdec.decoding.proposal import DistributionSizes, DraftDistribution, Proposal
from specdec.decoding.query import PenaltyState, RequestSampler, SamplingQuery
from specdec.decoding.rejection import acceptance, acceptances, draw, probabilities_of, trials
from specdec.decoding.rejection import propose as propose_if_sound
from specdec.decoding.sampling import Rule, Sampling
from specdec.serving.messages import distribution_from, distribution_message
from tests.decoding import small_models
from tests.decoding.small_models import FALSE_ALARM, Logits, Path

FEW, MANY = 2000, 6000
"""Runs of a test. With FEW, a wrong distribution is found out from a noncentrality of 200 on; those of the negative
controls exceed 300."""

LENGTH = 2
VOCABULARY = 5


def model(seed: int, sharpness: float) -> Callable[[Path], Logits]:
    """Return a function giving logits after any path."""

    @cache
    def after(path: Path) -> Logits:
        generator = np.random.default_rng([seed, *path])
        logits = np.asarray(sharpness * generator.standard_normal(VOCABULARY), dtype=np.float32)
        logits.flags.writeable = False
        return logits

    return after


TARGET, DRAFT = model(1, 1.2), model(2, 1.2)


def probabilities(logits: Logits, sampling: Sampling) -> NDArray[np.float64]:
    """Return the softmax at T with top-k, from its definition."""
    z = logits.astype(np.float64) / sampling.temperature
    if sampling.top_k:
        z[np.argsort(-z, kind="stable")[sampling.top_k :]] = -np.inf
    weights = np.exp(z - z.max())
    return np.asarray(weights / weights.sum())


Offer = Callable[[int, Path, Proposal], bool]
"""Whether run `run` offers a proposal after a path."""


def propose(logits: Logits, query: SamplingQuery, count: int = 1) -> Proposal:
    """Return a draft's proposal; its logits must be finite."""
    proposal = propose_if_sound(logits, query, count)
    assert proposal is not None
    return proposal


def run(seed: int, sampling: Sampling, offer: Offer, draft: Callable[[Path], Logits] = DRAFT) -> Path:
    """Generate LENGTH tokens by draft and verification, one position at a time."""
    sampler = RequestSampler(
        Sampling(temperature=sampling.temperature, top_k=sampling.top_k, seed=seed), rule=Rule.REJECTION
    )
    path: Path = ()
    while len(path) < LENGTH:
        query = SamplingQuery(sampler, len(path))
        proposal = propose(draft(path), query)
        offered = proposal if offer(seed, path, proposal) else None
        path += (int(choose(TARGET(path)[None], [query._replace(proposal=offered)])[0]),)
    return path


def pvalue(counts: Counter[Path], sampling: Sampling) -> float:
    return small_models.pvalue(counts, lambda path: probabilities(TARGET(path), sampling), LENGTH, VOCABULARY)


def always(seed: int, path: Path, proposal: Proposal) -> bool:
    return True


def never(seed: int, path: Path, proposal: Proposal) -> bool:
    return False


def late(seed: int, path: Path, proposal: Proposal) -> bool:
    return seed % 3 != 0


def where_the_draft_is_sure(seed: int, path: Path, proposal: Proposal) -> bool:
    """Valid: depends on the whole distribution, not on the drawn token."""
    return rejection.acceptance(proposal.row) > 0.8


def after_some_prefixes(seed: int, path: Path, proposal: Proposal) -> bool:
    return sum(path) % 2 == 0


def where_the_draw_is_probable(seed: int, path: Path, proposal: Proposal) -> bool:
    """Invalid: depends on the drawn token."""
    assert proposal.row.ids is not None
    return bool(proposal.row.values[proposal.row.ids == proposal.tokens[0]] >= 0.9)


OFFERS = (always, never, late, where_the_draft_is_sure, after_some_prefixes)
ALL, K3 = Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=3)


@pytest.mark.parametrize(
    ("sampling", "offer", "runs"),
    [
        *(pytest.param(K3, offer, FEW, id=f"k3-{offer.__name__}") for offer in OFFERS),
        *(pytest.param(ALL, offer, FEW, id=f"all-{offer.__name__}") for offer in (always, after_some_prefixes)),
        *(
            pytest.param(sampling, offer, MANY, id=f"{name}-{offer.__name__}-many", marks=pytest.mark.verify)
            for name, sampling in (("all", ALL), ("k3", K3))
            for offer in OFFERS
        ),
    ],
)
def test_the_distribution_is_the_targets(sampling: Sampling, offer: Offer, runs: int) -> None:
    counts = Counter(run(seed, sampling, offer) for seed in range(runs))
    assert pvalue(counts, sampling) > FALSE_ALARM


def test_a_draft_cut_to_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "WIDTH", 2)
    sampling = Sampling(temperature=1.0)
    counts = Counter(run(seed, sampling, always) for seed in range(FEW))
    assert pvalue(counts, sampling) > FALSE_ALARM


def test_a_policy_that_looks_at_the_value_is_found_out() -> None:
    """Negative control: the same test fails."""
    sampling = Sampling(temperature=1.0)
    counts = Counter(run(seed, sampling, where_the_draw_is_probable) for seed in range(FEW))
    assert pvalue(counts, sampling) < FALSE_ALARM


def test_the_better_draw_of_two_sessions_is_found_out_too() -> None:
    """Two sessions compete for one row: if the more probable draw gets it, the result is biased even with p = q."""
    sampling = Sampling(temperature=1.0)
    counts: Counter[Path] = Counter()
    for seed in range(FEW):
        rival = propose(
            TARGET(()),
            SamplingQuery(RequestSampler(Sampling(temperature=1.0, seed=seed + FEW), rule=Rule.REJECTION), 0),
        )

        def best_of_two(_: int, path: Path, proposal: Proposal, rival: Proposal = rival) -> bool:
            return weight(proposal) > weight(rival)

        counts[run(seed, sampling, best_of_two, TARGET)] += 1
    assert pvalue(counts, sampling) < FALSE_ALARM


def weight(proposal: Proposal) -> float:
    assert proposal.row.ids is not None
    values = proposal.row.values
    return float(values[proposal.row.ids == proposal.tokens[0]][0] / values.sum())


def test_a_guess_that_was_not_sampled() -> None:
    """A deterministic proposal has a distribution of one token."""
    sampling = Sampling(temperature=1.0)
    sampler = [RequestSampler(Sampling(temperature=1.0, seed=seed), rule=Rule.REJECTION) for seed in range(FEW)]
    row = DraftDistribution(np.array([2]), np.ones(1, np.float16))
    counts = Counter(
        int(choose(TARGET(())[None], [SamplingQuery(each, 0, proposal=Proposal((2,), row))])[0]) for each in sampler
    )
    p = probabilities(TARGET(()), sampling)
    assert stats.chisquare([counts[v] for v in range(VOCABULARY)], FEW * p).pvalue > FALSE_ALARM


def test_candidates_are_accepted_as_often_as_can_be() -> None:
    """With probability 1 - TV(p, q), within five standard deviations."""
    sampling = Sampling(temperature=1.0)
    p, q = probabilities(TARGET(()), sampling), probabilities(DRAFT(()), sampling)
    wanted = float(np.minimum(p, q).sum())
    accepted = 0
    for seed in range(FEW):
        query = SamplingQuery(RequestSampler(Sampling(temperature=1.0, seed=seed), rule=Rule.REJECTION), 0)
        proposal = propose(DRAFT(()), query)
        accepted += int(choose(TARGET(())[None], [query._replace(proposal=proposal)])[0]) in proposal.tokens
    assert abs(accepted / FEW - wanted) < 5 * (wanted * (1 - wanted) / FEW) ** 0.5 + 1e-3  # float16 rounding


# --- several draws at one position ------------------------------------------------------------------------

TOLERANCE = 1e-12


@st.composite
def positions(draw: st.DrawFn) -> tuple[NDArray[np.float64], DraftDistribution]:
    """Draw the target's probabilities of all tokens, some of them ruled out, and a draft's weights of some tokens."""
    generator = np.random.default_rng(draw(st.integers(0, 10_000)))
    size = draw(st.integers(1, 4))
    p = generator.dirichlet(np.full(size, 0.5)) * (generator.random(size) < 0.8)
    p = p / p.sum() if p.any() else np.eye(size)[0]
    ids = np.flatnonzero(generator.random(size) < 0.8)
    ids = ids if len(ids) else np.array([0])
    return p, DraftDistribution(ids, (generator.random(len(ids)) + 0.01).astype(np.float16))


def series(row: DraftDistribution, count: int, drawn: Path = ()) -> Iterator[tuple[Path, float]]:
    """Yield every series of draws without replacement, with its probability."""
    assert row.ids is not None
    left = [i for i, token in enumerate(row.ids.tolist()) if token not in drawn]
    if len(drawn) == count or not left:
        yield drawn, 1.0
        return
    values = row.values.astype(np.float64)
    for i in left:
        for tokens, probability in series(row, count, (*drawn, int(row.ids[i]))):
            yield tokens, float(values[i] / values[left].sum()) * probability


Rejects = Callable[[NDArray[np.float64], Proposal], Iterator[tuple[int, float]]]


def decided(
    p: NDArray[np.float64], row: DraftDistribution, count: int, tests: Rejects
) -> tuple[NDArray[np.float64], float]:
    """Return the distribution of the token decided with up to `count` draws, and the probability that it is a draw."""
    found, accepted = np.zeros(len(p)), 0.0
    for tokens, probability in series(row, count):
        left = p.copy()
        for token, accepts in tests(left, Proposal(tokens, row)):
            found[token] += probability * accepts
            accepted += probability * accepts
            probability *= 1 - accepts
        found += probability * left
    return found, accepted


def in_turn(left: NDArray[np.float64], proposal: Proposal) -> Iterator[tuple[int, float]]:
    return trials(np.arange(len(left)), left, proposal)


def each_from_the_same_distribution(left: NDArray[np.float64], proposal: Proposal) -> Iterator[tuple[int, float]]:
    """Invalid without replacement: a rejected token stays in the draft's distribution."""
    for token in proposal.tokens:
        yield next(in_turn(left, one := Proposal((token,), proposal.row)))
        list(trials(np.arange(len(left)), left, one))


def without_residual(left: NDArray[np.float64], proposal: Proposal) -> Iterator[tuple[int, float]]:
    """Invalid: each draw is tested against the target's distribution instead of the residual."""
    for token in proposal.tokens:
        yield next(in_turn(left.copy(), Proposal((token,), proposal.row)))


@given(positions(), st.integers(1, 4))
def test_however_many_draws_all_outcomes_together_are_distributed_as_the_target(
    position: tuple[NDArray[np.float64], DraftDistribution], count: int
) -> None:
    p, row = position
    found, _ = decided(p, row, count, in_turn)
    assert np.abs(found - p).max() < TOLERANCE


@given(positions())
def test_a_further_draw_is_accepted_sometimes(position: tuple[NDArray[np.float64], DraftDistribution]) -> None:
    """If all tokens are drawn, one of them is always accepted."""
    p, row = position
    accepted = [decided(p, row, count, in_turn)[1] for count in range(1, len(p) + 1)]
    assert all(more >= fewer - TOLERANCE for fewer, more in pairwise(accepted))
    if row.ids is not None and set(np.flatnonzero(p)) <= set(row.ids.tolist()):
        assert accepted[-1] == pytest.approx(1.0, abs=TOLERANCE)


@pytest.mark.parametrize("tests", [each_from_the_same_distribution, without_residual])
def test_wrong_tests_of_several_draws_are_found_out_by_enumeration(tests: Rejects) -> None:
    """Negative controls."""
    p = np.array([0.4, 0.3, 0.2, 0.1])
    row = DraftDistribution(np.arange(4), np.array([0.1, 0.2, 0.3, 0.4], np.float16))
    assert np.abs(decided(p, row, 2, in_turn)[0] - p).max() < TOLERANCE
    assert np.abs(decided(p, row, 2, tests)[0] - p).max() > 1e-2


def draws_decided(seed: int, sampling: Sampling, count: int, *, forgets: bool = False) -> Path:
    """Generate LENGTH tokens with up to `count` draws at each position."""
    sampler = RequestSampler(
        Sampling(temperature=sampling.temperature, top_k=sampling.top_k, seed=seed), rule=Rule.REJECTION
    )
    path: Path = ()
    while len(path) < LENGTH:
        query = SamplingQuery(sampler, len(path))
        proposal = propose(DRAFT(path), query, count)
        token = int(choose(TARGET(path)[None], [query._replace(proposal=proposal)])[0])
        if forgets and token not in proposal.tokens:
            p = probabilities(TARGET(path), sampling)
            token = int(np.random.default_rng([seed, len(path)]).choice(VOCABULARY, p=p))
        path += (token,)
    return path


@pytest.mark.parametrize(
    ("sampling", "count"),
    [
        pytest.param(ALL, 2, id="all-2"),
        pytest.param(ALL, VOCABULARY, id="all-5"),
        pytest.param(K3, 3, id="k3-3"),
        pytest.param(ALL, 3, id="all-3", marks=pytest.mark.verify),
        pytest.param(K3, 2, id="k3-2", marks=pytest.mark.verify),
        pytest.param(K3, VOCABULARY, id="k3-5", marks=pytest.mark.verify),
    ],
)
def test_with_several_draws_the_distribution_is_the_targets(sampling: Sampling, count: int) -> None:
    counts = Counter(draws_decided(seed, sampling, count) for seed in range(FEW))
    assert pvalue(counts, sampling) > FALSE_ALARM


def test_a_forgotten_residual_is_found_out() -> None:
    """Negative control: after all rejections the token is drawn as if nothing had been drawn."""
    counts = Counter(draws_decided(seed, ALL, 2, forgets=True) for seed in range(FEW))
    assert pvalue(counts, ALL) < FALSE_ALARM


@given(st.sets(st.integers(0, 20)), st.dictionaries(st.integers(0, 20), st.floats(0.1, 1.0)))
def test_probabilities_are_those_of_the_ids(wanted: set[int], known: dict[int, float]) -> None:
    ids = sorted(known)
    found = probabilities_of(
        np.array(sorted(wanted), np.int64), np.array(ids, np.int64), np.array([known[token] for token in ids])
    )
    assert found.tolist() == [known.get(token, 0.0) for token in sorted(wanted)]


def test_draws_of_one_position_are_different_tokens_and_a_series_begins_as_a_shorter_one() -> None:
    sampler = RequestSampler(Sampling(temperature=1.0, seed=3), rule=Rule.REJECTION)
    for position in range(50):
        drawn = propose(DRAFT(()), SamplingQuery(sampler, position), 9).tokens
        assert sorted(drawn) == list(range(VOCABULARY))
        assert propose(DRAFT(()), SamplingQuery(sampler, position), 2).tokens == drawn[:2]


def test_draws_depend_on_the_text_before_them() -> None:
    sampler = RequestSampler(Sampling(temperature=1.0, seed=3), rule=Rule.REJECTION)
    drawn = {propose(DRAFT(()), SamplingQuery(sampler, 300, text_hash=text_hash([n], [])), 3).tokens for n in range(99)}
    assert len(drawn) > 9
    long = list(range(2 * TEXT_HASH_TOKENS))
    assert text_hash(long, []) == text_hash(long[:-3], long[-3:]) == text_hash(long[TEXT_HASH_TOKENS:], [])
    assert text_hash(long, []) != text_hash([*long[:-TEXT_HASH_TOKENS], 7, *long[1 - TEXT_HASH_TOKENS :]], [])


def test_estimates_of_later_draws_fall_and_depend_on_the_distribution_alone() -> None:
    row = DraftDistribution(np.arange(3), np.array([1.0, 0.5, 0.5], np.float16))
    estimates = acceptances(row, 4)
    assert estimates[0] == acceptance(row)
    assert (np.diff(estimates) < 0).all()
    assert estimates.sum() < 1
    sure = DraftDistribution.certain(3)
    assert (acceptances(sure, 2) > 0).all()


weights = st.lists(st.sampled_from([0.0, 1e-300, 0.1, 0.3, 1.0, 5.0]), min_size=1, max_size=8).filter(any)


@given(weights, st.floats(0.0, 1.0, exclude_min=True, exclude_max=True))
def test_nothing_impossible_is_drawn(given_weights: list[float], number: float) -> None:
    array = np.asarray(given_weights)
    index = draw(array, number)
    assert array[index] > 0
    assert array[:index].sum() <= number * array.sum() * (1 + 1e-12)


def test_a_row_travels() -> None:
    proposal = propose(DRAFT(()), SamplingQuery(RequestSampler(Sampling(temperature=1.0), rule=Rule.REJECTION), 0))
    again = distribution_from(distribution_message(0, proposal.row), DistributionSizes.of(Rule.REJECTION, 100))
    assert again.ids is not None
    assert proposal.row.ids is not None
    assert np.array_equal(again.ids, proposal.row.ids)
    assert np.array_equal(again.values, proposal.row.values)


@pytest.mark.parametrize(
    ("ids", "values", "why"),
    [
        ([1], np.ones(2, np.float16).tobytes(), "values: has 2 numbers for 1 token ids"),
        ([2, 1], np.ones(2, np.float16).tobytes(), "token ids: must ascend"),
        ([1, 1], np.ones(2, np.float16).tobytes(), "token ids: must ascend"),
        ([1], np.array([np.nan], np.float16).tobytes(), "values: has numbers that are not finite"),
        ([1], np.array([np.inf], np.float16).tobytes(), "values: has numbers that are not finite"),
        ([1], b"abc", "values: has 3 bytes"),
        ([], b"", "values: has 0 bytes"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused(ids: list[int], values: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}"):
        DraftDistribution.received(ids, values)


def test_each_rule_has_rows_of_its_own() -> None:
    some = DraftDistribution(np.array([2, 5]), np.array([0.5, 0.0], np.float16))
    every = DraftDistribution(None, np.array([-1.0, -2.0], np.float16))
    negative = DraftDistribution(np.array([2]), np.array([-0.5], np.float16))
    nothing = DraftDistribution(np.array([2]), np.array([0.0], np.float16))
    part = DraftDistribution(np.array([1]), np.array([-0.5], np.float16), vocabulary=2)
    fitting = {rule: [row.fits(rule, 2) for row in (some, every, negative, nothing, part)] for rule in Rule}
    assert fitting == {
        Rule.COUPLED: [False] * 5,
        Rule.REJECTION: [True, False, False, False, False],
        Rule.CONTRASTIVE: [False, True, False, False, True],
        Rule.TYPICAL: [False] * 5,
    }


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, repetition_penalty=1e-38),
        Sampling(temperature=1.0, banned_tokens=frozenset(range(VOCABULARY))),
    ],
    ids=["infinite", "nothing is left"],
)
def test_logits_that_the_request_has_broken_propose_nothing(sampling: Sampling) -> None:
    sampler = RequestSampler(sampling, rule=Rule.REJECTION)
    penalty_state = PenaltyState(VOCABULARY, range(VOCABULARY), [])
    logits = np.full(VOCABULARY, 5.0, dtype=np.float32)
    assert propose_if_sound(logits, SamplingQuery(sampler, 0, penalty_state)) is None
