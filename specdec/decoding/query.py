"""The sampling query: all inputs of a choice besides logits, namely a request's sampler, its text and a position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.noise import request_state
from specdec.decoding.proposal import Proposal
from specdec.decoding.sampling import DEFAULT_CONTRAST, DEFAULT_TYPICALITY, Contrast, Rule, Sampling, Typicality

TokenMask = NDArray[np.uint8]
"""The tokens that a grammar allows next: one bit per token id, set if the token may come next, lowest bit of a byte
first. uint8 [ceil(V / 8)] for a vocabulary of V."""


class PenaltyState:
    """The tokens of a text, for the penalties: the prompt as a set, the output as counts."""

    def __init__(self, vocabulary: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.seen = np.zeros(vocabulary, dtype=bool)
        self.output_counts = np.zeros(vocabulary, dtype=np.int32)
        self.seen[np.asarray(prompt, dtype=np.int64)] = True
        self.extend(output)

    def extend(self, output: Sequence[int]) -> None:
        ids = np.asarray(output, dtype=np.int64)
        self.seen[ids] = True
        np.add.at(self.output_counts, ids, 1)

    def __getstate__(self) -> tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Return the tokens instead of the arrays, which are as long as the vocabulary: the state may be pickled for
        other processes in every step."""
        ids = np.flatnonzero(self.output_counts)
        return len(self.seen), np.flatnonzero(self.seen), ids, self.output_counts[ids]

    def __setstate__(self, state: tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]) -> None:
        vocabulary, seen, ids, counts = state
        self.seen = np.zeros(vocabulary, dtype=bool)
        self.output_counts = np.zeros(vocabulary, dtype=np.int32)
        self.seen[seen] = True
        self.output_counts[ids] = counts


class BannedSequences:
    """The banned sequences of a request. If the text ends with all but the last token of a sequence, that last token is
    banned."""

    def __init__(self, sequences: Collection[Sequence[int]]) -> None:
        """`sequences`: at least one, each of at least two tokens. Single tokens are banned everywhere, not here."""
        self._completing: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # last tokens, by prefix
        for *before, last in sequences:
            self._completing[tuple(before)].append(last)
        self._lengths = sorted({len(before) for before in self._completing})

    def ruled_out(self, text: Sequence[int], path: Sequence[int]) -> list[int]:
        """Return, in any order, the tokens that would complete a sequence after a text and a path below it. The cost is
        one lookup per distinct sequence length, whatever the number of sequences or the vocabulary size."""
        longest = self._lengths[-1]
        end = (*text[-longest:], *path[-longest:])
        found: list[int] = []
        for length in self._lengths:
            if length > len(end):
                break
            found += self._completing.get(end[-length:], ())
        return found


@dataclass(frozen=True)
class RequestSampler:
    """The sampler of one request: its sampling parameters, acceptance rule and end tokens.

    `end_tokens` are excluded before the absolute position `first_end_position`: this implements `min_tokens`.
    """

    sampling: Sampling
    end_tokens: frozenset[int] = frozenset()
    first_end_position: int = 0
    rule: Rule = Rule.COUPLED
    contrast: Contrast = DEFAULT_CONTRAST
    typicality: Typicality = DEFAULT_TYPICALITY

    @cached_property
    def state(self) -> int:
        """The 64-bit state of the request's noise, before a position is mixed in."""
        return request_state(self.sampling.seed)

    @cached_property
    def bias(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        bias = self.sampling.logit_bias
        return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)

    @cached_property
    def banned(self) -> NDArray[np.int64]:
        return np.array(sorted(self.sampling.banned_tokens), dtype=np.int64)

    @cached_property
    def _banned_sequences(self) -> BannedSequences | None:
        sequences = self.sampling.banned_sequences
        return BannedSequences(sequences) if sequences else None

    def ruled_out(self, text: Sequence[int], path: Sequence[int]) -> Sequence[int]:
        """Return the tokens that would complete a banned sequence after a text and a path below it."""
        banned = self._banned_sequences
        return () if banned is None else banned.ruled_out(text, path)

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        return np.array(sorted(self.end_tokens), dtype=np.int64)

    @cached_property
    def adjusts(self) -> bool:
        s = self.sampling
        return s.penalises or bool(s.logit_bias) or bool(s.banned_tokens)


class SamplingQuery(NamedTuple):
    """A sampling query: everything that decides the token at absolute `position`, besides the row of logits.

    `penalty_state` covers the committed text and is required if the sampling penalises; `path` holds the candidates
    between the committed text and this position. `proposal` is the draft's proposal for this position under REJECTION
    and CONTRASTIVE; CONTRASTIVE requires one. `allowed` are the tokens that a grammar allows here; None: all.
    `ruled_out` are tokens banned at this position only (`RequestSampler.ruled_out`). `text_hash` hashes the text before
    this position (`noise.text_hash`); a draft's draws depend on it (REJECTION).
    """

    sampler: RequestSampler
    position: int
    penalty_state: PenaltyState | None = None
    path: Sequence[int] = ()
    proposal: Proposal | None = None
    allowed: TokenMask | None = None
    ruled_out: Sequence[int] = ()
    text_hash: int = 0

    @property
    def adjusts(self) -> bool:
        """True if logits need processing before the division by the temperature."""
        return (
            self.sampler.adjusts
            or self.allowed is not None
            or self.position < self.sampler.first_end_position
            or bool(self.ruled_out)
        )
