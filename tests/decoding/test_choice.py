"""Proves that the choice rule equals its specification, step by step and bit by bit.

`choose_token` is compared with a slow reference in plain Python: float32 where the design specifies float32 (by
rounding every operation), float64 for top-p's sums and the noise. Vocabularies are small and logits lie on a coarse
grid, so that ties occur at every step. `choose` over many rows gives the same tokens as row by row, and over
vocabularies of real size the same as a plain sort with noise for every id. Further tests: choices follow their
softmax (chi-square on fixed seeds, thus deterministic; the stated false-alarm probability is over the choice of
seeds), two models with shared noise agree as often as the theory promises, and `draft_candidates` ranks by what
`choose` maximises.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import special, stats

from specdec.decoding.candidates import AGREEMENT_SCALE
from specdec.decoding.choice import BLOCK, choose
from specdec.decoding.noise import gumbel
from specdec.decoding.query import PenaltyState, RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.decoding.token_mask import TokenMask
from tests.choices import candidates, choose_token, choose_tokens, mask_of
from tests.choices import scores as scores_of

FALSE_ALARM = 1e-6


def float32(value: float) -> float:
    """Round `value` to float32; rounding each float64 result this way is exactly float32 arithmetic."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass(frozen=True)
class Case:
    """All inputs of one choice."""

    logits: list[float]
    sampling: Sampling = field(default_factory=Sampling)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    position: int = 0
    end_tokens: frozenset[int] = frozenset()
    first_end_position: int = 0
    allowed: frozenset[int] | None = None
    ruled_out: tuple[int, ...] = ()

    @property
    def mask(self) -> TokenMask | None:
        return None if self.allowed is None else mask_of(self.allowed, len(self.logits))

    @property
    def row(self) -> NDArray[np.float32]:
        row = np.array(self.logits, dtype=np.float32)
        row.flags.writeable = False
        return row

    @property
    def penalty_state(self) -> PenaltyState:
        return PenaltyState(len(self.logits), self.prompt, self.output)

    @property
    def sampler(self) -> RequestSampler:
        return RequestSampler(self.sampling, self.end_tokens, self.first_end_position)

    @property
    def query(self) -> SamplingQuery:
        return SamplingQuery(
            self.sampler,
            self.position,
            self.penalty_state,
            self.path,
            allowed=self.mask,
            ruled_out=list(self.ruled_out),
        )

    def choose(self) -> int:
        return int(choose(self.row[None], [self.query])[0])

    def draft_candidates(self, width: int) -> tuple[list[int], list[float]]:
        return candidates(self.row, self.query, width)


def reference_adjusted(case: Case) -> list[float]:
    """Return logits after penalties, bias, bans and the token mask, in the design's order. If bans leave no token of
    the mask, the mask alone applies."""
    s = case.sampling
    output = case.output + case.path
    adjusted = []
    for token, logit in enumerate(case.logits):
        z = float32(logit)
        if token in case.prompt or token in output:
            penalty = float32(s.repetition_penalty)
            z = float32(z / penalty) if z > 0 else float32(z * penalty)
        z = float32(z - float32(float32(s.frequency_penalty) * output.count(token)))
        z = float32(z - (float32(s.presence_penalty) if token in output else 0.0))
        z = float32(z + float32(s.logit_bias.get(token, 0.0)))
        too_early = token in case.end_tokens and case.position < case.first_end_position
        banned = token in s.banned_tokens or token in case.ruled_out
        adjusted.append(-math.inf if banned or too_early else z)
    if case.allowed is None:
        return adjusted
    kept = [z if token in case.allowed else -math.inf for token, z in enumerate(adjusted)]
    if any(z > -math.inf for z in kept):
        return kept
    return [float32(z) if token in case.allowed else -math.inf for token, z in enumerate(case.logits)]


