"""Attention by its formula, row by row in float64: the reference for kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def attention(
    query: Numbers,
    keys: Numbers,
    values: Numbers,
    texts: Sequence[NDArray[np.int64]],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Numbers:
    """Return [rows, heads, value width] from queries [rows, heads, width], keys and values [slots, key/value heads,
    width], and the slots of each row's text, the row's own last."""
    out = np.zeros((*query.shape[:2], values.shape[2]))
    for row, text in enumerate(texts):
        own = text[max(0, len(text) - window) :] if window else text
        for head in range(query.shape[1]):
            kv_head = head * keys.shape[1] // query.shape[1]
            scores = keys[own, kv_head] @ query[row, head] * scale
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ values[own, kv_head] / weights.sum()
    return out
