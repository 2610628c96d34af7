"""Proves that the shared noise is the specified function, and fit for sampling.

Words, streams and sample seeds equal a splitmix64 written here from its publication, so that other implementations
(torch, another language) can be compared with the same numbers. The noise is finite, follows the Gumbel
distribution, does not depend on the other ids computed with it, and is uncorrelated across neighbouring seeds,
positions and ids. The statistical tests run on fixed seeds: they are deterministic, and their stated false-alarm
probability is over the choice of seeds, made once, not per run.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from specdec.decoding.noise import mix, sample_seed, stream, token_words, word_gumbel
from tests.choices import gumbel, words

MASK = 2**64 - 1
DOMAIN = 0x63686F6963650001
"""Domain constant of the choice rule, fixed for good: changing it would change every sampled text."""
FALSE_ALARM = 1e-6

seeds = st.integers(0, MASK)
positions = st.integers(0, 2**31)
ids = st.integers(0, 2**20)


def reference_mix(state: int) -> int:
    """Return the first output of a splitmix64 generator in `state`, after https://prng.di.unimi.it/splitmix64.c."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def reference_word(seed: int, position: int, token: int) -> int:
    """Return h = mix(mix(mix(seed ^ DOMAIN) + pos) + v)."""
    inner = reference_mix(seed ^ DOMAIN)
    return reference_mix((reference_mix((inner + position) % 2**64) + token) % 2**64)


def unmix(output: int) -> int:
    """Return the state that `reference_mix` maps to `output`."""

    def unshift(value: int, bits: int) -> int:
        """Return the x with x ^ (x >> bits) == value: every round corrects `bits` more high bits."""
        x = value
        for _ in range(64 // bits):
            x = value ^ (x >> bits)
        return x

    z = unshift(output, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    z = unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return (unshift(z, 30) - 0x9E3779B97F4A7C15) % 2**64


def reference_gumbel(seed: int, position: int, token: int) -> float:
    uniform = ((reference_word(seed, position, token) >> 12) + 0.5) * 2.0**-52
    return -math.log(-math.log(uniform))


def grid(first_seed: int, seed_count: int, position_count: int, vocabulary: int) -> NDArray[np.float64]:
    """Return noise [seed, position, id] of consecutive seeds, positions and ids."""
    every = np.arange(vocabulary)
    rows = [
        [gumbel(first_seed + seed, position, every) for position in range(position_count)] for seed in range(seed_count)
    ]
    return np.array(rows)


class TestWords:
    @pytest.mark.parametrize(
        ("state", "output"),
        [(0, 0xE220A8397B1DCDAF), (1234567, 6457827717110365317)],
    )
    def test_mix_gives_the_published_outputs(self, state: int, output: int) -> None:
        assert mix(state) == reference_mix(state) == output

    @given(seed=seeds, position=positions, tokens=st.lists(ids, max_size=20))
    def test_words_equal_the_reference(self, seed: int, position: int, tokens: list[int]) -> None:
        got = words(seed, position, np.array(tokens, dtype=np.int64))
        assert got.dtype == np.uint64
        assert got.tolist() == [reference_word(seed, position, token) for token in tokens]

    @given(seed=seeds, position=positions)
    def test_stream_equals_the_reference(self, seed: int, position: int) -> None:
        assert stream(seed, position) == reference_mix((reference_mix(seed ^ DOMAIN) + position) % 2**64)

    @given(seed=seeds, index=st.integers(0, 1000))
    def test_sample_seed_equals_the_reference(self, seed: int, index: int) -> None:
        assert sample_seed(seed, index) == reference_mix((reference_mix(seed) + index) % 2**64)

    def test_samples_of_neighbouring_seeds_have_seeds_of_their_own(self) -> None:
        found = {sample_seed(seed, index) for seed in range(100) for index in range(100)}
        assert len(found) == 10_000


class TestGumbel:
    @given(seed=seeds, position=positions, tokens=st.lists(ids, min_size=1, max_size=20))
    def test_noise_equals_the_reference_to_a_few_ulps(self, seed: int, position: int, tokens: list[int]) -> None:
        got = gumbel(seed, position, np.array(tokens, dtype=np.int64))
        assert got.dtype == np.float64
        want = [reference_gumbel(seed, position, token) for token in tokens]
        np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-15)

    @given(seed=seeds, position=positions, tokens=st.lists(ids, min_size=1, max_size=50), data=st.data())
    def test_any_subset_of_ids_gives_the_same_bits(
        self, seed: int, position: int, tokens: list[int], data: st.DataObject
    ) -> None:
        every = gumbel(seed, position, np.array(tokens, dtype=np.int64))
        chosen = data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=20))
        some = gumbel(seed, position, np.array([tokens[i] for i in chosen], dtype=np.int64))
        assert some.tobytes() == every[chosen].tobytes()

    @pytest.mark.parametrize("word", [0, 1 << 12, MASK >> 1, MASK - (1 << 12), MASK])
    def test_the_extreme_words_give_finite_noise(self, word: int) -> None:
        """Few seeds give a token the smallest or largest words; inverting `mix` finds one."""
        position, token = 17, 5
        inner = (unmix((unmix(word) - token) % 2**64) - position) % 2**64
        seed = unmix(inner) ^ DOMAIN
        one = np.array([token])
        assert words(seed, position, one).tolist() == [word]
        assert np.isfinite(gumbel(seed, position, one)).all()

    def test_noise_is_finite(self) -> None:
        assert np.isfinite(grid(0, 10, 10, 1000)).all()

    @pytest.mark.parametrize("seed", [0, 1, 12345, MASK])
    def test_noise_follows_the_gumbel_distribution(self, seed: int) -> None:
        """Kolmogorov-Smirnov over 60 positions of 500 ids; false alarm 1e-6 for each seed."""
        every = np.arange(500)
        sample = np.concatenate([gumbel(seed, position, every) for position in range(60)])
        assert stats.kstest(sample, "gumbel_r").pvalue > FALSE_ALARM

    @pytest.mark.parametrize("axis", ["seed", "position", "id"])
    def test_noise_follows_it_along_every_axis_alone(self, axis: str) -> None:
        """As above, with the other two arguments fixed: 20 000 neighbours along one axis."""
        neighbours = range(20_000)
        one = np.array([5])
        if axis == "seed":
            sample = np.array([gumbel(seed, 9, one)[0] for seed in neighbours])
        elif axis == "position":
            sample = np.array([gumbel(3, position, one)[0] for position in neighbours])
        else:
            sample = gumbel(3, 9, np.arange(len(neighbours)))
        assert stats.kstest(sample, "gumbel_r").pvalue > FALSE_ALARM


