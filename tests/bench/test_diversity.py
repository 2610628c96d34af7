"""N-gram measures, against values by hand and by definition."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.diversity import distinct, entropy, ngrams

TEXTS = st.lists(st.integers(0, 5), max_size=40)


def test_by_hand() -> None:
    text = [1, 2, 1, 2, 1]
    assert ngrams(text, 2) == [(1, 2), (2, 1), (1, 2), (2, 1)]
    assert entropy(text, 2) == 1.0
    assert distinct(text, 2) == 0.5
    assert entropy(text, 1) == pytest.approx(-0.6 * math.log2(0.6) - 0.4 * math.log2(0.4))
    assert distinct(text, 1) == 0.4


def test_a_text_too_short_for_any() -> None:
    assert ngrams([1], 2) == []
    assert entropy([1], 2) == distinct([1], 2) == 0


@given(TEXTS, st.integers(1, 3))
def test_bounds(text: list[int], n: int) -> None:
    count = len(ngrams(text, n))
    assert count == max(0, len(text) - n + 1)
    assert 0 <= entropy(text, n) <= math.log2(max(1, count)) + 1e-9
    if count:
        assert 1 / count <= distinct(text, n) <= 1


@given(TEXTS, st.permutations(range(6)), st.integers(1, 3))
def test_names_of_tokens_do_not_matter(text: list[int], names: list[int], n: int) -> None:
    renamed = [names[token] for token in text]
    assert distinct(renamed, n) == distinct(text, n)
    assert entropy(renamed, n) == pytest.approx(entropy(text, n))
