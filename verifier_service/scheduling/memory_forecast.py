"""The memory forecast: how many more blocks of KV memory running texts will take at the peak.

Admitting a prompt only because it fits now leads to preemptions and recomputation later. So a text is admitted only if
all texts are expected to fit until they end, given the lengths of past texts: the Past-Future scheduler (Gong et al.
2025, "Past-Future Scheduler for LLM Serving under SLA Guarantees").

Text k has L_k tokens in b_k blocks, holds e_k of these exclusively, and is expected to end after s_k steps of one token
each. After m steps the texts hold

    G(m) = sum over s_k >= m of max(0, ceil((L_k + m) / BLOCK) - b_k)  -  sum over s_k < m of e_k

blocks more than now. G peaks at the last step of a text, so the forecast is the maximum over m in {s_1, ..., s_n}.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.engine.kv.blocks import BLOCK
from verifier_service.sessions.session import VerifierSession

REMEMBERED = 256
"""Maximum finished texts whose lengths are kept."""

MOMENTS = 64
"""Maximum number of values of m examined, spread over the expected ends. A peak missed between two of them may cost
preemptions."""


class TextLengths:
    """Lengths of the texts that ended last, in tokens; owned by the step loop's thread."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=REMEMBERED)
        self._sorted: NDArray[np.int64] | None = np.zeros(0, dtype=np.int64)  # None: stale

    def add(self, tokens: int) -> None:
        """Record the generated tokens of a text that has ended."""
        self._last.append(tokens)
        self._sorted = None

    def expected(self, generated: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the expected final lengths [n] of texts with `generated` [n] tokens now, sorted from oldest to
        youngest.

        Text k of n (from 0) is expected to end at quantile (k + 1/2) / n of the remembered lengths above its current
        length. So the ends of the texts are spread like those of past texts, the oldest at the lowest quantile. If no
        remembered text is longer, the text is expected to grow by one block.
        """
        if self._sorted is None:
            self._sorted = np.sort(np.asarray(self._last, dtype=np.int64))
        known = self._sorted
        first = np.searchsorted(known, generated, side="right")
        share = (np.arange(len(generated)) + 0.5) / max(1, len(generated))
        like = first + (share * (len(known) - first)).astype(np.int64)
        return np.where(first < len(known), np.append(known, 0)[like], generated + BLOCK)


def expected_growth(texts: Sequence[VerifierSession], lengths: TextLengths) -> int:
    """Return the peak growth in blocks of these texts, sorted from oldest to youngest, if no text is added (module
    docstring). All hold memory for their current length, except perhaps the one being admitted."""
    now, generated, left, blocks, exclusive = np.array(
        [
            (
                text.tree.base,
                text.generated,
                text.end - text.tree.base,
                len(text.slots) // BLOCK,
                text.exclusive_blocks,
            )
            for text in texts
        ],
        dtype=np.int64,
    ).T
    # Less one: the last token of a text is never written to the KV cache.
    steps = np.maximum(1, np.minimum(left, lengths.expected(generated) - generated)) - 1  # s_k
    moments = np.unique(steps)
    # Round the stride up, so that at most MOMENTS remain.
    moments = moments[:: -(-len(moments) // MOMENTS)]
    going_on = steps >= moments[:, None]  # [moments, texts]
    # A text may hold more blocks than it needs so far; it gives none back before it ends.
    taken = np.maximum(0, -(-(now + moments[:, None]) // BLOCK) - blocks)
    balance = np.where(going_on, taken, -exclusive).sum(axis=1)
    return max(0, int(balance.max()))
