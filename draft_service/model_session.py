"""The language model's part of a draft session: KV slots, and the plan of the coming forward pass."""

from __future__ import annotations

import math

from draft_service.children import Computed
from draft_service.kv_slots import SessionSlots
from draft_service.session import DrafterSession, RootMove
from specdec.decoding.candidates import AskedRow
from specdec.decoding.tree import Node
from specdec.engine.batch import Packer
from specdec.engine.kv.slots import Slots


class ModelSession:
    """A session as the language model sees it. A pass computes either its pending text or its nodes: the root has no
    children until the whole text is computed."""

    def __init__(self, session: DrafterSession, slots: Slots) -> None:
        self.session = session
        self.slots = SessionSlots(slots)
        self._planned: list[Node] = []  # nodes that get logits in the planned pass
        self._wanted: list[int] = []  # their rows' indices among the logits
        self._planned_text = 0  # text tokens computed by the planned pass

    @property
    def pending_text(self) -> int:
        """Committed tokens still to be computed before the session can propose anything."""
        return self.session.tree.base - self.slots.computed

    def commit(self, move: RootMove) -> None:
        """Follow a commit."""
        self.slots.follow_root(move.followed, move.alive)

    # --- a forward pass -----------------------------------------------------------------------------

    def plan_text(self, packer: Packer, budget: int) -> int:
        """Plan to compute pending text, at the start or after a correction, as one chain of at most `budget` rows.
        Return the number of rows."""
        start = self.slots.computed
        text = self.session.tree.committed[start : start + budget]
        self._planned_text = len(text)
        rows = packer.add_rows(text, start, self.slots.add_text(len(text)))
        packer.add_path(self.slots.text, rows)
        if not self.pending_text:
            self._planned.append(self.session.take_best())
            self._wanted.append(packer.want(rows[-1]))
        return len(text)

    def plan_nodes(self, packer: Packer, most: int, break_even: float) -> int:
        """Plan to compute the best node, which must exist, and the next ones whose path logprob reaches `break_even`:
        at most `most` in all. Return their number."""
        session, slots, planned = self.session, self.slots, self._planned
        branches: list[list[int]] = []
        rows: list[int] = []
        while len(planned) < most and (not planned or -math.inf < session.best_logprob() >= break_even):
            node = session.take_best()
            planned.append(node)
            rows.append(packer.add_row(node.token, node.position, slots.add_node(node)))
            branches.append([slots.nodes[ancestor] for ancestor in node.path()])
        packer.add_leaves(slots.text, branches, rows)
        self._wanted = [packer.want(row) for row in rows]
        return len(planned)

    def undo_plan(self) -> None:
        """Undo the plan of a failed pass: free its slots and put its nodes back on the frontier."""
        root = self.session.tree.root
        self.slots.remove(self._planned_text, [node for node in self._planned if node is not root])
        for node in self._planned:
            self.session.put_back(node)
        self.forget_plan()

    def computed(self) -> list[Computed]:
        """Return the nodes of the planned pass with their rows of logits."""
        session, planned = self.session, zip(self._planned, self._wanted, strict=True)
        rows = [(node, AskedRow(row, session.query(node), session.vocabulary)) for node, row in planned]
        return [Computed(session, node, row) for node, row in rows]

    def forget_plan(self) -> None:
        """Clear the plan, for the next pass."""
        self._planned, self._wanted, self._planned_text = [], [], 0
