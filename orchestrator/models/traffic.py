"""Traffic splitting: picks the revision of a model for a request, by shares.

Requests without a seed are split at random. A seeded request gets the same revision while the shares stay the same and
that revision is ready, since another revision would give it other tokens. The choice ignores speculation options.
"""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from collections.abc import Sequence
from typing import Protocol, TypeVar

from specdec.v2 import generation_pb2

PART = 4096
TURNS = 16
"""Limits on the hashed parts of a seeded request: PART characters or tokens at each end of a prompt or chat turn, and
TURNS turns at each end of a conversation."""

BELOW_ONE = math.nextafter(1.0, 0.0)


class TrafficTarget(Protocol):
    """Something with a share of the traffic."""

    @property
    def share(self) -> float:
        """The target's traffic relative to that of other targets. A target with share 0 is never chosen."""

    @property
    def ready(self) -> bool:
        """True if the target can serve requests now."""


Chosen = TypeVar("Chosen", bound=TrafficTarget)


def point_of(request: generation_pb2.GenerateRequest) -> float:
    """Return the point of a request in [0, 1): a hash of seed and prompt if it has a seed, else random."""
    if not request.sampling.HasField("seed"):
        return random.random()
    seed = request.sampling.seed.to_bytes(8, "little")
    # 53 bits, the precision of a float: the quotient is exact, and below 1.
    return float(int.from_bytes(hashlib.sha256(seed + _ends(request)).digest()[:8], "little") >> 11) / 2**53


def _ends(request: generation_pb2.GenerateRequest) -> bytes:
    """Return the beginning, the end and the length of a prompt, as bytes. The prompt is not validated yet, and may be
    megabytes long."""
    match request.WhichOneof("prompt"):
        case "text":
            length, part = len(request.text), (request.text[:PART] + request.text[-PART:]).encode()
        case "tokens":
            ids = request.tokens.ids
            length, part = len(ids), array("I", [*ids[:PART], *ids[-PART:]]).tobytes()
        case "chat":
            turns = [turn.content for turn in request.chat.messages[:TURNS] + request.chat.messages[-TURNS:]]
            length = len(request.chat.messages) + sum(map(len, turns))
            part = "\0".join(turn[:PART] + turn[-PART:] for turn in turns).encode()
        case _:
            length, part = 0, b""
    return length.to_bytes(8, "little") + part


def choose(revisions: Sequence[Chosen], point: float) -> Chosen:
    """Return the revision at a point of [0, 1), which is divided among the revisions by share. The part of a revision
    that is not ready is divided among the others by share, unless none is ready. At least one revision must have a
    share above 0."""
    left = [revision for revision in revisions if revision.share > 0]
    first = None
    while left:
        chosen, point = _at(left, point)
        if chosen.ready:
            return chosen
        first = first or chosen
        left.remove(chosen)
    assert first is not None
    return first


def _at(revisions: Sequence[Chosen], point: float) -> tuple[Chosen, float]:
    """Return the revision at a point, and the point's place within that revision's part."""
    wanted = point * sum(revision.share for revision in revisions)
    for revision in revisions:
        if wanted < revision.share:
            break
        wanted -= revision.share
    return revision, min(max(wanted / revision.share, 0.0), BELOW_ONE)  # rounding errors must not leave [0, 1)
