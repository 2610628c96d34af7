"""Logit processing before the choice: penalties, bias, bans and token masks, the same under every rule, and division by
the temperature, if the rule samples."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.query import SamplingQuery, TokenMask
from specdec.decoding.sampling import Sampling

Logits = NDArray[np.float32]

LIMIT = float(np.finfo(np.float32).max)

MAX_ABS_LOGIT = 1e30
"""Exclusive limit on a logit's absolute value; a larger one shows that the model is broken. Smaller ones divided by T
do not overflow float32."""

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BARRIERS = np.where(_BITS, np.float32(0), np.float32(-np.inf))
"""Barriers of eight tokens, for each possible byte of a mask, float32 [256, 8]."""


def temperatures(samplings: Sequence[Sampling]) -> Logits:
    """Return the temperatures, float32 [n], clipped to the largest float32."""
    return np.array([min(s.temperature, LIMIT) for s in samplings], dtype=np.float32)


def tempered(z: Logits, samplings: Sequence[Sampling]) -> Logits:
    """Return float32 logits divided by each row's temperature."""
    return np.asarray(z / temperatures(samplings)[:, None], dtype=np.float32)


def adjusted(logits: Logits, queries: Sequence[SamplingQuery]) -> Logits:
    """Return logits with penalties, bias, bans and token masks applied, without modifying the caller's rows."""
    if not any(query.adjusts for query in queries):
        return logits
    z = logits.copy()
    start = 0
    for _, run in itertools.groupby(queries, key=lambda query: (id(query.sampler), id(query.penalty_state))):
        of_run = list(run)
        rows = slice(start, start + len(of_run))
        _adjust(z[rows], logits[rows], of_run)
        start = rows.stop
    return z


def barriers(mask: TokenMask, vocabulary: int) -> NDArray[np.float32]:
    """Return float32 [V] to add to logits: 0 for tokens that may come next, otherwise -inf. It is added rather than
    assigned, so that NaN stays NaN and a broken row is detected."""
    return np.take(_BARRIERS, mask, axis=0).reshape(-1)[:vocabulary]


def _adjust(z: Logits, logits: Logits, queries: Sequence[SamplingQuery]) -> None:
    """Adjust `z` in place, for rows of one sampler and one penalty state; `logits`, the same rows, stay unchanged."""
    sampler, penalty_state = queries[0].sampler, queries[0].penalty_state
    sampling = sampler.sampling
    if sampling.penalises:
        if penalty_state is None:
            raise ValueError("penalties need the history of the text")
        ids = np.flatnonzero(penalty_state.seen)
        z[:, ids] = _penalised(z[:, ids], penalty_state.output_counts[ids], sampling)
        for row, raw, query in zip(z, logits, queries, strict=True):
            if query.path:  # the path's tokens count as output, in this row only
                ids, more = np.unique(query.path, return_counts=True)
                row[ids] = _penalised(raw[ids], penalty_state.output_counts[ids] + more, sampling)
    if sampling.logit_bias:
        ids, bias = sampler.bias
        z[:, ids] += bias
    if sampling.banned_tokens:
        z[:, sampler.banned] = -np.inf
    for row, raw, query in zip(z, logits, queries, strict=True):
        if query.position < sampler.first_end_position:
            row[sampler.ends] = -np.inf
        if query.ruled_out:
            row[query.ruled_out] = -np.inf
        if query.allowed is not None:
            _keep_allowed(row, raw, query.allowed)


def _keep_allowed(row: Logits, raw: Logits, allowed: TokenMask) -> None:
    """Mask the tokens that a grammar does not allow, in place. If bans exclude all allowed tokens, the grammar wins:
    the choice is among the allowed tokens by their `raw` logits."""
    wall = barriers(allowed, len(row))
    row += wall
    if row.max() == -np.inf:
        np.add(raw, wall, out=row)


def _penalised(logits: Logits, counts: NDArray[np.integer], sampling: Sampling) -> Logits:
    """Return penalised logits, float32 [..., k], of tokens present in the text; `counts` [k]: occurrences in output."""
    penalty = np.float32(sampling.repetition_penalty)
    z = np.where(logits > 0, logits / penalty, logits * penalty)
    z -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    z -= np.float32(sampling.presence_penalty) * (counts > 0).astype(np.float32)
    return z
