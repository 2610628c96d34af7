"""Logits processing on the GPU: `specdec.decoding.processing` in torch, with the same float32 operations in the same
order, and so the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.decoding.processing import LIMIT
from specdec.decoding.query import PenaltyState, SamplingQuery
from specdec.decoding.truncation import Ids
from specdec.engine.gpu.staging import upload


def adjusted(logits: Tensor, queries: Sequence[SamplingQuery]) -> Tensor:
    """Return float32 logits [n, V] with penalties, biases, bans and token masks applied; the input is not modified. If
    bans and mask leave a row no token, none of its logits is finite, and the host makes the choice."""
    if not any(query.adjusts for query in queries):
        return logits
    z = logits.clone()
    _penalise(z, queries)
    biases = [query.sampler.bias for query in queries]
    if any(len(ids) for ids, _ in biases):
        rows, ids = _indices(z, [ids for ids, _ in biases])
        z[rows, ids] = z[rows, ids] + _on(z, np.concatenate([bias for _, bias in biases]))
    banned = [_banned(query) for query in queries]
    if any(len(ids) for ids in banned):
        rows, ids = _indices(z, banned)
        z[rows, ids] = z.new_full((), -torch.inf)  # a Python scalar would be copied from the host: a synchronisation
    _keep_allowed(z, queries)
    return z


def _banned(query: SamplingQuery) -> Ids:
    """Return the token ids banned at the query's position."""
    sampler, ids = query.sampler, query.sampler.banned
    if query.position < sampler.first_end_position:
        ids = np.concatenate([ids, sampler.ends])
    return np.concatenate([ids, np.array(query.ruled_out, dtype=np.int64)]) if query.ruled_out else ids


def _keep_allowed(z: Tensor, queries: Sequence[SamplingQuery]) -> None:
    """Apply token masks in place."""
    masked = [(row, query.allowed) for row, query in enumerate(queries) if query.allowed is not None]
    if not masked:
        return
    rows, masks = zip(*masked, strict=True)
    bits = _on(z, np.stack(masks))[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=z.device) & 1
    walls = torch.zeros(1, device=z.device).where(bits.flatten(1)[:, : z.shape[1]].bool(), -torch.inf)
    at = _on(z, np.array(rows))
    z[at] = z[at] + walls


def tempered(z: Tensor, queries: Sequence[SamplingQuery]) -> Tensor:
    """Return logits divided by each row's temperature, in float32."""
    temperatures = np.array([min(query.sampler.sampling.temperature, LIMIT) for query in queries], dtype=np.float32)
    return z / _on(z, temperatures)[:, None]


def _penalise(z: Tensor, queries: Sequence[SamplingQuery]) -> None:
    """Apply penalties in place, once per distinct token of a row's text. Tokens on the row's path count as output."""
    held = [
        _held(query.penalty_state, query.path) if query.sampler.sampling.penalises else _NOTHING for query in queries
    ]
    lengths = [len(ids) for ids, _ in held]
    if not any(lengths):
        return
    samplings = [query.sampler.sampling for query in queries]

    def of_each(values: list[float]) -> Tensor:
        return _on(z, np.repeat(np.array(values, dtype=np.float32), lengths))

    rows, ids = _indices(z, [ids for ids, _ in held])
    counts = _on(z, np.concatenate([counts for _, counts in held]).astype(np.float32))
    penalty = of_each([s.repetition_penalty for s in samplings])
    values = z[rows, ids]
    values = torch.where(values > 0, values / penalty, values * penalty)
    values = values - of_each([s.frequency_penalty for s in samplings]) * counts
    z[rows, ids] = values - of_each([s.presence_penalty for s in samplings]) * (counts > 0).float()


_NOTHING = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)


def _held(penalty_state: PenaltyState | None, path: Sequence[int]) -> tuple[Ids, NDArray[Any]]:
    """Return the tokens of a text and path, and each token's count in the output."""
    if penalty_state is None:
        raise ValueError("penalties need the history of the text")
    ids = np.flatnonzero(penalty_state.seen)
    if not path:
        return ids, penalty_state.output_counts[ids]
    more, times = np.unique(np.asarray(path, dtype=np.int64), return_counts=True)
    ids = np.union1d(ids, more)
    counts = penalty_state.output_counts[ids].astype(np.int64)
    counts[np.searchsorted(ids, more)] += times
    return ids, counts


def _indices(z: Tensor, ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """Return the row and column indices of each row's ids, on the device of `z`."""
    rows = np.repeat(np.arange(len(ids)), [len(of_row) for of_row in ids])
    return _on(z, rows), _on(z, np.concatenate(ids))


def _on(z: Tensor, array: NDArray[Any]) -> Tensor:
    return upload(array, z.device)
