"""Step logits: the logits of one forward pass, from which the sampling queries of sessions are answered.

Only the implementing class knows where the logits are: `HostLogits` keeps them in host memory,
`specdec.engine.gpu.sampler` on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.decoding import block_verification, typical
from specdec.decoding.block_verification import AcceptedPrefix, ChainQuery
from specdec.decoding.choice import BLOCK, Tokens, choose, plausible, sound
from specdec.decoding.logprobs import TokenLogprobs, logprobs
from specdec.decoding.processing import Logits
from specdec.decoding.query import SamplingQuery
from specdec.decoding.typical import TypicalQuery


class RowFeatures(NamedTuple):
    """The features of all t rows of a forward pass, and the rows that have logits."""

    values: Any  # [t, m, d], an array or a tensor: the residual stream entering each of m layers
    wanted: NDArray[np.int64]  # [n] for each row of the step logits, its row in the pass

    def places(self, rows: Sequence[int], others: Sequence[int]) -> NDArray[np.int64]:
        """Return row indices in the pass: first those of the step logits' `rows`, then the `others` unchanged."""
        return np.concatenate([self.wanted[np.asarray(rows, dtype=np.int64)], np.asarray(others, dtype=np.int64)])


class StepLogits(Protocol):
    """The step logits: n rows over one vocabulary."""

    def choose(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> tuple[Tokens, NDArray[np.bool_]]:
        """Return the tokens chosen by these rows, as `choice.choose` does, and which rows are sound, as `choice.sound`
        does."""

    def plausible(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> list[NDArray[np.int64]]:
        """Return the plausible tokens of these undecided rows, as `choice.plausible` does."""

    def verify_chains(self, chains: Sequence[ChainQuery]) -> list[AcceptedPrefix]:
        """Return the accepted prefixes of chains of draws, as `block_verification.verify` does."""

    def accept_typical(self, queries: Sequence[TypicalQuery]) -> list[list[int]]:
        """Return the tokens of the accepted paths of trees, as `typical.accepted` does."""

    def logprobs(self, rows: Sequence[int], tokens: Tokens, tops: Sequence[int]) -> list[TokenLogprobs]:
        """Return the log-probabilities of these rows, as `logprobs.logprobs` does."""

    def hidden(self, rows: Sequence[int]) -> Any:
        """Return the hidden states of these rows, [n, d]: a float32 array in host memory, or a tensor on the device of
        the pass. Only for passes launched with hidden states."""

    def features(self, rows: Sequence[int], others: Sequence[int] = ()) -> Any:
        """Return the features [n, m, d] of these rows, then those of `others`, which are row indices in the batch of
        the pass: an array or a tensor, as in `hidden`. Only for passes launched with features of m layers."""


class HostLogits:
    """Step logits in host memory."""

    def __init__(
        self, logits: Logits, hidden: NDArray[np.float32] | None = None, features: RowFeatures | None = None
    ) -> None:
        """`logits` are float32 [n, V]; `hidden`: the hidden states of the same rows, [n, d]."""
        self._logits = logits
        self._hidden = hidden
        self._features = features

    def choose(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> tuple[Tokens, NDArray[np.bool_]]:
        count = len(rows)
        if list(rows) == list(range(count)):  # a prefix of all rows: a view instead of a copy
            tokens = choose(self._logits[:count], queries)
        else:
            chosen = [choose(self._of(rows[block]), queries[block]) for block in self._blocks(count)]
            tokens = np.concatenate(chosen)
        return tokens, sound(self._logits[np.asarray(rows, dtype=np.int64), tokens], tokens)

    def plausible(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> list[NDArray[np.int64]]:
        found = [plausible(self._of(rows[block]), queries[block]) for block in self._blocks(len(rows))]
        return list(chain.from_iterable(found))

    def verify_chains(self, chains: Sequence[ChainQuery]) -> list[AcceptedPrefix]:
        return [block_verification.verify((self._logits[row] for row in chain.rows), chain.queries) for chain in chains]

    def accept_typical(self, queries: Sequence[TypicalQuery]) -> list[list[int]]:
        return [typical.accepted([self._logits[row] for row in query.rows], query) for query in queries]

    def logprobs(self, rows: Sequence[int], tokens: Tokens, tops: Sequence[int]) -> list[TokenLogprobs]:
        blocks = self._blocks(len(rows))
        found = [logprobs(self._of(rows[block]), tokens[block], tops[block]) for block in blocks]
        return list(chain.from_iterable(found))

    def hidden(self, rows: Sequence[int]) -> NDArray[np.float32]:
        assert self._hidden is not None  # asked for at launch
        return self._hidden[np.asarray(rows, dtype=np.int64)]

    def features(self, rows: Sequence[int], others: Sequence[int] = ()) -> Any:
        assert self._features is not None  # asked for at launch
        return self._features.values[self._features.places(rows, others)]

    def _of(self, rows: Sequence[int]) -> Logits:
        return self._logits[np.asarray(rows, dtype=np.int64)]

    def _blocks(self, rows: int) -> list[slice]:
        """Return slices of rows small enough to copy: a single copy of all rows would double the memory of a step."""
        step = max(1, BLOCK // self._logits.shape[1])
        return [slice(start, start + step) for start in range(0, rows, step)]
