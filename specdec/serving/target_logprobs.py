"""The target's log-probabilities at places where it overruled a draft, for drafts that learn from them.

They describe the target's own distribution: at temperature 1, before penalties and truncation, as in
`specdec.decoding.logprobs`. With a vocabulary below 2^21, a place takes 5 bytes on the wire for each of its
MAX_TOP tokens, plus about 12.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.logprobs import TokenLogprobs
from specdec.v2 import model_pb2

MAX_TOP = 64
"""Maximum tokens of a place. The rest of the distribution counts as one further token."""

STORED = np.dtype("<f2")
"""Log-probabilities in a message: float16, little-endian."""

MAX_SUM = 1.01
"""Limit on the sum of a place's probabilities: rounding to float16 adds less than 0.01."""


class TargetLogprobs(NamedTuple):
    """The target's k likeliest tokens at one place."""

    position: int  # in the text, of the token that the target chose
    tokens: NDArray[np.uint32]  # [k], the likeliest first
    logprobs: NDArray[np.float16]  # [k], nats

    @classmethod
    def of(cls, position: int, found: TokenLogprobs) -> TargetLogprobs:
        """Return the log-probabilities found for a token, without tokens that the target rules out."""
        logprobs = np.asarray(found.top_logprobs, dtype=np.float32)
        possible = logprobs > np.finfo(np.float16).min
        return cls(
            position, np.asarray(found.top_tokens, dtype=np.uint32)[possible], logprobs[possible].astype(np.float16)
        )

    @property
    def message(self) -> model_pb2.TargetLogprobs:
        return model_pb2.TargetLogprobs(
            position=self.position, tokens=self.tokens.tolist(), logprobs=self.logprobs.astype(STORED).tobytes()
        )


def places_of(
    messages: Sequence[model_pb2.TargetLogprobs], begin: int, end: int, vocabulary: int
) -> list[TargetLogprobs]:
    """Return the places in messages about the tokens `begin` to `end` of a text; ValueError if a place is invalid."""
    if len(messages) > end - begin:
        raise ValueError(f"overruled: has {len(messages)} places, must have at most {end - begin}, one per token")
    found = []
    for message in messages:
        if not begin <= message.position < end:
            raise ValueError(
                f"overruled: has position {message.position}, must be from {begin} to {end - 1}, ascending"
            )
        begin = message.position + 1
        found.append(_place(message, vocabulary))
    return found


def _place(message: model_pb2.TargetLogprobs, vocabulary: int) -> TargetLogprobs:
    count, size = len(message.tokens), len(message.logprobs)
    if not 1 <= count <= MAX_TOP or size != STORED.itemsize * count:
        raise ValueError(
            f"overruled: has {count} tokens and {size} bytes, must have 1 to {MAX_TOP} of {STORED.itemsize} bytes"
        )
    tokens = np.asarray(message.tokens, dtype=np.uint32)
    logprobs = np.frombuffer(message.logprobs, dtype=STORED).astype(np.float32)
    if tokens.max() >= vocabulary or len(np.unique(tokens)) < count:
        raise ValueError(f"overruled: must have distinct token ids below {vocabulary}, the highest is {tokens.max()}")
    if not np.isfinite(logprobs).all() or (logprobs[1:] > logprobs[:-1]).any():
        raise ValueError("overruled: has log-probabilities that are not finite, or rise")
    if logprobs[0] > 0 or np.exp(logprobs).sum() > MAX_SUM:
        raise ValueError(f"overruled: has probabilities that sum to more than {MAX_SUM:g}")
    return TargetLogprobs(message.position, tokens, logprobs.astype(np.float16))


@dataclass(frozen=True, eq=False)
class PackedPlaces:
    """The places of a text, packed. Places with fewer than MAX_TOP tokens are padded, with log-probabilities of
    -inf."""

    positions: NDArray[np.uint32]  # [n], ascending
    tokens: NDArray[np.uint32]  # [n, MAX_TOP]
    logprobs: NDArray[np.float16]  # [n, MAX_TOP]

    @classmethod
    def of(cls, places: Sequence[TargetLogprobs]) -> PackedPlaces:
        tokens = np.zeros((len(places), MAX_TOP), dtype=np.uint32)
        logprobs = np.full((len(places), MAX_TOP), -np.inf, dtype=np.float16)
        for row, place in enumerate(places):
            tokens[row, : len(place.tokens)] = place.tokens
            logprobs[row, : len(place.logprobs)] = place.logprobs
        return cls(np.asarray([place.position for place in places], dtype=np.uint32), tokens, logprobs)

    def __len__(self) -> int:
        return len(self.positions)

    def after(self, cut: int) -> PackedPlaces:
        """Return the places that remain if the text loses its first `cut` tokens."""
        kept = self.positions >= cut
        return PackedPlaces(self.positions[kept] - np.uint32(cut), self.tokens[kept], self.logprobs[kept])

    def before(self, later: PackedPlaces) -> PackedPlaces:
        """Return these places up to the first of `later`, then `later`."""
        if not len(later):
            return self
        kept = self.positions < later.positions[0]
        return PackedPlaces(
            np.concatenate([self.positions[kept], later.positions]),
            np.concatenate([self.tokens[kept], later.tokens]),
            np.concatenate([self.logprobs[kept], later.logprobs]),
        )

    def last(self, most: int) -> PackedPlaces:
        """Return a copy of the last `most` places, so that the memory of the others can be freed."""
        begin = max(0, len(self) - most)
        return PackedPlaces(self.positions[begin:].copy(), self.tokens[begin:].copy(), self.logprobs[begin:].copy())

    @property
    def messages(self) -> Iterator[model_pb2.TargetLogprobs]:
        for position, tokens, logprobs in zip(self.positions.tolist(), self.tokens, self.logprobs, strict=True):
            possible = np.isfinite(logprobs)
            yield TargetLogprobs(position, tokens[possible], logprobs[possible]).message


PLACE_BYTES = MAX_TOP * (4 + 2) + 4
"""Bytes of a place in `PackedPlaces`."""

NO_PLACES = PackedPlaces.of([])
