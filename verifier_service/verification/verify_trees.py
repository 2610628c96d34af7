"""The walk: from the logits of a step to what every session commits.

From the tip take the target's own choice, go to the child that carries it, stop where there is none. All sessions
go down together, one level at a time, so that their choices are made by one vectorised call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specdec.decoding.choice import RequestSampler, SamplingQuery, choose
from specdec.decoding.sampling import Sampling
from specdec.decoding.step_logits import StepLogits


class TreeWalker(Protocol):
    """A session on its way down."""

    row: int
    """That of its present node."""

    def query(self) -> SamplingQuery:
        """What is to be chosen there."""

    def take(self, token: int) -> bool:
        """Go on with the choice; False at the end of the way."""

    def fail(self, error: Exception) -> None:
        """Its logits cannot be used."""


def verify_trees(walkers: Sequence[TreeWalker], rows: StepLogits) -> None:
    """Take every walker to the end of its way."""
    while walkers:
        tokens, sound = rows.choose([walker.row for walker in walkers], [walker.query() for walker in walkers])
        going: list[TreeWalker] = []
        for walker, token, finite in zip(walkers, tokens.tolist(), sound.tolist(), strict=True):
            if not finite:
                walker.fail(FloatingPointError("the model's logits are not finite"))
            elif walker.take(token):
                going.append(walker)
        walkers = going


def warm_up(vocabulary: int) -> None:
    """Draw a token, so that no request has to wait for what is compiled when it is first used."""
    choose(np.zeros((1, vocabulary), dtype=np.float32), [SamplingQuery(RequestSampler(Sampling(temperature=1.0)), 0)])
