"""Traffic splitting: which revision of a model a request gets, by their shares.

Requests without a seed are split at random. One with a seed gets the same revision whenever it comes, as long as the
shares stay: it would have other tokens otherwise, and nobody would know why. Nor does it get another one for
speculating differently.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from typing import Protocol, TypeVar

from specdec.v2 import generation_pb2

PART = 4096
TURNS = 16
"""Characters or tokens at each end of a prompt, and turns at each end of a conversation, that decide where a request
with a seed falls."""


class Choice(Protocol):
    """What has a share."""

    @property
    def share(self) -> float:
        """Relative to others; 0: it is not chosen."""

    @property
    def ready(self) -> bool:
        """Whether requests can be served by it now."""


Chosen = TypeVar("Chosen", bound=Choice)


def point_of(request: generation_pb2.GenerateRequest) -> float:
    """Return where in [0, 1) a request falls: one with a seed by seed and prompt, others anywhere."""
    if not request.sampling.HasField("seed"):
        return random.random()
    seed = request.sampling.seed.to_bytes(8, "little")
    return float(int.from_bytes(hashlib.sha256(seed + _ends(request)).digest()[:8], "little") >> 11) / 2**53


def _ends(request: generation_pb2.GenerateRequest) -> bytes:
    """Return the beginning and the end of a prompt, and how long it is: it may be of megabytes, which are not looked at
    yet."""
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
    """Return the revision at a point of [0, 1), on which they lie side by side, each as long as its share. One that is
    not ready is passed over, unless none is; at least one must have a share."""
    left = [each for each in revisions if each.share > 0]
    first = chosen = _at(left, point)
    while not chosen.ready and len(left) > 1:
        left.remove(chosen)
        chosen = _at(left, point)
    return chosen if chosen.ready else first


def _at(revisions: Sequence[Chosen], point: float) -> Chosen:
    wanted = point * sum(each.share for each in revisions)
    for each in revisions[:-1]:
        wanted -= each.share
        if wanted < 0:
            return each
    return revisions[-1]