def reference_survivors(adjusted: Sequence[float], s: Sampling) -> dict[int, float]:
    """Divide by T, then apply top-k, top-p and min-p; return the surviving ids and their logits."""
    temperature = float32(s.temperature)
    z = {token: float32(logit / temperature) for token, logit in enumerate(adjusted) if logit > -math.inf}
    ranked = sorted(z, key=lambda token: (-z[token], token))
    if s.top_k:
        ranked = ranked[: s.top_k]
    if s.top_p < 1.0:
        weights = [float32(math.exp(float32(z[token] - z[ranked[0]]))) for token in ranked]
        total = 0.0
        for weight in weights:
            total += weight
        reached, size = 0.0, 0
        while reached < s.top_p * total:
            reached += weights[size]
            size += 1
        ranked = ranked[:size]
    least = z[ranked[0]] + math.log(s.min_p) if s.min_p else -math.inf
    return {token: z[token] for token in sorted(ranked) if z[token] >= least}


def reference_perturbed(case: Case) -> dict[int, float]:
    """Return the surviving ids and the values to maximise."""
    adjusted = reference_adjusted(case)
    if case.sampling.temperature < 1e-4:
        return {token: z for token, z in enumerate(adjusted) if z > -math.inf}
    survivors = reference_survivors(adjusted, case.sampling)
    seed, position = case.sampling.seed, case.position
    return {token: z + float(gumbel(seed, position, np.array([token]))[0]) for token, z in survivors.items()}


def reference_choice(case: Case) -> int:
    perturbed = reference_perturbed(case)
    return min(perturbed, key=lambda token: (-perturbed[token], token))


coarse = st.integers(-8, 8).map(lambda half: half / 2)
fine = st.floats(-30, 30, width=32)


@st.composite
def cases(
    draw: st.DrawFn,
    temperatures: Sequence[float] = (0.0, 5e-5, 1e-4, 0.3, 0.7, 1.0, 2.5, 1e30),
    vocabulary: int | None = None,
) -> Case:
    vocabulary = vocabulary or draw(st.integers(1, 12))
    token = st.integers(0, vocabulary - 1)
    tokens = st.lists(token, max_size=6)
    # some models mask vocabulary padding with -inf
    value = draw(st.sampled_from([coarse, fine, coarse | st.just(-math.inf)]))
    case = Case(
        logits=draw(st.lists(value, min_size=vocabulary, max_size=vocabulary)),
        sampling=Sampling(
            repetition_penalty=draw(st.just(1.0) | st.sampled_from([0.5, 1.1, 2.0])),
            frequency_penalty=draw(st.just(0.0) | st.sampled_from([-0.5, 0.1, 0.5])),
            presence_penalty=draw(st.just(0.0) | st.sampled_from([-0.5, 0.1, 0.5])),
            logit_bias=draw(st.just({}) | st.dictionaries(token, coarse | st.sampled_from([-100.0, 100.0]))),
            banned_tokens=draw(st.just(frozenset()) | st.frozensets(token)),
            temperature=draw(st.sampled_from(temperatures)),
            top_k=draw(st.just(0) | st.integers(0, vocabulary + 2)),
            top_p=draw(st.just(1.0) | st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9]) | st.floats(1e-3, 1.0)),
            min_p=draw(st.just(0.0) | st.sampled_from([0.01, 0.1, 0.5, 0.99])),
            seed=draw(st.integers(0, 2**64 - 1)),
        ),
        prompt=draw(tokens),
        output=draw(tokens),
        path=draw(tokens),
        position=draw(st.integers(0, 5)),
        end_tokens=draw(st.just(frozenset()) | st.frozensets(token)),
        first_end_position=draw(st.integers(0, 5)),
        allowed=draw(st.none() | st.frozensets(token, min_size=1)),
        ruled_out=draw(st.just(()) | st.lists(token, max_size=3).map(tuple)),
    )
    assume(any(z > -math.inf for z in reference_adjusted(case)))  # with every token banned there is no choice
    return case


