"""Token masks: the tokens that a grammar lets come next, for the choice among a row of logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TokenMask = NDArray[np.uint8]
"""A bit for each token id, set if the token may come next; the lowest bit of a byte is the first. uint8 [ceil(V / 8)],
for a vocabulary of V."""


def barriers(mask: TokenMask, vocabulary: int) -> NDArray[np.float32]:
    """Return what is added to logits, float32 [V]: 0 for tokens that may come next, else -inf. Added, so that NaN stays
    NaN, and a broken row is found."""
    bits = np.unpackbits(mask, count=vocabulary, bitorder="little")
    return np.where(bits, np.float32(0), np.float32(-np.inf))
