"""The papers' measures, against values by hand and by definition."""

from __future__ import annotations

import itertools
import math
import operator
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.measures import (
    conditional_acceptance,
    diversity,
    equal_tokens,
    mean_accepted_tokens,
    median_ratio,
    merged,
    ratio_of_means,
    spread,
    survival,
    words,
)

RATES = st.dictionaries(st.integers(0, 9), st.floats(0.1, 1e4), min_size=1)
HISTOGRAMS = st.lists(st.integers(0, 50), max_size=8)
TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=4)


def test_the_speed_up_is_a_ratio_of_means_and_no_mean_of_ratios() -> None:
    mine, plain = {"a": 40.0, "b": 15.0, "c": 30.0}, {"a": 20.0, "b": 5.0, "c": 25.0}
    assert ratio_of_means(mine, plain) == pytest.approx(85 / 50)
    assert median_ratio(mine, plain) == 2.0
    assert statistics.fmean(mine[key] / plain[key] for key in mine) == pytest.approx(2.0666, abs=1e-4)


def test_only_questions_that_both_answered_are_compared() -> None:
    assert ratio_of_means({"a": 4.0, "b": 100.0}, {"a": 2.0, "c": 1.0}) == 2.0
    assert median_ratio({"a": 4.0, "b": 100.0}, {"a": 2.0, "c": 1.0}) == 2.0
    assert ratio_of_means({"a": 4.0}, {}) is None
    assert median_ratio({}, {"a": 4.0}) is None


@given(RATES, st.floats(0.1, 10.0))
def test_a_method_that_is_faster_everywhere_by_a_factor_has_this_speed_up(
    plain: dict[int, float], factor: float
) -> None:
    mine = {key: factor * rate for key, rate in plain.items()}
    assert ratio_of_means(mine, plain) == pytest.approx(factor)
    assert median_ratio(mine, plain) == pytest.approx(factor)


@given(RATES, RATES)
def test_speed_ups_lie_between_the_least_and_the_most_of_a_question(
    mine: dict[int, float], plain: dict[int, float]
) -> None:
    ratios = [mine[key] / plain[key] for key in mine.keys() & plain.keys()]
    for found in (ratio_of_means(mine, plain), median_ratio(mine, plain)):
        assert (found is None) == (not ratios)
        if found is not None:
            assert min(ratios) * (1 - 1e-9) <= found <= max(ratios) * (1 + 1e-9)


def test_the_spread_is_that_of_a_sample() -> None:
    assert spread([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert spread([1.5]) == (1.5, None)


def test_accepted_tokens_by_hand() -> None:
    """Of ten steps, five accept no candidate, three accept 1 and two accept 2; each adds the target's own token."""
    histogram = [5, 3, 2]
    assert mean_accepted_tokens(10 + 3 + 2 * 2, 10) == 1.7
    assert survival(histogram) == [0.5, 0.2]
    assert conditional_acceptance(histogram) == [0.5, 0.4]
    assert mean_accepted_tokens(0, 0) is None


def test_plain_decoding_accepts_nothing() -> None:
    assert mean_accepted_tokens(12, 12) == 1.0
    assert survival([12]) == conditional_acceptance([12]) == []
    assert survival([]) == conditional_acceptance([]) == []


@given(HISTOGRAMS)
def test_acceptance_is_the_product_of_the_conditional_ones(histogram: list[int]) -> None:
    chances, rates = survival(histogram), conditional_acceptance(histogram)
    assert list(itertools.accumulate(rates, operator.mul)) == pytest.approx(chances)
    assert all(0 < rate <= 1 for rate in rates)
    accepted, steps = sum(k * count for k, count in enumerate(histogram)), sum(histogram)
    if steps:
        assert 1 + sum(chances) == pytest.approx(mean_accepted_tokens(accepted + steps, steps))


@given(st.lists(HISTOGRAMS, max_size=4))
def test_merged_histograms_have_all_steps(histograms: list[list[int]]) -> None:
    found = merged(histograms)
    assert sum(found) == sum(map(sum, histograms))
    assert len(found) == max(map(len, histograms), default=0)
    assert merged([*histograms, []]) == found


def test_equal_tokens_by_hand() -> None:
    assert equal_tokens([[1, 2, 3]], [[1, 2, 3]]) == (3, 3)
    assert equal_tokens([[1, 9, 3]], [[1, 2, 3]]) == (3, 2)
    assert equal_tokens([[1, 2]], [[1, 2, 3], [4]]) == (4, 2)
    assert equal_tokens([], []) == (0, 0)


@given(TEXTS, TEXTS)
def test_tokens_are_all_equal_only_in_equal_texts(mine: list[list[int]], plain: list[list[int]]) -> None:
    compared, equal = equal_tokens(mine, plain)
    assert equal_tokens(plain, mine) == (compared, equal)
    assert 0 <= equal <= compared
    turns = max(len(mine), len(plain))
    padded = [[*texts, *[[]] * (turns - len(texts))] for texts in (mine, plain)]
    assert (equal == compared) == (padded[0] == padded[1])


def test_words_are_written_as_they_are() -> None:
    assert words("def f(x_1): return x_1, 'Ünïcode 東京'") == ["def", "f", "x_1", "return", "x_1", "Ünïcode", "東京"]
    assert words(" .,; \n") == []


def test_diversity_is_a_mean_over_texts() -> None:
    found = diversity(["a b a b", "a b c d"])
    assert found["entropy 1"] == pytest.approx((1.0 + 2.0) / 2)
    assert found["distinct 1"] == pytest.approx((0.5 + 1.0) / 2)
    assert found["distinct 2"] == pytest.approx((2 / 3 + 1.0) / 2)
    assert found["entropy 3"] == pytest.approx((1.0 + 1.0) / 2)
    assert diversity(["a"])["entropy 2"] == 0.0


@given(st.lists(st.sampled_from(["red", "green", "blue"]), min_size=3, max_size=20))
def test_a_repeated_text_is_less_diverse(text: list[str]) -> None:
    once, twice = diversity([" ".join(text)]), diversity([" ".join([*text, *text])])
    assert twice["distinct 1"] == pytest.approx(once["distinct 1"] / 2)
    assert twice["entropy 1"] == pytest.approx(once["entropy 1"])
    assert once["entropy 1"] <= math.log2(3) + 1e-9