class TestChoose:
    @settings(max_examples=300, deadline=None)
    @given(cases())
    def test_equals_the_reference(self, case: Case) -> None:
        assert case.choose() == reference_choice(case)

    @settings(max_examples=100, deadline=None)
    @given(cases())
    def test_scores_are_what_the_choice_maximises(self, case: Case) -> None:
        """Over survivors; for greedy sampling over all tokens, with banned ones at -inf."""
        ids, scores = scores_of(case.row, case.query)
        want = reference_perturbed(case)
        if case.sampling.temperature < 1e-4:
            want = {token: want.get(token, -math.inf) for token in range(len(case.logits))}
        assert dict(zip(ids.tolist(), scores.tolist(), strict=True)) == want
        assert ids.tolist() == sorted(want)

    @settings(max_examples=100, deadline=None)
    @given(cases(), st.lists(st.integers(0, 11), max_size=6))
    def test_a_penalty_state_that_grew_is_the_penalty_state(self, case: Case, more: list[int]) -> None:
        more = [token % len(case.logits) for token in more]
        penalty_state = case.penalty_state
        penalty_state.extend(more)
        got = int(choose(case.row[None], [case.query._replace(penalty_state=penalty_state)])[0])
        assert got == reference_choice(replace(case, output=case.output + more))

    @settings(max_examples=100, deadline=None)
    @given(cases())
    def test_neither_row_nor_penalty_state_is_changed(self, case: Case) -> None:
        row, penalty_state = np.array(case.logits, dtype=np.float32), case.penalty_state
        seen, counts = penalty_state.seen.copy(), penalty_state.output_counts.copy()
        choose_token(case.sampler, row, case.position, penalty_state, case.path)
        assert row.tobytes() == case.row.tobytes()
        assert np.array_equal(penalty_state.seen, seen)
        assert np.array_equal(penalty_state.output_counts, counts)

    def test_a_broken_row_is_found_whatever_is_allowed(self) -> None:
        """A token without a finite logit is chosen, even if the broken logit belongs to an excluded token."""
        logits = [1.0, math.nan, 2.0]
        for allowed in ({0}, {1}, {0, 2}):
            assert Case(logits, allowed=frozenset(allowed)).choose() == 1

    def test_greedy_takes_the_lowest_id_among_equals(self) -> None:
        assert Case([1.0, 3.0, 3.0, 3.0]).choose() == 1

    def test_a_temperature_below_1e_4_is_greedy_whatever_the_seed(self) -> None:
        """Two equal logits: with noise, one of 100 seeds would choose the second, except with probability 2**-100."""
        greedy = {Case([0.0, 0.0], Sampling(temperature=9.9e-5, seed=seed)).choose() for seed in range(100)}
        noisy = {Case([0.0, 0.0], Sampling(temperature=1e-4, seed=seed)).choose() for seed in range(100)}
        assert (greedy, noisy) == ({0}, {0, 1})

    def test_top_k_keeps_exactly_k_and_the_lower_ids_of_equals(self) -> None:
        found = {Case([1.0] * 8, Sampling(temperature=1.0, top_k=3, seed=seed)).choose() for seed in range(200)}
        assert found == {0, 1, 2}  # false alarm: 3 * (2/3)**200 = 2e-35

    def test_top_p_keeps_the_smallest_set_that_reaches_p(self) -> None:
        """Four equal tokens and p = 1/2: two of them reach it exactly."""
        found = {Case([1.0] * 4, Sampling(temperature=1.0, top_p=0.5, seed=seed)).choose() for seed in range(200)}
        assert found == {0, 1}

    def test_end_tokens_wait_for_their_first_position(self) -> None:
        case = Case([0.0, 5.0, 1.0], end_tokens=frozenset({1}), first_end_position=7)
        assert replace(case, position=6).choose() == 2
        assert replace(case, position=7).choose() == 1

    def test_penalties_count_the_path_as_output(self) -> None:
        case = Case([2.0, 1.5], Sampling(frequency_penalty=0.3), output=[0])
        assert case.choose() == 0
        assert replace(case, path=[0]).choose() == 1

    def test_penalties_without_a_penalty_state_are_refused(self) -> None:
        sampler = RequestSampler(Sampling(presence_penalty=0.5))
        with pytest.raises(ValueError, match="history"):
            choose_token(sampler, np.zeros(3, dtype=np.float32), 0, None)


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[NDArray[np.float32], SamplingQuery]]:
    """Rows of several requests, some with several rows sharing sampler and penalty state."""
    vocabulary = draw(st.integers(1, 12))
    token = st.integers(0, vocabulary - 1)
    value = st.just(math.nan) | st.just(math.inf) | st.just(-math.inf) | coarse
    rows = []
    for case in draw(st.lists(cases(vocabulary=vocabulary), min_size=1, max_size=5)):
        first = case.query
        rows.append((case.row, first))
        for _ in range(draw(st.integers(0, 3))):
            logits = draw(
                st.lists(draw(st.sampled_from([coarse, fine, value])), min_size=vocabulary, max_size=vocabulary)
            )
            path, position = draw(st.lists(token, max_size=4)), draw(st.integers(0, 5))
            rows.append((np.array(logits, dtype=np.float32), first._replace(position=position, path=path)))
    return draw(st.permutations(rows))


