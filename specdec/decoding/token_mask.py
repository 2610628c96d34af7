"""Token masks: the tokens a grammar allows next, for the choice among a row of logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TokenMask = NDArray[np.uint8]
"""One bit per token id, set if the token may come next, lowest bit of a byte first. uint8 [ceil(V / 8)] for a
vocabulary of V."""


def barriers(mask: TokenMask, vocabulary: int) -> NDArray[np.float32]:
    """Return what is added to logits, float32 [V]: 0 for tokens that may come next, otherwise -inf. Added rather than
    assigned, so that NaN stays NaN and a broken row is detected."""
    return np.take(_BARRIERS, mask, axis=0).reshape(-1)[:vocabulary]


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BARRIERS = np.where(_BITS, np.float32(0), np.float32(-np.inf))
"""Barriers of the eight tokens of each possible byte of a mask, float32 [256, 8]."""
