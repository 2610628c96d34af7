"""Tree verification: from the logits of a step to the tokens committed for every session.

Start at the root, take the target's own choice, move to the child with that token, and stop where there is none. All
sessions advance together, one level at a time, so that one vectorised call makes all their choices.

With `specdec/decoding/choice.py` and `specdec/decoding/rejection.py`, where a row's token is chosen under each
acceptance rule, this is the whole of speculative decoding.
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
"""The query for a row's likeliest token."""


class NotFiniteError(FloatingPointError):
    """The logits of a row are not finite."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite")


class TreeWalker(Protocol):
    """A session's position in its tree during verification, at first the root."""

    row: int
    """Index of the current node's logits among the results."""

    def query(self) -> SamplingQuery:
        """Return the sampling query below the current node; GrammarError if the grammar is too complex for one."""

    def take(self, token: int) -> bool:
        """Commit the chosen token and move to its child; return False if verification ends here."""

    def fail(self, error: Exception) -> None:
        """End verification with an error: non-finite logits, or a grammar too complex to give a mask."""


def verify_trees(walkers: Sequence[TreeWalker], rows: StepLogits) -> None:
    """Verify the trees of all walkers, each until it ends or fails."""
    while True:
        queries: list[SamplingQuery] = []
        asking: list[TreeWalker] = []
        for walker in walkers:
            try:
                queries.append(walker.query())
            except GrammarError as error:
                _, (finite,) = rows.choose([walker.row], [ANY])  # non-finite: its memory must be wiped
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
    """Draw a token, so that no request waits for code compiled on first use or loaded from the cache folder."""
    from specdec.decoding import gumbel_pruning  # Numba takes a second to import, wasted on a refused start
    from specdec.engine.cpu.code_cache import kept

    kept("collect", gumbel_pruning.__file__, gumbel_pruning.collect)
    choose(np.zeros((1, vocabulary), dtype=np.float32), [SamplingQuery(RequestSampler(Sampling(temperature=1.0)), 0)])