def together(rows: Sequence[tuple[NDArray[np.float32], SamplingQuery]]) -> list[int]:
    found = choose(np.stack([row for row, _ in rows]), [query for _, query in rows])
    assert found.dtype == np.int64
    tokens: list[int] = found.tolist()
    return tokens


def naive_choice(row: NDArray[np.float32], query: SamplingQuery) -> int:
    """Choose for one sampled row by a full sort and noise for all ids; no penalties, bias or bans."""
    s = query.sampler.sampling
    z = row / np.float32(s.temperature)
    ranking = np.argsort(-z, kind="stable")
    ranking = ranking[z[ranking] > -np.inf]
    if s.top_k:
        ranking = ranking[: s.top_k]
    if s.top_p < 1.0:
        reached = np.cumsum(np.exp(z[ranking] - z.max()), dtype=np.float64)
        ranking = ranking[: int((reached < s.top_p * reached[-1]).sum()) + 1]
    if s.min_p:
        ranking = ranking[z[ranking] >= np.float64(z.max()) + math.log(s.min_p)]
    scores = np.full(len(z), -np.inf)
    scores[ranking] = z[ranking] + gumbel(s.seed, query.position, np.arange(len(z)))[ranking]
    return int(scores.argmax())


KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}],
    "top-k": [{"top_k": 1}, {"top_k": 50}, {"top_k": 10**6}],
    "top-p": [{"top_p": 1e-6}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 0.999}],
    "min-p": [{"min_p": 0.9}, {"min_p": 0.02}],
    "mixed": [{}, {"top_k": 40, "top_p": 0.9}, {"top_k": 100, "min_p": 0.01}, {"top_p": 0.9, "min_p": 0.05}],
}


def random_rows(rng: np.random.Generator, count: int, vocabulary: int) -> NDArray[np.float32]:
    """Return peaked, ordinary and flat rows; one in four has many ties, another is mostly masked."""
    spread = rng.choice([0.0, 0.3, 3.0, 30.0], size=(count, 1))
    rows = (rng.normal(0, 1, (count, vocabulary)) * spread + rng.normal(0, 20, (count, 1))).astype(np.float32)
    rows[1::4] = np.round(rows[1::4])
    masked = rng.random((len(rows[2::4]), vocabulary)) < 0.9
    masked[:, rng.integers(vocabulary)] = False
    rows[2::4][masked] = -np.inf
    return np.asarray(rows)


