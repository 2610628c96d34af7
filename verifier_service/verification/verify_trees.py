"""Verifies the trees of all sessions in a step together.

All sessions advance one level at a time, so that one vectorised call makes all their choices. Each session's walker
applies its choices (`tree_verification.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specdec.decoding import contrastive
from specdec.decoding.block_verification import ChainQuery
from specdec.decoding.choice import Tokens, choose
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.decoding.step_logits import StepLogits
from specdec.decoding.typical import TypicalQuery
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

    def chain(self) -> ChainQuery | None:
        """Return the query about a chain below the current node; None if the node is decided alone."""

    def typical(self) -> TypicalQuery | None:
        """Return the query about the candidates below the current node (TYPICAL); None if there is none."""

    def query(self) -> SamplingQuery:
        """Return the sampling query below the current node; GrammarError if the grammar is too complex."""

    def take(self, token: int) -> bool:
        """Commit the chosen token and move to its child; return False if verification ends here."""

    def fail(self, error: Exception) -> None:
        """End verification with an error: non-finite logits, or a grammar too complex to give a mask."""

    def lack(self, tokens: Tokens) -> None:
        """End verification at an undecided row: the draft's distribution lacks some of the plausible `tokens`
        (CONTRASTIVE)."""


def verify_trees(walkers: Sequence[TreeWalker], rows: StepLogits) -> None:
    """Verify the trees of all walkers, each until it ends or fails. A chain stops at a node that has several children
    or a non-finite row; the token after that node is then chosen on its own."""
    while walkers:
        walkers = _at_one_level(_past_typical(_past_chains(walkers, rows), rows), rows)


def _past_chains(walkers: Sequence[TreeWalker], rows: StepLogits) -> Sequence[TreeWalker]:
    """Verify the chains below the current nodes; return the walkers that go on."""
    queries = [walker.chain() for walker in walkers]
    asked = [query for query in queries if query is not None]
    if not asked:
        return walkers
    remaining: list[TreeWalker] = []
    found = iter(rows.verify_chains(asked))
    for walker, query in zip(walkers, queries, strict=True):
        tokens = list[int]()
        if query is not None:
            accepted, drawn = next(found)
            tokens = query.draws[:accepted] + ([] if drawn is None else [drawn])
        for token in tokens:
            if not walker.take(token):
                break
        else:  # all tokens taken, or no chain
            remaining.append(walker)
    return remaining


def _past_typical(walkers: Sequence[TreeWalker], rows: StepLogits) -> Sequence[TreeWalker]:
    """Take the typical candidates below the current nodes (TYPICAL); return the walkers that go on."""
    queries = [walker.typical() for walker in walkers]
    asked = [query for query in queries if query is not None]
    if not asked:
        return walkers
    found = iter(rows.accept_typical(asked))
    accepted = [[] if query is None else next(found) for query in queries]
    return [
        walker for walker, tokens in zip(walkers, accepted, strict=True) if all(walker.take(token) for token in tokens)
    ]


def _at_one_level(walkers: Sequence[TreeWalker], rows: StepLogits) -> list[TreeWalker]:
    """Choose a token at the current node of each walker; return the walkers that go on."""
    queries: list[SamplingQuery] = []
    asking: list[TreeWalker] = []
    for walker in walkers:
        try:
            queries.append(walker.query())
        except GrammarError as error:
            _, (finite,) = rows.choose([walker.row], [ANY])  # if not finite, its memory must be wiped
            walker.fail(GrammarFailureError(str(error)) if finite else NotFiniteError())
        else:
            asking.append(walker)
    remaining: list[TreeWalker] = []
    if asking:
        tokens, sound = rows.choose([walker.row for walker in asking], queries)
        undecided: list[tuple[TreeWalker, SamplingQuery]] = []
        for walker, query, token, finite in zip(asking, queries, tokens.tolist(), sound.tolist(), strict=True):
            if not finite:
                walker.fail(NotFiniteError())
            elif token == contrastive.UNDECIDED:
                undecided.append((walker, query))
            elif walker.take(token):
                remaining.append(walker)
        if undecided:
            lacking = rows.plausible([walker.row for walker, _ in undecided], [query for _, query in undecided])
            for (walker, _), plausible in zip(undecided, lacking, strict=True):
                walker.lack(plausible)
    return remaining


def warm_up(vocabulary: int) -> None:
    """Draw a token, so that no request waits for code to be compiled, or loaded from the cache folder, on first use."""
    from specdec.decoding import gumbel_pruning  # Numba takes a second to import, wasted on a refused start
    from specdec.engine.cpu.code_cache import kept

    kept("collect", gumbel_pruning.__file__, gumbel_pruning.collect)
    choose(np.zeros((1, vocabulary), dtype=np.float32), [SamplingQuery(RequestSampler(Sampling(temperature=1.0)), 0)])
