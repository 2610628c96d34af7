"""Proves that logprobs come from the raw logits, row by row, and that the top tokens are exact."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from specdec.decoding.logprobs import log_softmax, logprobs
from tests.examples import examples

values = st.floats(-1e4, 1e4, width=32) | st.integers(-3, 3).map(float) | st.just(-math.inf)


@settings(deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20))
def test_log_softmax(logits: list[float]) -> None:
    got = log_softmax(np.array(logits, dtype=np.float32))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, special.log_softmax(np.array(logits)), rtol=1e-6, atol=1e-6)


def test_an_almost_certain_token_keeps_its_small_log_probability() -> None:
    logits = np.array([20.0, 0.0, -1.0], dtype=np.float32)
    rest = math.exp(-20) + math.exp(-21)
    np.testing.assert_allclose(log_softmax(logits)[0], -math.log1p(rest), rtol=1e-6)


@settings(max_examples=examples(100), deadline=None)
@given(st.data(), st.integers(1, 12), st.integers(1, 5))
def test_rows_equal_a_plain_sort_and_each_row_alone(data: st.DataObject, vocabulary: int, count: int) -> None:
    row = st.lists(values, min_size=vocabulary, max_size=vocabulary).filter(lambda row: max(row) > -math.inf)
    logits = np.array(data.draw(st.lists(row, min_size=count, max_size=count)), dtype=np.float32)
    tokens = np.array(data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=count, max_size=count)))
    tops = data.draw(st.lists(st.integers(0, vocabulary + 2), min_size=count, max_size=count))
    got = logprobs(logits, tokens, tops)
    for i, (found, top) in enumerate(zip(got, tops, strict=True)):
        want = log_softmax(logits[i])
        assert found.chosen == want[tokens[i]]
        assert found.rank == 1 + sum(logits[i] > logits[i, tokens[i]])
        assert found.top_tokens == sorted(range(vocabulary), key=lambda v: (-logits[i, v], v))[:top]
        assert found.top_logprobs == want[found.top_tokens].tolist()
        assert logprobs(logits[i : i + 1], tokens[i : i + 1], [top]) == [found]


def test_a_row_does_not_depend_on_the_others_at_real_size() -> None:
    logits = np.random.default_rng(1).normal(0, 4, (7, 5003)).astype(np.float32)
    tokens, tops = np.arange(7), [0, 1, 20, 5, 0, 3, 20]
    alone = [logprobs(logits[i : i + 1], tokens[i : i + 1], [tops[i]])[0] for i in range(7)]
    assert logprobs(logits, tokens, tops) == alone


def test_a_broken_row_raises_nothing_and_disturbs_nobody() -> None:
    logits = np.array([[0.0, 1.0], [math.nan, 1.0], [math.inf, 0.0], [-math.inf, -math.inf]], dtype=np.float32)
    got = logprobs(logits, np.zeros(4, dtype=np.int64), [1, 1, 1, 1])
    assert got[0] == logprobs(logits[:1], np.zeros(1, dtype=np.int64), [1])[0]
    assert not any(math.isfinite(row.chosen) for row in got[1:])
