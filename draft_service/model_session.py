"""The language model's part of a draft session: KV slots, and the plan of the coming forward pass."""

from __future__ import annotations

import math

from draft_service.children import Computed
from draft_service.kv_slots import SessionSlots
from draft_service.session import RootMove, Session
from specdec.decoding.candidates import AskedRow
from specdec.decoding.tree import Node
from specdec.engine.batch import Packer
from specdec.engine.kv.slots import Slots


class ModelSession:
    """A session as the language model sees it. A pass computes either pending text or nodes: the root's children can be
    known only when all of the text is computed."""

    def __init__(self, session: Session, slots: Slots) -> None:
        self.session = session
        self.slots = SessionSlots(slots)
        self._planned: list[Node] = []  # whose logits the planned pass computes
        self._wanted: list[int] = []  # for each of them, the index of its row among the logits
        self._planned_text = 0  # tokens of the text that the planned pass computes

    @property
    def pending_text(self) -> int:
        """Committed tokens that must be computed before anything can be proposed."""
        return self.session.tree.base - self.slots.computed

    def commit(self, move: RootMove) -> None:
        """Follow a commit."""
        self.slots.follow_root(move.followed, move.alive)

    # --- a forward pass -----------------------------------------------------------------------------

    def plan_text(self, packer: Packer, budget: int) -> int:
        """Plan to compute pending text, at the start or after a correction: one chain of at most `budget` rows. Return
        the number of rows."""
        start = self.slots.computed
        text = self.session.tree.committed[start : start + budget]
        self._planned_text = len(text)
        rows = packer.add_rows(text, start, self.slots.add_text(len(text)))
        packer.add_path(self.slots.text, rows)
        if not self.pending_text:
            self._planned.append(self.session.take_best())
            self._wanted.append(packer.want(rows[-1]))
        return len(text)

    def plan_nodes(self, packer: Packer, most: int) -> int:
        """Plan to compute the most probable nodes, of which there is one: `most` at most. Return how many."""
        session, slots, planned = self.session, self.slots, self._planned
        branches: list[list[int]] = []
        rows: list[int] = []
        while len(planned) < most and (not planned or session.best_logprob() > -math.inf):
            node = session.take_best()
            planned.append(node)
            rows.append(packer.add_row(node.token, node.position, slots.add_node(node)))
            branches.append([slots.nodes[ancestor] for ancestor in node.path()])
        packer.add_leaves(slots.text, branches, rows)
        self._wanted = [packer.want(row) for row in rows]
        return len(planned)

    def undo_plan(self) -> None:
        """Undo the plan of a pass that has failed: its text and nodes are to be computed again."""
        root = self.session.tree.root
        self.slots.remove(self._planned_text, [node for node in self._planned if node is not root])
        for node in self._planned:
            self.session.put_back(node)
        self.forget_plan()

    def computed(self) -> list[Computed]:
        """Return the nodes of the planned pass, with the rows of its logits."""
        session, planned = self.session, zip(self._planned, self._wanted, strict=True)
        rows = [(node, AskedRow(row, session.query(node), session.vocabulary)) for node, row in planned]
        return [Computed(session, node, row) for node, row in rows]

    def forget_plan(self) -> None:
        """Plan the next pass from here on."""
        self._planned, self._wanted, self._planned_text = [], [], 0
