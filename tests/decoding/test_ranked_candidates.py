"""`draft_candidates` ranks by what `choose` maximises."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from specdec.decoding.candidates import AGREEMENT_SCALE
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from tests.choices import candidates, choose_token
from tests.decoding.choice_reference import Case, cases, reference_adjusted, reference_perturbed
from tests.examples import examples


class TestDraftCandidates:
    @settings(max_examples=examples(80), deadline=None)
    @given(cases(), st.integers(1, 14))
    def test_the_first_is_the_choice_and_the_rest_descend(self, case: Case, width: int) -> None:
        tokens, scores = case.draft_candidates(width)
        assert tokens[0] == case.choose()
        assert len(tokens) == len(scores) == len(set(tokens)) <= width
        assert all(-math.inf < score <= 0 for score in scores)
        assert scores == sorted(scores, reverse=True)

    @settings(max_examples=examples(50), deadline=None)
    @given(cases(temperatures=(0.0, 0.7, 1.0, 2.5)), st.integers(1, 14))
    def test_they_rank_the_perturbed_logits_of_the_survivors(self, case: Case, width: int) -> None:
        """The logits are those before the division by T, on the scale that decides agreement."""
        greedy = case.sampling.temperature < 1e-4
        perturbed = reference_perturbed(case)
        best = sorted(perturbed, key=lambda token: (-perturbed[token], token))[:width]
        scale = (1.0 if greedy else case.sampling.temperature) / AGREEMENT_SCALE
        total = special.logsumexp([scale * z for z in perturbed.values()])
        tokens, scores = case.draft_candidates(width)
        assert tokens == best
        np.testing.assert_allclose(scores, [scale * perturbed[token] - total for token in best], atol=1e-6)

    @settings(max_examples=examples(50), deadline=None)
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
