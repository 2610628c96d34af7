"""Gumbel noise that both models share: a pure function of (seed, position, token id).

Counter-based, so that it can be computed for any subset of ids, in any order, on any machine. Adding
it to processed logits and taking the argmax samples from their softmax (Gumbel 1954; Maddison et al.
2014); two models that add the *same* noise tend to choose the same token (Daliri, Musco, Suresh 2024).

`specdec.engine.torch_noise` computes the same words in torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DOMAIN_CHOICE = 0x63686F6963650001
"""Separates the noise of the choice rule from any other use of a request's seed."""

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
MULTIPLY_1 = 0xBF58476D1CE4E5B9
MULTIPLY_2 = 0x94D049BB133111EB


def mix(value: int) -> int:
    """One splitmix64 step (Steele, Lea, Flood 2014) on a 64-bit word."""
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * MULTIPLY_1) & MASK
    value = ((value ^ (value >> 27)) * MULTIPLY_2) & MASK
    return value ^ (value >> 31)


def stream(seed: int, position: int) -> int:
    """The 64-bit state from which the words of all token ids at one position follow.

    Nested finalisers, never one linear combination of seed and position: with that, the noise of one
    seed would be a shifted copy of another's.
    """
    return mix((mix((seed & MASK) ^ DOMAIN_CHOICE) + position) & MASK)


def words(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """uint64 [n]: the raw word of each token id at an absolute position."""
    value = ids.astype(np.uint64) + np.uint64((stream(seed, position) + GAMMA) & MASK)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(MULTIPLY_1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(MULTIPLY_2)
    return value ^ (value >> np.uint64(31))


def gumbel(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 [n]: standard Gumbel noise of each token id at an absolute position.

    52 bits of each word become a uniform strictly inside (0, 1), so the result is always finite. (With 53,
    adding the half would round the largest one up to 1.)
    """
    uniform = ((words(seed, position, ids) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return np.asarray(-np.log(-np.log(uniform)))


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request that asks for several."""
    return mix((mix(seed & MASK) + index) & MASK)
