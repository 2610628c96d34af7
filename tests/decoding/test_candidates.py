"""Candidates of a whole pass equal those of each row alone, computed by a slow reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec.decoding.candidates import AGREEMENT_SCALE, QueriedRow, draft_candidates
from specdec.decoding.draft_logits import MAX_DRAFT_LOGITS, HostDraftLogits, MappedDraftLogits, shortlists
from specdec.decoding.processing import MAX_ABS_LOGIT, adjusted, tempered
from specdec.decoding.query import PenaltyState, RequestSampler, SamplingQuery
from specdec.decoding.sampling import PENALTIES, Sampling
from specdec.decoding.truncation import survivors
from tests.choices import gumbel, mask_of
from tests.examples import examples
from tests.samplings import samplings

TOLERANCE = 1e-12
"""Tolerance for logprobs: the reference sums the same float64 weights in another order."""

VOCABULARY = 400


def reference(logits: NDArray[np.float32], row: QueriedRow, width: int) -> tuple[list[int], list[float]]:
    """Return the candidates of one row, by the scalar functions of choices."""
    sampling = row.query.sampler.sampling
    raw = np.full(row.vocabulary, -np.inf, dtype=np.float32)
    raw[: len(logits)] = logits[: row.vocabulary]
    if not abs(raw.max()) < MAX_ABS_LOGIT:
        return [], []
    z = adjusted(raw[None], [row.query])[0]
    if z.max() == -math.inf:
        return [], []
    ids = np.sort(np.argsort(-z, kind="stable")[:MAX_DRAFT_LOGITS])
    z = z[ids]
    perturbed = z.astype(np.float64)
    if not sampling.greedy:
        z = tempered(z[None], [sampling])[0]
        kept = survivors(z, sampling)
        ids = ids[kept]
        perturbed = sampling.temperature * (z[kept] + gumbel(sampling.seed, row.query.position, ids))
    perturbed /= AGREEMENT_SCALE
    best = np.lexsort((ids, -perturbed))[:width]
    best = best[perturbed[best] > -np.inf]
    log_total = math.log(np.exp(perturbed - perturbed[best[0]]).sum()) + perturbed[best[0]]
    return ids[best].tolist(), (perturbed[best] - log_total).tolist()


@dataclass(frozen=True)
class Pass:
    logits: NDArray[np.float32]
    rows: list[QueriedRow]


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    """Passes over rows of every kind: coarse logits with many ties, broken rows, and any sampling parameters."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    columns = draw(st.sampled_from([3, 20, 256, VOCABULARY]))
    count = draw(st.integers(1, 6))
    step = draw(st.sampled_from([0.0, 0.5, 2.0])) if columns <= MAX_DRAFT_LOGITS else 0.0  # no ties for the last place
    logits = random.normal(0, 3, (count, columns)).astype(np.float32)
    if step:
        logits = np.round(logits / np.float32(step)) * np.float32(step)
    rows = []
    for index in range(count):
        if broken := draw(st.sampled_from([None] * 9 + [math.nan, -math.nan, math.inf, -math.inf, 1e31])):
            logits[index, slice(None) if broken == -math.inf else draw(st.integers(0, columns - 1))] = broken
        limits = [columns] * 6 + [max(1, columns // 2), columns + 5]
        vocabulary = draw(st.sampled_from(limits))
        rows.append(QueriedRow(index, draw(queries(vocabulary)), vocabulary))
    return Pass(logits, draw(st.permutations(rows)))


@st.composite
def queries(draw: st.DrawFn, vocabulary: int) -> SamplingQuery:
    tokens = st.integers(0, vocabulary - 1)
    top_k = st.sampled_from([0, 0, 1, 7, 255, 256, 300])
    sampling = draw(samplings(vocabulary, temperature=st.sampled_from([0.0, 1e-3, 0.8, 1.0, 2.5, 1e38]), top_k=top_k))
    if draw(st.booleans()):
        unprocessed = {name: getattr(Sampling(), name) for name in (*PENALTIES, "logit_bias", "banned_tokens")}
        return SamplingQuery(RequestSampler(replace(sampling, **unprocessed)), draw(st.integers(0, 99)))
    sampler = RequestSampler(sampling, draw(st.frozensets(tokens, max_size=2)), first_end_position=10)
    allowed = draw(st.none() | st.frozensets(tokens, min_size=1, max_size=5))
    mask = None if allowed is None else mask_of(allowed, vocabulary)
    state = PenaltyState(vocabulary, [0], [vocabulary - 1])
    return SamplingQuery(sampler, draw(st.integers(0, 99)), state, draw(st.lists(tokens, max_size=2)), allowed=mask)


@settings(max_examples=examples(120), deadline=None)
@given(passes(), st.integers(1, 9))
def test_each_row_has_the_candidates_that_it_has_alone(of: Pass, width: int) -> None:
    tokens, logprobs, sound = draft_candidates(HostDraftLogits(of.logits), of.rows, width)
    for row, own_tokens, own_logprobs, is_sound in zip(of.rows, tokens, logprobs, sound, strict=True):
        expected, of_expected = reference(of.logits[row.number], row, width)
        count = int(np.count_nonzero(own_logprobs > -np.inf))
        assert own_tokens[:count].tolist() == expected
        np.testing.assert_allclose(own_logprobs[:count], of_expected, rtol=TOLERANCE, atol=TOLERANCE)
        assert (own_logprobs[count:] == -np.inf).all()
        assert is_sound == (abs(of.logits[row.number, : row.vocabulary].max()) < MAX_ABS_LOGIT)


@pytest.mark.parametrize("vocabulary", [5, 256, 300, 20_000])
@pytest.mark.parametrize("step", [0.01, 4.0])
def test_a_shortlist_has_the_largest_logits_in_order(vocabulary: int, step: float) -> None:
    logits = np.random.default_rng(1).normal(0, 3, (3, vocabulary)).astype(np.float32)
    logits = np.round(logits / np.float32(step)) * np.float32(step)
    logits[1, ::2] = -np.inf
    logits[2, vocabulary // 2] = -np.nan  # what inf - inf is on x86
    values, ids = shortlists(list(logits))
    assert ids[2, 0] == vocabulary // 2
    for row, own_values, own_ids in zip(logits, values, ids, strict=True):
        ranked = np.argsort(np.where(np.isnan(row), -np.inf, -row), kind="stable")[:MAX_DRAFT_LOGITS]
        np.testing.assert_array_equal(own_values, row[ranked])
        np.testing.assert_array_equal(row[own_ids], own_values)
        last = own_values[-1]
        inside = own_values > last
        assert own_ids[inside].tolist() == ranked[inside].tolist()
        assert len(set(own_ids.tolist())) == len(own_ids)


@pytest.mark.parametrize("known", [40, 300])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_part_of_a_vocabulary_has_the_candidates_of_the_whole_without_the_others(
    known: int, temperature: float
) -> None:
    random = np.random.default_rng(known)
    ids = np.sort(random.permutation(VOCABULARY)[:known])
    part = random.normal(size=(6, known)).astype(np.float32)
    whole = np.full((6, VOCABULARY), -np.inf, dtype=np.float32)
    whole[:, ids] = part
    biased = Sampling(temperature=temperature, seed=3, logit_bias={int(ids[5]): 2.0}, banned_tokens=frozenset({3}))
    samplings = [Sampling(temperature=temperature, seed=4), biased]
    rows = [
        QueriedRow(row, SamplingQuery(RequestSampler(samplings[row % 2]), row, allowed=mask), VOCABULARY)
        for row, mask in enumerate([None, None, None, None, mask_of(ids[:20].tolist(), VOCABULARY), None])
    ]
    got = draft_candidates(MappedDraftLogits(HostDraftLogits(part), ids, VOCABULARY), rows, 8)
    want = draft_candidates(HostDraftLogits(whole), rows, 8)
    assert np.array_equal(got.sound, want.sound)
    found = want.logprobs > -np.inf
    assert found.any(axis=1).all()
    assert np.array_equal(got.tokens[found], want.tokens[found])
    np.testing.assert_allclose(got.logprobs[found], want.logprobs[found], atol=1e-9)
    assert (got.logprobs[~found] == -np.inf).all()
