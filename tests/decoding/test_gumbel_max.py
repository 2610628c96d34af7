"""Proves that pruning in the Gumbel-max choice loses no winner: bounds hold, and pruned tokens lose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec.decoding.gumbel_pruning import BOUND_ERROR, ROOM, bounds, possible_winners
from specdec.decoding.noise import stream, token_words, winners, word_gumbel
from tests.decoding.test_noise import unmix

MASK = 2**64 - 1
WORDS = sorted({0, 1, MASK, *(s for bit in range(64) for s in (1 << bit, (1 << bit) - 1, MASK - (1 << bit)))})
"""Hash words on every scale, some near the two ends of the range."""


def bound(value: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return the bound on the noise of these words, each as the word of its stream's first token."""
    return of_streams(np.array([unmix(word) for word in value.tolist()], dtype=np.uint64), 1)[:, 0]


def of_streams(streams: NDArray[np.uint64], vocabulary: int) -> NDArray[np.float64]:
    out = np.empty((len(streams), vocabulary), dtype=np.float32)
    for row, each in zip(out, streams, strict=True):
        bounds(np.zeros_like(row), np.float32(1.0), each, row)
    return out.astype(np.float64)


def ones(z: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.ones(len(z), dtype=np.float32)


def won(z: NDArray[np.float32], streams: NDArray[np.uint64], possible: NDArray[np.int64]) -> list[int]:
    return list(winners(z.ravel()[possible], possible, z.shape[1], streams).tolist())


def scores(z: NDArray[np.float32], streams: NDArray[np.uint64]) -> NDArray[np.float64]:
    return np.asarray(z + word_gumbel(token_words(streams[:, None], np.arange(z.shape[1]))))


class TestBound:
    @settings(max_examples=300)
    @given(st.lists(st.integers(0, MASK) | st.sampled_from(WORDS), min_size=1, max_size=50))
    def test_the_noise_is_never_above_it(self, some: list[int]) -> None:
        value = np.array(some, dtype=np.uint64)
        assert (word_gumbel(value) <= bound(value) + BOUND_ERROR / 4).all()

    def test_nor_for_the_extreme_words(self) -> None:
        value = np.array(WORDS, dtype=np.uint64)
        assert np.isfinite(bound(value)).all()
        assert (word_gumbel(value) <= bound(value) + BOUND_ERROR / 4).all()

    def test_it_is_close_where_the_noise_is_large(self) -> None:
        streams, ids = np.array([stream(1, 2)], dtype=np.uint64), np.arange(100_000)
        noise = word_gumbel(token_words(streams, ids))
        over = of_streams(streams, len(ids))[0] - noise
        assert over[noise > 3].max() < 0.09


class TestPruning:
    @pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 1e5, 1e25])
    @pytest.mark.parametrize("vocabulary", [1, 2, 300, 4096])
    def test_the_winner_is_among_few_possible_ones(self, scale: float, vocabulary: int) -> None:
        rng = np.random.default_rng(vocabulary)
        z = (rng.normal(0, 1, (64, vocabulary)) * scale).astype(np.float32)
        z[:, rng.integers(1, vocabulary + 1, 3) - 1] = np.float32(scale)  # ties, often for the largest logit
        z[3::4, 1:] = -np.inf
        streams = np.array([stream(seed, 5) for seed in range(len(z))], dtype=np.uint64)
        possible = possible_winners(z, ones(z), streams)
        want = scores(z, streams).argmax(axis=1)
        assert set((np.arange(len(z)) * vocabulary + want).tolist()) <= set(possible.tolist())
        assert won(z, streams, possible) == want.tolist()
        assert len(possible) < 4 * len(z)

    def test_temperatures_divide_each_row_by_its_own(self) -> None:
        z = np.random.default_rng(1).normal(0, 3, (5, 1000)).astype(np.float32)
        temperatures = np.array([0.1, 0.7, 1.0, 1.3, 50.0], dtype=np.float32)
        streams = np.arange(5, dtype=np.uint64)
        possible = possible_winners(z, temperatures, streams)
        assert possible.tolist() == possible_winners(z / temperatures[:, None], ones(z), streams).tolist()
        assert possible.tolist() != possible_winners(z, ones(z), streams).tolist()

    def test_there_may_be_more_possible_winners_than_there_is_room_for_at_first(self) -> None:
        """With logits so large that rounding absorbs the noise."""
        z = np.full((3, 300), 1e7, dtype=np.float32)
        streams = np.arange(3, dtype=np.uint64)
        possible = possible_winners(z, ones(z), streams)
        assert len(possible) > ROOM * len(z)
        assert won(z, streams, possible) == scores(z, streams).argmax(axis=1).tolist()

    @pytest.mark.parametrize("level", [0.0, 3.3, 1e6])
    def test_rounding_of_the_bound_loses_no_winner(self, level: float) -> None:
        """Noise so large that its bound is exact except for rounding, in a row without other candidates."""
        rng = np.random.default_rng(0)
        large = [MASK - (int(rng.integers(2**20)) << int(rng.integers(44))) for _ in range(2000)]
        streams = np.array([unmix(word) for word in large], dtype=np.uint64)
        assert token_words(streams, np.zeros(2000, dtype=np.int64)).tolist() == large
        z = np.full((2000, 2), level, dtype=np.float32)
        z[:, 1] = -np.inf
        assert won(z, streams, possible_winners(z, ones(z), streams)) == [0] * 2000

    @settings(max_examples=200, deadline=None)
    @given(st.data(), st.integers(1, 6), st.integers(1, 8))
    def test_the_lowest_id_wins_among_equal_runners(self, data: st.DataObject, count: int, vocabulary: int) -> None:
        """At 1e30 rounding absorbs the noise: equal logits give equal scores."""
        cell = st.sampled_from([1e30, -1e30])
        z = np.array([[data.draw(cell) for _ in range(vocabulary)] for _ in range(count)], dtype=np.float32)
        streams = np.arange(count, dtype=np.uint64)
        assert won(z, streams, np.arange(z.size)) == z.argmax(axis=1).tolist()


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, MASK), st.booleans())
def test_the_order_of_a_rows_ids_does_not_matter(rows: int, vocabulary: int, seed: int, ties: bool) -> None:
    """`ties`: large logits absorb the noise, all scores are equal, and the lowest id wins."""
    random = np.random.default_rng(seed)
    z = np.full((rows, vocabulary), 1e30, dtype=np.float32)
    if not ties:
        z = random.normal(size=z.shape).astype(np.float32)
    streams = random.integers(0, MASK, rows, dtype=np.uint64)
    ascending = np.arange(z.size)
    mixed = np.concatenate([random.permutation(row) for row in ascending.reshape(rows, vocabulary)])
    assert won(z, streams, mixed) == won(z, streams, ascending) == scores(z, streams).argmax(axis=1).tolist()
