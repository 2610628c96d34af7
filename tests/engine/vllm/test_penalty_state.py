"""Penalty states go to vLLM's workers with each step, as a text's tokens instead of a vector over the vocabulary."""

from __future__ import annotations

import copy
import pickle

import numpy as np

from specdec.decoding.query import PenaltyState

VOCABULARY = 150_000


def test_a_state_is_sent_as_the_tokens_that_it_holds() -> None:
    state = PenaltyState(VOCABULARY, [5, 7, 7], [9, 9, 149_999])
    sent = pickle.dumps(state)
    assert len(sent) < 2000
    for got in (pickle.loads(sent), copy.deepcopy(state)):
        assert np.array_equal(got.seen, state.seen)
        assert np.array_equal(got.output_counts, state.output_counts)
        assert (got.seen.dtype, got.output_counts.dtype) == (state.seen.dtype, state.output_counts.dtype)
        got.extend([9])
        assert got.output_counts[9] == 3
    assert state.output_counts[9] == 2
