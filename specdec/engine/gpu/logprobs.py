"""Log-probabilities of rows on a GPU: only a few numbers per row go to the host.

The host subtracts the log of a row's sum of exp from its logits, as for rows in host memory
(`specdec.decoding.logprobs`). Only this log is computed on the GPU, and may differ in its last bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.decoding.choice import Tokens
from specdec.decoding.logprobs import TokenLogprobs
from specdec.engine.gpu.staging import upload

AT_ONCE = 32
"""Rows computed together, with about thirty bytes of temporary memory for each logit."""

LOW = (1 << 32) - 1
"""The lower half of a sort key is LOW minus the id: among equal logits, a lower id gives a larger key."""


class LogprobParts:
    """Log-probabilities of one token per row of float32 logits [n, V], and of each row's largest logits. The
    constructor launches the work; `parts` are the tensors to fetch."""

    def __init__(self, logits: Tensor, tokens: Tokens, tops: Sequence[int]) -> None:
        self._tops = tops
        most = min(max(tops, default=0), logits.shape[1])
        chosen = upload(tokens, logits.device)
        blocks = [_parts(logits[start:end], chosen[start:end], most) for start, end in _blocks(len(logits))]
        self.parts: list[Tensor] = [torch.cat(parts) for parts in zip(*blocks, strict=True)]

    def decided(self, parts: Sequence[NDArray[Any]]) -> list[TokenLogprobs]:
        """Return the log-probabilities, given the fetched parts."""
        totals, own, ranks, ids, values = parts
        chosen = (own - totals).astype(np.float32).tolist()
        best = (values - totals[:, None]).astype(np.float32)
        return [
            TokenLogprobs(logprob, row[:top].tolist(), logprobs[:top].tolist(), int(rank))
            for logprob, row, logprobs, rank, top in zip(chosen, ids, best, ranks, self._tops, strict=True)
        ]


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    for start in range(0, rows, AT_ONCE):
        yield start, start + AT_ONCE


def _parts(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, ...]:
    """Return, for rows [n, V] and a token of each: float64 [n] logs of the sums of exp, the tokens' logits [n] and
    ranks [n], and the ids and values [n, most] of the largest logits."""
    peak = logits.amax(dim=1, keepdim=True)
    total = torch.exp(logits - peak).sum(dim=1, dtype=torch.float64).log() + peak[:, 0]
    own = logits.gather(1, tokens[:, None])
    ranks = 1 + (logits > own).sum(dim=1)
    ids = LOW - (_keys(logits).topk(most, dim=1).values & LOW) if most else tokens.new_empty(len(logits), 0)
    return total, own[:, 0], ranks, ids, logits.gather(1, ids)


def _keys(logits: Tensor) -> Tensor:
    """Return distinct int64 keys in the order of the logits; among equal ones a lower id has a larger key."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 and 0.0 are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats descend as integers
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered.to(torch.int64) << 32) + (LOW - ids)
