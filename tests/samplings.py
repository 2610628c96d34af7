"""Sampling parameters for property tests: all of them vary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from specdec.decoding.sampling import Sampling

VALUES: Mapping[str, st.SearchStrategy[float]] = {
    "repetition_penalty": st.just(1.0) | st.sampled_from([0.5, 1.1, 2.0]),
    "frequency_penalty": st.just(0.0) | st.sampled_from([-0.5, 0.1, 0.5]),
    "presence_penalty": st.just(0.0) | st.sampled_from([-0.5, 0.1, 0.5]),
    "temperature": st.sampled_from([0.0, 5e-5, 1e-4, 0.3, 0.7, 1.0, 2.5, 1e30]),
    "top_k": st.just(0) | st.integers(1, 14),
    "top_p": st.just(1.0) | st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.75, 0.9]) | st.floats(1e-3, 1.0),
    "min_p": st.just(0.0) | st.sampled_from([0.01, 0.1, 0.5, 0.99, 1.0]),
    "typical_p": st.just(1.0) | st.sampled_from([0.1, 0.5, 0.9]) | st.floats(1e-3, 1.0),
}
"""For each of `NUMBERS`, its values in property tests."""

BIASES = st.integers(-8, 8).map(lambda half: half / 2) | st.sampled_from([-100.0, 100.0])


def samplings(vocabulary: int, **values: st.SearchStrategy[Any]) -> st.SearchStrategy[Sampling]:
    """Return sampling parameters for a vocabulary; `values` replace those of `VALUES`."""
    token = st.integers(0, vocabulary - 1)
    usual: dict[str, st.SearchStrategy[Any]] = {
        "logit_bias": st.just({}) | st.dictionaries(token, BIASES),
        "banned_tokens": st.just(frozenset()) | st.frozensets(token),
        "seed": st.integers(0, 2**64 - 1),
    }
    return st.builds(Sampling, **usual | dict(VALUES) | values)
