"""A simulated GPU: passes take the time of a profile, without using this machine's cores.

Nothing is computed. A row's logits depend on its position alone: one of `PERIOD` made-up rows, from certain to flat, as
a language model's are. All of the host's work for a pass is real: packing, sampling queries, and the choice from a
GPU's shortlist, for a target or a draft.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.systems.long_steps import sleep_until
from specdec.decoding import block_verification, typical
from specdec.decoding.block_verification import AcceptedPrefix, ChainQuery
from specdec.decoding.choice import Tokens, choose, plausible
from specdec.decoding.draft_logits import MAX_DRAFT_LOGITS, Shortlists
from specdec.decoding.logprobs import TokenLogprobs, logprobs
from specdec.decoding.processing import temperatures
from specdec.decoding.query import SamplingQuery
from specdec.decoding.typical import TypicalQuery
from specdec.engine.batch import PackedBatch
from specdec.engine.gpu.layout import SplitKvPacker, tile_rows_for
from specdec.engine.gpu.shortlist import RANKED, UNDECIDED, Greedy, Narrowing, Ranked, narrowing, of_largest
from specdec.engine.kv.slots import Slots

PERIOD = 16
"""Period of the made-up logits, in positions."""

KEPT = (1, 1, 1, 1, 1, 2, 3, 4, 6, 10, 15, 23, 34, 60, 117, 258)
"""Tokens kept by TOP_P at TEMPERATURE in each row: quantiles over text of Qwen2.5-Coder 0.5B
(docs/decisions/2026-11-28-rows-as-flat-as-a-models.md)."""

TOP_P, TEMPERATURE = 0.95, 0.8

NOISE = 0.35
"""Standard deviation of the noise in logits, which fall with the logarithm of their rank, before rows are scaled."""

SHARED_HEADS = 4
"""Query heads per key head, for the packer."""

NEVER = -50.0
"""Logit of the end token."""


class SimulatedGpu:
    """An engine (`Engine`, `GpuSampling`, `Shortlisting`) whose passes over n rows take seconds(n).

    `ranks`: by position, the rank of the target's best token in this engine's logits, from 0; repeated cyclically. A
    target has (0,).
    """

    exact = True
    numerics = "simulated"
    device = "simulated"
    dtype = "bfloat16"
    threads: tuple[int, ...] = ()
    queues_passes = True

    def __init__(
        self,
        vocabulary: int,
        capacity: int,
        seconds: Callable[[int], float],
        *,
        end_token: int = 0,
        ranks: Sequence[int] = (0,),
    ) -> None:
        self.vocabulary = vocabulary
        self.capacity = capacity
        table, kinds = _table(vocabulary, end_token), sorted(set(ranks))
        self.table: NDArray[np.float32] = np.concatenate([_demoted(table, rank) for rank in kinds])
        self._begins = np.array([PERIOD * kinds.index(rank) for rank in ranks])  # first row of each position
        self._seconds = seconds
        self._free_at = 0.0  # end of the last pass launched
        self._totals: dict[tuple[int, float], float] = {}
        ranking = np.argsort(-self.table, axis=1, kind="stable")[:, :RANKED]
        self.ids = ranking.astype(np.int64)
        self.leading = np.take_along_axis(self.table, ranking, axis=1)
        self.shortlists = Shortlists(self.leading[:, :MAX_DRAFT_LOGITS].copy(), self.ids[:, :MAX_DRAFT_LOGITS].copy())

    def packer(self) -> SplitKvPacker:
        return SplitKvPacker(tile_rows=tile_rows_for(SHARED_HEADS))

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        end = self._end(batch)
        logits = self.table[self.places(batch)]
        sleep_until(end)
        return logits

    def launch(self, batch: PackedBatch) -> SimulatedPass:
        return SimulatedPass(self, batch, self._end(batch))

    def forward_shortlists(self, batch: PackedBatch) -> SimulatedDraftLogits:
        end, places = self._end(batch), self.places(batch)
        sleep_until(end)
        return SimulatedDraftLogits(self, places)

    def copy(self, source: Slots, target: Slots) -> None:
        pass  # rows depend on nothing computed before

    def total(self, place: int, temperature: float) -> float:
        """Return the sum of the weights of a row of the table, relative to its largest."""
        if (place, temperature) not in self._totals:
            z = self.table[place] / np.float32(temperature)
            self._totals[place, temperature] = float(np.exp(z - z.max()).astype(np.float64).sum())
        return self._totals[place, temperature]

    def _end(self, batch: PackedBatch) -> float:
        """Return the end of a pass over this batch: it begins now, or at the end of the pass before."""
        self._free_at = max(self._free_at, time.perf_counter()) + self._seconds(len(batch.tokens))
        return self._free_at

    def places(self, batch: PackedBatch) -> NDArray[np.int64]:
        """Return the table row of each wanted row."""
        positions = batch.positions[batch.wanted]
        places: NDArray[np.int64] = self._begins[positions % len(self._begins)] + positions % PERIOD
        return places


@dataclass(frozen=True)
class SimulatedPass:
    """A pass of a simulated GPU that ends at `end` (`time.perf_counter`)."""

    engine: SimulatedGpu
    batch: PackedBatch
    end: float

    def logits(self, asked: Callable[[], Mapping[int, SamplingQuery]]) -> SimulatedLogits:
        queries, places = asked(), self.engine.places(self.batch)
        return SimulatedLogits(self.engine, places, queries, self.end)


class SimulatedLogits:
    """Step logits of a simulated GPU, with the interface of `GpuLogits`. While the device computes, until `end`, rows
    are grouped by kind of shortlist."""

    def __init__(
        self, engine: SimulatedGpu, places: NDArray[np.int64], asked: Mapping[int, SamplingQuery], end: float
    ) -> None:
        self._engine = engine
        self._places = places
        self._known: dict[int, int] = {}
        self._decide(asked, end)

    def choose(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> tuple[Tokens, NDArray[np.bool_]]:
        self._decide({row: query for row, query in zip(rows, queries, strict=True) if row not in self._known})
        return np.array([self._known[row] for row in rows], dtype=np.int64), np.ones(len(rows), dtype=bool)

    def plausible(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> list[Tokens]:
        return plausible(self._whole(rows), queries)

    def verify_chains(self, chains: Sequence[ChainQuery]) -> list[AcceptedPrefix]:
        return [block_verification.verify(self._whole(chain.rows), chain.queries) for chain in chains]

    def accept_typical(self, queries: Sequence[TypicalQuery]) -> list[list[int]]:
        return [typical.accepted(list(self._whole(query.rows)), query) for query in queries]

    def logprobs(self, rows: Sequence[int], tokens: Tokens, tops: Sequence[int]) -> list[TokenLogprobs]:
        return logprobs(self._whole(rows), tokens, tops)

    def _decide(self, asked: Mapping[int, SamplingQuery], end: float = 0.0) -> None:
        groups: dict[type[Narrowing] | None, list[int]] = defaultdict(list)
        for row, query in asked.items():
            groups[narrowing(query)].append(row)
        sleep_until(end)
        for kind, rows in groups.items():
            queries, places = [asked[row] for row in rows], self._places[np.asarray(rows)]
            if kind is Greedy:
                tokens = self._engine.ids[places, 0]
            elif kind is Ranked:
                tokens = self._of_largest(places, queries)
            else:
                tokens = np.full(len(rows), UNDECIDED)
            if open_rows := np.flatnonzero(tokens == UNDECIDED).tolist():
                whole = self._whole([rows[each] for each in open_rows])
                tokens[open_rows] = choose(whole, [queries[each] for each in open_rows])
            self._known.update(zip(rows, tokens.tolist(), strict=True))

    def _of_largest(self, places: NDArray[np.int64], queries: Sequence[SamplingQuery]) -> Tokens:
        """Choose as from a GPU's shortlist."""
        engine = self._engine
        divisors = temperatures([query.sampler.sampling for query in queries])
        z = engine.leading[places] / divisors[:, None]
        totals = np.array([engine.total(place, t) for place, t in zip(places.tolist(), divisors.tolist(), strict=True)])
        return of_largest(queries, engine.vocabulary, z, engine.ids[places], totals)

    def _whole(self, rows: Sequence[int]) -> NDArray[np.float32]:
        whole: NDArray[np.float32] = self._engine.table[self._places[np.asarray(rows)]]
        return whole


