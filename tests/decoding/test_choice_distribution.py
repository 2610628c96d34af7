"""Choices follow their softmax, and two models with shared noise agree as often as the theory promises.

The chi-square tests are deterministic, on fixed seeds; false-alarm probabilities are over the choice of seeds.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import special, stats

from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from tests.choices import choose_tokens
from tests.decoding.choice_reference import Case, reference_adjusted, reference_survivors

FALSE_ALARM = 1e-6
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
            Sampling(temperature=1.0, typical_p=0.6),
            Sampling(temperature=0.8, top_k=8, top_p=0.95, min_p=0.05, repetition_penalty=1.3, presence_penalty=0.4),
        ],
        ids=["plain", "top-k", "top-p", "min-p", "typical-p", "everything"],
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