class TestManyRows:
    @settings(max_examples=80, deadline=None)
    @given(batches(), st.data())
    def test_a_row_does_not_depend_on_the_others(
        self, batch: list[tuple[NDArray[np.float32], SamplingQuery]], data: st.DataObject
    ) -> None:
        """Including broken rows: they raise nothing and change no other row."""
        alone = [int(choose(row[None], [query])[0]) for row, query in batch]
        assert together(batch) == alone
        some = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1))
        assert together([batch[i] for i in some]) == [alone[i] for i in some]

    @settings(max_examples=60, deadline=None)
    @given(st.data(), st.integers(1, 12))
    def test_every_row_equals_the_reference(self, data: st.DataObject, vocabulary: int) -> None:
        batch = data.draw(st.lists(cases(vocabulary=vocabulary), min_size=1, max_size=6))
        assert together([(case.row, case.query) for case in batch]) == [reference_choice(case) for case in batch]

    @settings(max_examples=100, deadline=None)
    @given(cases(), st.data())
    def test_rows_of_one_text_have_penalties_of_their_own_paths(self, case: Case, data: st.DataObject) -> None:
        paths = data.draw(st.lists(st.lists(st.integers(0, len(case.logits) - 1), max_size=6), min_size=1))
        of_paths = [replace(case, path=path) for path in paths]
        assume(all(any(z > -math.inf for z in reference_adjusted(each)) for each in of_paths))
        query = case.query
        rows = [(case.row, query._replace(path=path)) for path in paths]
        assert together(rows) == [reference_choice(each) for each in of_paths]

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("vocabulary", "count"), [(1, 50), (2, 400), (50, 400), (4096, 200)])
    def test_large_rows_equal_the_naive_rule(self, kind: str, vocabulary: int, count: int) -> None:
        rng = np.random.default_rng([*kind.encode(), vocabulary])
        rows = random_rows(rng, count, vocabulary)
        queries = []
        for i in range(count):
            temperature = float(rng.choice([1e-4, 0.2, 0.8, 1.0, 5.0, 1e4, 1e30]))
            sampling = Sampling(temperature=temperature, seed=i // 3, **KINDS[kind][i % len(KINDS[kind])])
            queries.append(SamplingQuery(RequestSampler(sampling), int(rng.integers(10**6))))
        assert together(list(zip(rows, queries, strict=True))) == list(map(naive_choice, rows, queries))

    def test_rows_that_are_worked_on_in_parts(self) -> None:
        """More rows than fit into a block, and rows longer than a block."""
        queries = [SamplingQuery(RequestSampler(Sampling(temperature=0.8, seed=i)), i) for i in range(100)]
        for vocabulary, count in ((4096, BLOCK // 4096 + 20), (2 * BLOCK + 3, 2)):
            rows = np.random.default_rng(vocabulary).normal(0, 0.1, (count, vocabulary)).astype(np.float32)
            want = list(map(naive_choice, rows, queries[:count]))
            assert together(list(zip(rows, queries[:count], strict=True))) == want
        last = np.full((1, 2 * BLOCK), -np.inf, dtype=np.float32)
        last[0, -1] = 0.0
        assert choose(last, queries[:1]).tolist() == [2 * BLOCK - 1]

    @pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 3}])
    @pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 1e35])
    def test_a_broken_row_chooses_what_is_broken(self, sampling: dict[str, Any], broken: float) -> None:
        row = np.array([0.0, 1.0, broken, 2.0], dtype=np.float32)
        if broken == -math.inf:
            row[:] = broken
        assert row[Case(row.tolist(), Sampling(**sampling)).choose()].tobytes() == np.float32(broken).tobytes()

    def test_neighbours_without_a_penalty_state_are_still_different_requests(self) -> None:
        row = np.zeros(3, dtype=np.float32)
        queries = [SamplingQuery(RequestSampler(Sampling(logit_bias={token: 1.0})), 7) for token in (2, 1)]
        assert together([(row, query) for query in queries]) == [2, 1]

    def test_a_banned_nan_breaks_nothing(self) -> None:
        sampling = Sampling(temperature=0.5, banned_tokens=frozenset({1}))
        assert Case([-50.0, math.nan, 50.0], sampling).choose() == 2

    def test_no_rows_choose_nothing(self) -> None:
        assert choose(np.zeros((0, 5), dtype=np.float32), []).tolist() == []


LOGITS = [2.0, 1.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.0, -2.0, -3.0]


