"""Tree verification: from the logits of a step to the tokens that every session commits.

Start at the root, take the target's own choice, go to the child with that token, and stop where there is none. All
sessions go down together, one level at a time, so that one vectorised call makes all their choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specdec.decoding.choice import choose
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.decoding.step_logits import StepLogits
from specdec.grammar.grammar import GrammarError
from specdec.serving.errors import GrammarFailureError

ANY = SamplingQuery(RequestSampler(Sampling(temperature=0.0)), 0)
"""Asks a row for its likeliest token."""


class NotFiniteError(FloatingPointError):
    """The logits of a row are broken."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite")


class TreeWalker(Protocol):
    """A session whose tree is being verified. It stands at a node, at first the root."""

    row: int
    """Index of the present node's logits among the results."""

    def query(self) -> SamplingQuery:
        """Return the sampling query below the present node; GrammarError if its grammar is too complex to have one."""

    def take(self, token: int) -> bool:
        """Commit the chosen token and go to its child; False if verification ends here."""

    def fail(self, error: Exception) -> None:
        """End verification with an error: the logits are broken, or the grammar says nothing of what may come next."""


def verify_trees(walkers: Sequence[TreeWalker], rows: StepLogits) -> None:
    """Verify the trees of all walkers, each until it ends or fails."""
    while True:
        queries: list[SamplingQuery] = []
        asking: list[TreeWalker] = []
        for walker in walkers:
            try:
                queries.append(walker.query())
            except GrammarError as error:
                _, (finite,) = rows.choose([walker.row], [ANY])  # its memory is wiped if it is not
                walker.fail(GrammarFailureError(str(error)) if finite else NotFiniteError())
            else:
                asking.append(walker)
        if not asking:
            return
        walkers = asking
        tokens, sound = rows.choose([walker.row for walker in walkers], queries)
        remaining: list[TreeWalker] = []
        for walker, token, finite in zip(walkers, tokens.tolist(), sound.tolist(), strict=True):
            if not finite:
                walker.fail(NotFiniteError())
            elif walker.take(token):
                remaining.append(walker)
        walkers = remaining


def warm_up(vocabulary: int) -> None:
    """Draw a token, so that no request has to wait for the code that is compiled on first use, or comes from the cache
    folder."""
    from specdec.decoding import gumbel_pruning  # Numba takes a second to import, and a refused start needs none of it
    from specdec.engine.cpu.code_cache import kept

    kept("collect", gumbel_pruning.__file__, gumbel_pruning.collect)
    choose(np.zeros((1, vocabulary), dtype=np.float32), [SamplingQuery(RequestSampler(Sampling(temperature=1.0)), 0)])
