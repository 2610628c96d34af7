"""Sampling from GPU logits.

Copying rows of the whole vocabulary to the host for every token costs too much. A choice made only on the GPU could
differ from one made elsewhere, because the logarithms of different libraries differ in their last bits. So a step
fetches, in one copy, a shortlist: the few ids of each row that can be the choice. The host chooses among them with the
same arithmetic as everywhere else. Most steps wait for the GPU once; rows are fetched whole only if a shortlist is not
enough: broken rows, very flat rows, rows truncated by typical-p alone, rows under REJECTION and CONTRASTIVE, and rows
that decide acceptance under TYPICAL.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.decoding import block_verification, typical
from specdec.decoding.block_verification import AcceptedPrefix, ChainQuery
from specdec.decoding.choice import Tokens, choose, plausible, sound
from specdec.decoding.logprobs import TokenLogprobs
from specdec.decoding.processing import Logits
from specdec.decoding.query import SamplingQuery
from specdec.decoding.step_logits import RowFeatures
from specdec.decoding.typical import TypicalQuery
from specdec.engine.gpu.logprobs import LogprobParts
from specdec.engine.gpu.shortlist import UNDECIDED, Narrowing, narrowing
from specdec.engine.gpu.staging import upload


class GpuLogits:
    """The wanted rows of a step as float32 logits [n, V] on the GPU. `asked`: sampling queries by row index, answered
    immediately; `hidden`: the rows' hidden states [n, d]; `features`: the pass's features, on the GPU."""

    def __init__(
        self,
        logits: Tensor,
        asked: Mapping[int, SamplingQuery],
        hidden: Tensor | None = None,
        features: RowFeatures | None = None,
    ) -> None:
        self._logits = logits
        self._hidden = hidden
        self._features = features
        self._known: dict[int, tuple[int, bool]] = {}
        self._decide(asked)

    def choose(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> tuple[Tokens, NDArray[np.bool_]]:
        self._decide({row: query for row, query in zip(rows, queries, strict=True) if row not in self._known})
        tokens, sound = zip(*(self._known[row] for row in rows), strict=True)
        return np.array(tokens, dtype=np.int64), np.array(sound, dtype=bool)

    def plausible(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> list[Tokens]:
        return plausible(self._whole(rows), queries)

    def verify_chains(self, chains: Sequence[ChainQuery]) -> list[AcceptedPrefix]:
        whole = iter(self._whole([row for chain in chains for row in chain.rows]))
        return [block_verification.verify(list(islice(whole, len(chain.rows))), chain.queries) for chain in chains]

    def accept_typical(self, queries: Sequence[TypicalQuery]) -> list[list[int]]:
        whole = iter(self._whole([row for query in queries for row in query.rows]))
        return [typical.accepted(list(islice(whole, len(query.rows))), query) for query in queries]

    def logprobs(self, rows: Sequence[int], tokens: Tokens, tops: Sequence[int]) -> list[TokenLogprobs]:
        found = LogprobParts(self._of(rows), tokens, tops)
        return found.decided(_fetched(found.parts))

    def hidden(self, rows: Sequence[int]) -> Tensor:
        assert self._hidden is not None  # asked for at launch
        return self._hidden.index_select(0, upload(np.asarray(rows, dtype=np.int64), self._hidden.device))

    def features(self, rows: Sequence[int], others: Sequence[int] = ()) -> Tensor:
        assert self._features is not None  # asked for at launch
        values: Tensor = self._features.values
        return values.index_select(0, upload(self._features.places(rows, others), values.device))

    def _decide(self, asked: Mapping[int, SamplingQuery]) -> None:
        groups: dict[type[Narrowing] | None, list[int]] = defaultdict(list)
        for row, query in asked.items():
            groups[narrowing(query)].append(row)
        whole = groups.pop(None, [])
        narrowed = [(rows, kind(self._of(rows), [asked[row] for row in rows])) for kind, rows in groups.items() if kind]
        fetched = iter(_fetched([part for _, shortlist in narrowed for part in shortlist.parts]))
        for rows, shortlist in narrowed:
            tokens = shortlist.decided([next(fetched) for _ in shortlist.parts]).tolist()
            for row, token in zip(rows, tokens, strict=True):
                if token == UNDECIDED:
                    whole.append(row)
                else:
                    self._known[row] = token, True
        if whole:
            logits = self._whole(whole)
            tokens = choose(logits, [asked[row] for row in whole])
            are_sound = sound(logits[np.arange(len(whole)), tokens], tokens)
            self._known.update(zip(whole, zip(tokens.tolist(), are_sound.tolist(), strict=True), strict=True))

    def _of(self, rows: Sequence[int]) -> Tensor:
        if list(rows) == list(range(len(rows))):  # all rows of one kind, as in most steps, need no copy
            return self._logits[: len(rows)]
        return self._logits.index_select(0, upload(np.asarray(rows), self._logits.device))

    def _whole(self, rows: Sequence[int]) -> Logits:
        return np.asarray(self._of(rows).cpu().numpy())


def _fetched(parts: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Fetch tensors of one device in a single copy."""
    if not parts:
        return []
    flat = [part.contiguous().flatten().view(torch.uint8) for part in parts]
    pieces = torch.split(torch.cat(flat).cpu(), [len(part) for part in flat])
    return [piece.clone().view(part.dtype).view(part.shape).numpy() for piece, part in zip(pieces, parts, strict=True)]
