"""The Gumbel noise shared by both models: a pure function of (seed, position, token id).

The noise is counter-based: it can be computed for any subset of ids, in any order, on any machine. Adding it to
processed logits and taking the argmax samples from their softmax (Gumbel 1954; Maddison et al. 2014). Two models that
add the *same* noise tend to choose the same token (Daliri, Musco, Suresh 2024).

`specdec.engine.gpu.noise` computes the same words in torch.

`winners` computes the noise in float64, only for ids that can win (`gumbel_pruning.py`). The result is exact: an
omitted id provably loses. No row's winner depends on other rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DOMAIN_CHOICE = 0x63686F6963650001
DOMAIN_DRAFT = 0x6472616674000002
DOMAIN_ACCEPT = 0x6163636570740003
DOMAIN_RESIDUAL = 0x7265736964750004
DOMAIN_BLOCK = 0x626C6F636B000005
"""Domains separate the noise of the choice from the draws and tests of rejection sampling: reusing a random number for
a second purpose would correlate draws that must be independent."""

TEXT_HASH_TOKENS = 256
"""Number of tokens before a position that enter `text_hash`: more than a step has, so that texts that diverge within a
step have different hashes."""

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
MULTIPLY_1 = 0xBF58476D1CE4E5B9
MULTIPLY_2 = 0x94D049BB133111EB
_GAMMA, _LAST_SHIFT = np.uint64(GAMMA), np.uint64(31)
_ROUNDS = ((np.uint64(30), np.uint64(MULTIPLY_1)), (np.uint64(27), np.uint64(MULTIPLY_2)))


def mix(value: int) -> int:
    """Apply one splitmix64 step (Steele, Lea, Flood 2014) to a 64-bit word."""
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * MULTIPLY_1) & MASK
    value = ((value ^ (value >> 27)) * MULTIPLY_2) & MASK
    return value ^ (value >> 31)


def stream(seed: int, position: int, domain: int = DOMAIN_CHOICE) -> int:
    """Return the 64-bit state from which the words of all token ids at one position are derived.

    The finalisers are nested; with one linear combination of seed and position instead, the noise of one seed would be
    a shifted copy of another's.
    """
    return stream_at(request_state(seed, domain), position)


def stream_at(state: int, position: int) -> int:
    """Return the stream at a position, as `stream` does, from the state of `request_state`."""
    return mix((state + position) & MASK)


def request_state(seed: int, domain: int = DOMAIN_CHOICE) -> int:
    """Return the 64-bit state from which the streams of all positions are derived."""
    return mix((seed & MASK) ^ domain)


def token_words(streams: NDArray[np.uint64], ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the raw word of each token id in each stream: uint64, in the broadcast shape of the two.

    A word is `mix` of the sum of stream and id, computed in place with one scratch array: over a whole vocabulary,
    memory access takes most of the time.
    """
    value = np.asarray(streams + _GAMMA + ids.astype(np.uint64))
    scratch = np.empty_like(value)
    for shift, multiplier in _ROUNDS:
        np.right_shift(value, shift, out=scratch)
        value ^= scratch
        value *= multiplier
    np.right_shift(value, _LAST_SHIFT, out=scratch)
    value ^= scratch
    return value


def word_gumbel(value: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return float64, shaped as `value`: the standard Gumbel noise derived from these words.

    52 bits of each word become a uniform number strictly inside (0, 1), so the result is always finite. With 53 bits,
    adding the half would round the largest number up to 1.
    """
    uniform = ((value >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return np.asarray(-np.log(-np.log(uniform)))


def uniform(seed: int, position: int, domain: int, *indices: int) -> float:
    """Return a uniform number of 52 bits, strictly inside (0, 1), for one draw at an absolute position. `indices`
    distinguish several draws of a domain at this position."""
    state = stream(seed, position, domain)
    for index in indices:
        state = mix((state + index) & MASK)
    return float(((mix(state) >> 12) + 0.5) * 2.0**-52)


def text_hash(text: Sequence[int], path: Sequence[int]) -> int:
    """Return a 64-bit hash of the last TEXT_HASH_TOKENS tokens of a text with a path below it."""
    tokens = [*text[-TEXT_HASH_TOKENS:], *path][-TEXT_HASH_TOKENS:]
    digest = hashlib.blake2b(np.asarray(tokens, dtype="<u4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` of a request for several samples."""
    return mix((mix(seed & MASK) + index) & MASK)


def winners(
    values: NDArray[np.float32], possible: NDArray[np.int64], vocabulary: int, streams: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Return int64 [n]: for each of n rows over one vocabulary the token with the largest sum of logit and noise, the
    lowest id on ties.

    `possible` holds the ids that can win: ascending indices into the flattened rows, at least one per row. `values` are
    their logits divided by the temperature; `streams` [n] are the noise streams of the rows.
    """
    rows, ids = np.divmod(possible, vocabulary)
    if len(possible) == len(streams):
        return np.asarray(ids)  # one per row: nothing to decide
    scores = values + word_gumbel(token_words(streams[rows], ids))
    every = np.arange(len(streams))
    best = np.maximum.reduceat(scores, np.searchsorted(rows, every))
    won = np.flatnonzero(scores == best[rows])
    if len(won) == len(streams):
        return np.asarray(ids[won])
    return np.asarray(np.minimum.reduceat(ids[won], np.searchsorted(rows[won], every)))
