"""`specdec.decoding.processing` in torch, for logits that live on a device: the same float32 operations in the same
order, so the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.decoding.choice import Ask
from specdec.decoding.processing import LIMIT, History
from specdec.engine.upload import upload


def adjusted(logits: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Penalties, bias and bans of float32 logits [n, V]; the caller's rows are left alone."""
    if not any(ask.chooser.adjusts or ask.position < ask.chooser.first_end_position for ask in asks):
        return logits
    z = logits.clone()
    _penalise(z, asks)
    biases = [ask.chooser.bias for ask in asks]
    if any(len(ids) for ids, _ in biases):
        rows, ids = _places(z, [ids for ids, _ in biases])
        z[rows, ids] = z[rows, ids] + _on(z, np.concatenate([bias for _, bias in biases]))
    ruled_out = [
        np.concatenate([ask.chooser.banned, ask.chooser.ends])
        if ask.position < ask.chooser.first_end_position
        else ask.chooser.banned
        for ask in asks
    ]
    if any(len(ids) for ids in ruled_out):
        z[_places(z, ruled_out)] = -torch.inf
    return z


def tempered(z: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Divided by each row's temperature, in float32."""
    temperatures = np.array([min(ask.chooser.sampling.temperature, LIMIT) for ask in asks], dtype=np.float32)
    return z / _on(z, temperatures)[:, None]


def _penalise(z: Tensor, asks: Sequence[Ask]) -> None:
    """In place. Each token that a row's text holds is penalised once, tokens of the row's path counted as output."""
    held = [_held(ask.history, ask.path) if ask.chooser.sampling.penalises else _NOTHING for ask in asks]
    lengths = [len(ids) for ids, _ in held]
    if not any(lengths):
        return
    samplings = [ask.chooser.sampling for ask in asks]

    def of_each(values: list[float]) -> Tensor:
        return _on(z, np.repeat(np.array(values, dtype=np.float32), lengths))

    rows, ids = _places(z, [ids for ids, _ in held])
    counts = _on(z, np.concatenate([counts for _, counts in held]).astype(np.float32))
    penalty = of_each([s.repetition_penalty for s in samplings])
    values = z[rows, ids]
    values = torch.where(values > 0, values / penalty, values * penalty)
    values = values - of_each([s.frequency_penalty for s in samplings]) * counts
    z[rows, ids] = values - of_each([s.presence_penalty for s in samplings]) * (counts > 0).float()


Ids = NDArray[np.int64]
_NOTHING = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)


def _held(history: History | None, path: Sequence[int]) -> tuple[Ids, NDArray[Any]]:
    """Tokens of a text and how often each was put out."""
    if history is None:
        raise ValueError("penalties need the history of the text")
    ids = np.flatnonzero(history.seen)
    if not path:
        return ids, history.output_counts[ids]
    more, times = np.unique(np.asarray(path, dtype=np.int64), return_counts=True)
    ids = np.union1d(ids, more)
    counts = history.output_counts[ids].astype(np.int64)
    counts[np.searchsorted(ids, more)] += times
    return ids, counts


def _places(z: Tensor, ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """Rows and columns of the ids of each row."""
    rows = np.repeat(np.arange(len(ids)), [len(of_row) for of_row in ids])
    return _on(z, rows), _on(z, np.concatenate(ids))


def _on(z: Tensor, array: NDArray[Any]) -> Tensor:
    return upload(array, z.device)
