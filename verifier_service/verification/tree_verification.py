"""A session's way down its tree, from the logits of one step to a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdec.decoding.choice import SamplingQuery
from specdec.decoding.proposal import Proposal
from specdec.decoding.tree import Node
from verifier_service.scheduling.batch_plan import ScheduledRows, TreeRows
from verifier_service.verification.result import BONUS, CORRECTION, DRAFT, PLAIN, VerifyResult

if TYPE_CHECKING:
    from verifier_service.session import Session


class TreeVerification:
    """One of the walkers of a `verify_trees`."""

    __slots__ = ("_node", "_path", "error", "kv_copies", "planned", "result", "row", "rows", "session")

    def __init__(self, session: Session, planned: ScheduledRows) -> None:
        assert planned.root_row is not None  # a piece of prompt decides nothing
        self.session = session
        self.planned = planned
        offered = 0 if planned.tree is None else len(planned.tree.results)
        self.result = VerifyResult(session.tree.base, offered)
        self.kv_copies: list[tuple[int, int]] = []  # slots (from, to) to copy
        self.rows: list[int] = []  # results visited
        self.error: Exception | None = None
        self.row = planned.root_row
        self._node = session.tree.root
        self._path: list[int] = []

    def query(self) -> SamplingQuery:
        return self._query(self._node, self._path)

    def queries(self) -> Iterator[tuple[int, SamplingQuery]]:
        """What may be asked about the window and on any way: rows of the results, and the question to each. A window
        may ask about a row of the way as well; the later question, by which a token is committed, is the one that
        counts."""
        yield from self.lookahead_queries()
        yield self.row, self.query()
        if self.planned.tree is not None:
            for node in self.planned.tree.candidates:
                yield self.planned.tree.results[id(node)], self._query(node, [step.token for step in node.path()])

    @property
    def lookahead_count(self) -> int:
        """Places at which its window wants to know the choice."""
        return 0 if self.planned.tree is None else len(self.planned.tree.lookahead_results)

    def lookahead_queries(self) -> Iterator[tuple[int, SamplingQuery]]:
        """What its window asks, likewise."""
        tree = self.planned.tree
        if tree is not None and tree.lookahead is not None:
            queries = self.session.ngrams.queries(tree.lookahead, self.session.penalty_state)
            yield from zip(tree.lookahead_results, queries, strict=True)

    def take(self, token: int) -> bool:
        position = self._node.position + 1
        tree = self.planned.tree
        child = None if tree is None else self._tested(tree, token)
        self.rows.append(self.row)
        result = self.result
        result.tokens.append(token)
        result.sources.append(self._source(child))
        result.finish = self.session.finish(token, position)
        if tree is None or child is None:
            return False
        result.accepted += 1
        written, own = tree.slots[id(child)], int(self.session.slots[position])
        if written != own:
            self.kv_copies.append((written, own))
        self._path.append(token)
        self._node, self.row = child, tree.results[id(child)]
        return not result.finish

    def fail(self, error: Exception) -> None:
        self.error = error

    def _tested(self, tree: TreeRows, token: int) -> Node | None:
        """The candidate that has been chosen, if there was one in this step; the guesser hears of its own."""
        for guessed in self._node.children.values():
            if guessed.origin != DRAFT and id(guessed) in tree.results:
                self.session.ngrams.learn(guessed, guessed.token == token)
        child = self._node.children.get(token)
        return child if child is not None and id(child) in tree.results else None

    def _query(self, node: Node, path: list[int]) -> SamplingQuery:
        """A sampled child is put to the test whether or not it is in this step: if it is accepted, what the draft has
        grown below it stays alive."""
        proposal = None if node.distribution is None else Proposal(next(iter(node.children), None), node.distribution)
        return SamplingQuery(
            self.session.request.sampler, node.position + 1, self.session.penalty_state, path, proposal
        )

    def _source(self, child: Node | None) -> int:
        if child is not None:
            return child.origin
        tree = self.planned.tree
        if tree is None or not tree.results:
            return PLAIN
        offered = any(id(other) in tree.results for other in self._node.children.values())
        return CORRECTION if offered else BONUS
