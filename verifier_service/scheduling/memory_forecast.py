"""The memory forecast: how much more KV memory running texts will take before enough of them have ended.

A prompt that fits now is a text that may not fit later; whatever does not is preempted and computed again. So a text is
admitted when all are expected to fit until they end, by how long the texts before them were: the Past-Future scheduler
(Gong et al. 2025, "Past-Future Scheduler for LLM Serving under SLA Guarantees").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.engine.kv.blocks import BLOCK
from verifier_service.sessions.session import Session

REMEMBERED = 256
"""Texts that have ended whose lengths are remembered."""

MOMENTS = 64
"""Most moments that are looked at, of those at which texts are expected to end. What is overlooked between two of them
may cost preemptions."""


class TextLengths:
    """How many tokens the texts had that ended last. Belongs to the step loop's thread."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=REMEMBERED)
        self._sorted: NDArray[np.int64] | None = np.zeros(0, dtype=np.int64)  # None: to be sorted again

    def add(self, tokens: int) -> None:
        """Remember the generated tokens of a text that has ended."""
        self._last.append(tokens)
        self._sorted = None

    def expected(self, generated: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens [n] texts will have in the end that have `generated` [n] now, the oldest text first.

        Each is like one of the remembered texts that were longer than it is now; of n, the k-th is like the one at
        (k + 1/2) / n of these by length: together they end as texts do, the oldest first. Where none was longer, or
        nothing is remembered, it is a block more."""
        if self._sorted is None:
            self._sorted = np.sort(np.asarray(self._last, dtype=np.int64))
        known = self._sorted
        first = np.searchsorted(known, generated, side="right")
        share = (np.arange(len(generated)) + 0.5) / max(1, len(generated))
        like = first + (share * (len(known) - first)).astype(np.int64)
        return np.where(first < len(known), np.append(known, 0)[like], generated + BLOCK)


def expected_growth(texts: Sequence[Session], lengths: TextLengths) -> int:
    """Return how many blocks more than now these texts will take at most, the oldest first, if none is added. All have
    memory; a newcomer may have too little for its present text. Each is taken to grow by a token a step, and its last
    token is in none; when it ends, it gives back the blocks that no other text holds."""
    now, generated, left, blocks, exclusive = np.array(
        [
            (
                text.tree.base,
                text.generated,
                text.end - text.tree.base,
                len(text.slots) // BLOCK,
                0 if text.table is None else text.table.exclusive,
            )
            for text in texts
        ],
        dtype=np.int64,
    ).T
    steps = np.maximum(1, np.minimum(left, lengths.expected(generated) - generated)) - 1  # of each, until its last
    moments = np.unique(steps)
    moments = moments[:: -(-len(moments) // MOMENTS)]
    going_on = steps >= moments[:, None]  # [moments, texts]
    taken = np.maximum(0, -(-(now + moments[:, None]) // BLOCK) - blocks)
    balance = np.where(going_on, taken, -exclusive).sum(axis=1)
    return max(0, int(balance.max()))