class TestIndependence:
    def test_neighbouring_seeds_positions_and_ids_are_uncorrelated(self) -> None:
        """All shifts by up to 3 along each axis, including seed against position.

        If the arguments entered as one linear combination, some shift would be an exact copy (correlation 1).
        The correlation of n uncorrelated pairs has the standard deviation 1/sqrt(n). The bound is 6.5 of these: the
        probability of a false alarm is 1e-10 per shift and below 1e-7 for all of them.
        """
        noise = grid(1_000_000, 24, 24, 64)
        for shift in itertools.product(range(-3, 4), repeat=3):
            if shift <= (0, 0, 0):
                continue  # test only one of two mirrored shifts
            here = noise[tuple(slice(max(0, -s), noise.shape[a] - max(0, s)) for a, s in enumerate(shift))]
            there = noise[tuple(slice(max(0, s), noise.shape[a] - max(0, -s)) for a, s in enumerate(shift))]
            correlation = np.corrcoef(here.ravel(), there.ravel())[0, 1]
            assert abs(correlation) < 6.5 / math.sqrt(here.size), shift

    @settings(max_examples=30)
    @given(bit=st.integers(0, 63), seed=seeds)
    def test_flipping_one_bit_of_the_seed_changes_half_of_every_word(self, bit: int, seed: int) -> None:
        """2000 words of 64 bits: the share of flipped bits is 1/2 with a standard deviation of 0.0014."""
        every = np.arange(2000)
        changed = words(seed, 0, every) ^ words(seed ^ (1 << bit), 0, every)
        share = float(np.unpackbits(changed.view(np.uint8)).mean())
        assert abs(share - 0.5) < 7 * 0.5 / math.sqrt(2000 * 64)

    def test_no_word_of_a_seed_occurs_in_another(self) -> None:
        every = np.arange(256)
        found = np.concatenate([words(seed, position, every) for seed in range(20) for position in range(20)])
        assert len(np.unique(found)) == len(found)


class TestManyStreams:
    @given(st.lists(st.tuples(seeds, positions), min_size=1, max_size=5), st.lists(ids, min_size=1, max_size=20))
    def test_each_stream_has_the_words_it_has_alone(self, of: list[tuple[int, int]], tokens: list[int]) -> None:
        """For all ids of every stream, and for one id of each."""
        some = np.array(tokens, dtype=np.int64)
        streams = np.array([stream(seed, position) for seed, position in of], dtype=np.uint64)
        want = np.array([words(seed, position, some) for seed, position in of])
        assert token_words(streams[:, None], some).tolist() == want.tolist()
        assert token_words(streams, np.full(len(of), tokens[0])).tolist() == want[:, 0].tolist()
        assert word_gumbel(want[0]).tobytes() == gumbel(*of[0], some).tobytes()