class SimulatedDraftLogits:
    """Draft logits of a simulated GPU, with the interface of `GpuDraftLogits`."""

    def __init__(self, engine: SimulatedGpu, places: NDArray[np.int64]) -> None:
        self._engine = engine
        self._places = places

    def shortlists(self, rows: Sequence[int]) -> Shortlists:
        places = self._places[np.asarray(rows)]
        return Shortlists(*(part[places] for part in self._engine.shortlists))

    def whole(self, rows: Sequence[int]) -> Sequence[NDArray[np.float32]]:
        return [self._engine.table[self._places[row]] for row in rows]


def _table(vocabulary: int, end_token: int) -> NDArray[np.float32]:
    """Return logits [PERIOD, vocabulary], the same in every process."""
    random = np.random.default_rng(0)
    of_rank = np.sort(NOISE * random.normal(size=vocabulary) - np.log(np.arange(1, vocabulary + 1)))[::-1]
    rows = [_scaled(of_rank, kept)[random.permutation(vocabulary)] for kept in random.permutation(KEPT)]
    table = np.stack(rows).astype(np.float32)
    table[:, end_token] = NEVER
    return table


def _scaled(logits: NDArray[np.float64], kept: int) -> NDArray[np.float64]:
    """Return descending logits scaled so that top-p keeps `kept` tokens."""
    low, high = 0.1, 100.0
    for _ in range(20):  # bisection: the larger the scale, the fewer tokens are kept
        scale = math.sqrt(low * high)
        weights = np.exp(scale * (logits - logits[0]) / TEMPERATURE)
        enough = weights[:kept].sum() >= TOP_P * weights.sum()
        low, high = (low, scale) if enough else (scale, high)
    return high * logits


def _demoted(table: NDArray[np.float32], rank: int) -> NDArray[np.float32]:
    """Return rows whose best token has moved down to `rank`; the tokens it passes move up by one."""
    leading = np.argsort(-table, axis=1, kind="stable")[:, : rank + 1]
    demoted = table.copy()
    np.put_along_axis(demoted, np.roll(leading, -1, axis=1), np.take_along_axis(table, leading, axis=1), axis=1)
    return demoted
