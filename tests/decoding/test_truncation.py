"""Survivors of truncation, found from each row's largest logits alone, for many rows together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TypicalLogitsWarper

from specdec.decoding.sampling import Sampling
from specdec.decoding.truncation import survivors, survivors_of_largest
from tests.samplings import samplings

truncating = samplings(50, top_k=st.sampled_from([0, 0, 1, 3, 20, 100]))


@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 7, 50]),
    st.sampled_from([1, 4, 16, 50]),
    st.lists(st.tuples(truncating, st.booleans(), st.booleans()), min_size=1, max_size=8),
)
def test_the_leading_logits_tell_who_survives(
    seed: int, vocabulary: int, known: int, rows: list[tuple[Sampling, bool, bool]]
) -> None:
    """The result is either exact or "too few known". Rounded rows have ties, and banned ids may be -inf."""
    random, known = np.random.default_rng(seed), min(known, vocabulary)
    logits = 3 * random.normal(size=(len(rows), vocabulary)).astype(np.float32)
    for row, (_, rounded, banned) in enumerate(rows):
        if rounded:
            logits[row] = np.round(logits[row])
        if banned:
            logits[row, random.permutation(vocabulary)[1:][: vocabulary // 2]] = -np.inf
    shuffled = random.permutation(vocabulary)  # ties in any order
    order = shuffled[np.argsort(-logits[:, shuffled], axis=1, kind="stable")][:, :known]
    z = np.take_along_axis(logits, order, axis=1)
    totals = np.array([np.exp(row - row.max()).sum(dtype=np.float64) for row in logits])
    kept = survivors_of_largest(z, order, totals, vocabulary, [sampling for sampling, _, _ in rows])
    for row, (sampling, _, _) in enumerate(rows):
        want: Any = survivors(logits[row], sampling)
        if kept[row].any():
            assert sorted(order[row, kept[row]]) == want.tolist()
        elif sampling.top_p == 1.0 or not known < sampling.top_k < vocabulary:  # else top-p's total is unknown
            want = survivors(logits[row], replace(sampling, typical_p=1.0))
            # An unknown logit may survive, or equal a surviving one.
            assert len(want) >= known or logits[row, want].min() <= z[row, -1]


@given(st.integers(0, 2**32), st.sampled_from([2, 30, 3000]), st.floats(0.01, 0.99), st.sampled_from([0.1, 1.0, 5.0]))
def test_typical_tokens_are_those_of_transformers(seed: int, vocabulary: int, mass: float, spread: float) -> None:
    z = (spread * np.random.default_rng(seed).normal(size=vocabulary)).astype(np.float32)
    theirs = TypicalLogitsWarper(mass)(torch.zeros(1, 0), torch.from_numpy(z[None].astype(np.float64)))
    kept = survivors(z, Sampling(temperature=1.0, typical_p=mass))
    assert kept.tolist() == np.flatnonzero(np.isfinite(theirs[0].numpy())).tolist()


@pytest.mark.parametrize(("mass", "kept"), [(0.1, [1]), (0.5, [1, 2, 3, 4, 5]), (0.7, [0, 1, 2, 3, 4, 5])])
def test_typical_p_may_remove_the_most_probable_token(mass: float, kept: list[int]) -> None:
    """The entropy is 1.64 nats: surprisals of 2.12 are closer to it than the 0.92 of the most probable token."""
    z = np.log(np.array([0.4, 0.12, 0.12, 0.12, 0.12, 0.12], dtype=np.float32))
    assert survivors(z, Sampling(temperature=1.0, typical_p=mass)).tolist() == kept