class TestDistribution:
    """Chi-square tests over 10 000 choices; false alarm 1e-6 each."""

    @pytest.mark.parametrize("along", ["positions", "seeds"])
    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(temperature=1.0),
            Sampling(temperature=0.7, top_k=6),
            Sampling(temperature=1.5, top_p=0.8),
            Sampling(temperature=1.0, min_p=0.1),
            Sampling(temperature=0.8, top_k=8, top_p=0.95, min_p=0.05, repetition_penalty=1.3, presence_penalty=0.4),
        ],
        ids=["plain", "top-k", "top-p", "min-p", "everything"],
    )
    def test_choices_follow_the_softmax_of_the_survivors(self, sampling: Sampling, along: str) -> None:
        count = 10_000
        case = Case(LOGITS, sampling, prompt=[0, 1], output=[3, 3, 4])
        survivors = reference_survivors(reference_adjusted(case), sampling)
        penalty_state = case.penalty_state
        if along == "positions":
            sampler = RequestSampler(replace(sampling, seed=11))
            queries = [SamplingQuery(sampler, position, penalty_state) for position in range(count)]
        else:
            samplers = [RequestSampler(replace(sampling, seed=seed)) for seed in range(count)]
            queries = [SamplingQuery(sampler, 100, penalty_state) for sampler in samplers]
        found = np.bincount(choose_tokens(case.row, queries), minlength=len(LOGITS))
        kept = list(survivors)
        assert found.sum() == found[kept].sum()
        expected = special.softmax(list(survivors.values())) * count
        assert stats.chisquare(found[kept], expected).pvalue > FALSE_ALARM

    def test_two_models_agree_at_least_as_often_as_promised(self) -> None:
        """Daliri, Musco, Suresh 2024: shared noise agrees with probability at least (1 - TV) / (1 + TV), and no
        coupling with more than 1 - TV. 20 000 positions, six standard deviations: false alarm below 1e-8."""
        count = 20_000
        sampler = RequestSampler(Sampling(temperature=1.0, seed=3))
        p = np.array(LOGITS, dtype=np.float32)
        q = (p + np.random.default_rng(0).normal(0, 1.5, len(p))).astype(np.float32)
        distance = float(np.abs(special.softmax(p) - special.softmax(q)).sum()) / 2
        queries = [SamplingQuery(sampler, position) for position in range(count)]
        agreed = float(np.mean(choose_tokens(p, queries) == choose_tokens(q, queries)))
        slack = 6 * 0.5 / math.sqrt(count)
        assert 0.1 < distance < 0.5
        assert (1 - distance) / (1 + distance) - slack < agreed < 1 - distance + slack


class TestDraftCandidates:
    @settings(max_examples=200, deadline=None)
    @given(cases(), st.integers(1, 14))
    def test_the_first_is_the_choice_and_the_rest_descend(self, case: Case, width: int) -> None:
        tokens, scores = case.draft_candidates(width)
        assert tokens[0] == case.choose()
        assert len(tokens) == len(scores) == len(set(tokens)) <= width
        assert all(-math.inf < score <= 0 for score in scores)
        assert scores == sorted(scores, reverse=True)

    @settings(max_examples=100, deadline=None)
    @given(cases(temperatures=(0.0, 0.7, 1.0, 2.5)), st.integers(1, 14))
    def test_they_rank_the_perturbed_logits_of_the_survivors(self, case: Case, width: int) -> None:
        """Before the division by T, on the scale that decides agreement."""
        greedy = case.sampling.temperature < 1e-4
        perturbed = reference_perturbed(case)
        best = sorted(perturbed, key=lambda token: (-perturbed[token], token))[:width]
        scale = (1.0 if greedy else case.sampling.temperature) / AGREEMENT_SCALE
        total = special.logsumexp([scale * z for z in perturbed.values()])
        tokens, scores = case.draft_candidates(width)
        assert tokens == best
        np.testing.assert_allclose(scores, [scale * perturbed[token] - total for token in best], atol=1e-6)

    @settings(max_examples=100, deadline=None)
    @given(cases(), st.integers(1, 14))
    def test_banned_tokens_are_never_among_them(self, case: Case, width: int) -> None:
        banned = {token for token, z in enumerate(reference_adjusted(case)) if z == -math.inf}
        tokens, _ = case.draft_candidates(width)
        assert not banned & set(tokens)

    @pytest.mark.parametrize("vocabulary", [1000, 50_001])
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_of_a_large_vocabulary_the_256_best_are_looked_at(self, temperature: float, vocabulary: int) -> None:
        row = np.random.default_rng(5).normal(0, 3, vocabulary).astype(np.float32)
        row[-1] = 40.0  # beyond the last whole column
        best = np.argsort(-row, kind="stable")[:256]
        alone = np.full_like(row, -np.inf)
        alone[best] = row[best]
        for position in range(50):
            sampler = RequestSampler(Sampling(temperature=temperature, seed=1))
            tokens, scores = candidates(row, SamplingQuery(sampler, position), 8)
            assert len(tokens) == 8
            assert set(tokens) <= set(best.tolist())
            assert tokens[0] == choose_token(sampler, alone, position, None)
            assert scores == sorted(scores, reverse=True)
            assert max(scores) <= 0

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    @pytest.mark.parametrize("broken", [math.nan, math.inf])
    def test_a_broken_row_gives_none(self, temperature: float, broken: float) -> None:
        assert Case([0.0, broken, 1.0], Sampling(temperature=temperature, top_p=0.9)).draft_candidates(3) == ([], [])
