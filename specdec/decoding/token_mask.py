"""Token masks: the tokens that a grammar allows next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TokenMask = NDArray[np.uint8]
"""One bit per token id, set if the token may come next, lowest bit of a byte first. uint8 [ceil(V / 8)] for a
vocabulary of V."""


def barriers(mask: TokenMask, vocabulary: int) -> NDArray[np.float32]:
    """Return float32 [V] to add to logits: 0 for tokens that may come next, otherwise -inf. It is added rather than
    assigned, so that NaN stays NaN and a broken row is detected."""
    return np.take(_BARRIERS, mask, axis=0).reshape(-1)[:vocabulary]


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BARRIERS = np.where(_BITS, np.float32(0), np.float32(-np.inf))
"""Barriers of eight tokens, for each possible byte of a mask, float32 [256, 8]."""
