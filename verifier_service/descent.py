"""A session's way down its tree, from the logits of one step to a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdec.decoding.choice import Ask
from specdec.decoding.proposal import Proposal
from specdec.decoding.tree import Node
from verifier_service.planned import Below, Planned
from verifier_service.verdict import BONUS, CORRECTION, DRAFT, PLAIN, Verdict

if TYPE_CHECKING:
    from verifier_service.session import Session


class Descent:
    """One of the walkers of a `walk`."""

    __slots__ = ("_node", "_path", "error", "moves", "planned", "row", "rows", "session", "verdict")

    def __init__(self, session: Session, planned: Planned) -> None:
        assert planned.tip is not None  # a piece of prompt decides nothing
        self.session = session
        self.planned = planned
        offered = 0 if planned.below is None else len(planned.below.results)
        self.verdict = Verdict(session.tree.base, offered)
        self.moves: list[tuple[int, int]] = []  # slots (from, to) to copy
        self.rows: list[int] = []  # results visited
        self.error: Exception | None = None
        self.row = planned.tip
        self._node = session.tree.root
        self._path: list[int] = []

    def ask(self) -> Ask:
        return self._ask(self._node, self._path)

    def asks(self) -> Iterator[tuple[int, Ask]]:
        """What may be asked about the window and on any way: rows of the results, and the question to each. A window
        may ask about a row of the way as well; the later question, by which a token is committed, is the one that
        counts."""
        yield from self.asks_ahead()
        yield self.row, self.ask()
        if self.planned.below is not None:
            for node in self.planned.below.candidates:
                yield self.planned.below.results[id(node)], self._ask(node, [step.token for step in node.path()])

    @property
    def foresees(self) -> int:
        """Places at which its window wants to know the choice."""
        return 0 if self.planned.below is None else len(self.planned.below.foreseen)

    def asks_ahead(self) -> Iterator[tuple[int, Ask]]:
        """What its window asks, likewise."""
        below = self.planned.below
        if below is not None and below.foresight is not None:
            asks = self.session.guesser.asks(below.foresight, self.session.history)
            yield from zip(below.foreseen, asks, strict=True)

    def take(self, token: int) -> bool:
        position = self._node.position + 1
        below = self.planned.below
        child = None if below is None else self._tested(below, token)
        self.rows.append(self.row)
        verdict = self.verdict
        verdict.tokens.append(token)
        verdict.sources.append(self._source(child))
        verdict.finish = self.session.finish(token, position)
        if below is None or child is None:
            return False
        verdict.accepted += 1
        written, own = below.slots[id(child)], int(self.session.slots[position])
        if written != own:
            self.moves.append((written, own))
        self._path.append(token)
        self._node, self.row = child, below.results[id(child)]
        return not verdict.finish

    def fail(self, error: Exception) -> None:
        self.error = error

    def _tested(self, below: Below, token: int) -> Node | None:
        """The candidate that has been chosen, if there was one in this step; the guesser hears of its own."""
        for guessed in self._node.children.values():
            if guessed.origin != DRAFT and id(guessed) in below.results:
                self.session.guesser.tested(guessed, guessed.token == token)
        child = self._node.children.get(token)
        return child if child is not None and id(child) in below.results else None

    def _ask(self, node: Node, path: list[int]) -> Ask:
        """A sampled child is put to the test whether or not it is in this step: if it is accepted, what the draft has
        grown below it stays alive."""
        proposal = None if node.row is None else Proposal(next(iter(node.children), None), node.row)
        return Ask(self.session.request.chooser, node.position + 1, self.session.history, path, proposal)

    def _source(self, child: Node | None) -> int:
        if child is not None:
            return child.origin
        below = self.planned.below
        if below is None or not below.results:
            return PLAIN
        offered = any(id(other) in below.results for other in self._node.children.values())
        return CORRECTION if offered else BONUS
