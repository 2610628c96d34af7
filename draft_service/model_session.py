"""The language model's part of a draft session: KV slots, and the plan of the coming forward pass."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draft_service.kv_slots import SessionSlots
from draft_service.session import RootMove, Session
from draft_service.tree_rows import add_nodes
from specdec.decoding import contrastive, rejection
from specdec.decoding.candidates import draft_candidates
from specdec.decoding.processing import MAX_ABS_LOGIT
from specdec.decoding.sampling import Rule
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
        return self.session.tree.base - len(self.slots.text)

    def commit(self, move: RootMove) -> None:
        """Follow a commit."""
        self.slots.follow_root(move.followed, move.alive)

    # --- a forward pass -----------------------------------------------------------------------------

    def plan_text(self, packer: Packer, budget: int) -> int:
        """Plan to compute pending text, at the start or after a correction: one chain of at most `budget` rows. Return
        the number of rows."""
        start = len(self.slots.text)
        text = self.session.tree.committed[start : start + budget]
        self._planned_text = len(text)
        rows = packer.add_rows(text, start, self.slots.add_text(len(text)))
        packer.add_path(self.slots.text, rows)
        if not self.pending_text:
            self._planned.append(self.session.take_best())
            self._wanted.append(packer.want(rows[-1]))
        return len(text)

    def plan_nodes(self, packer: Packer, most: int) -> int:
        """Plan to compute the most probable nodes, `most` at most; return how many."""
        planned = self._planned
        while len(planned) < most and self.session.best_logprob() > -np.inf:
            node = self.session.take_best()
            planned.append(node)
            self.slots.add_node(node)
        rows = add_nodes(packer, self.slots.text, self.slots.nodes, planned)
        self._wanted = [packer.want(row) for row in rows]
        return len(planned)

    def undo_plan(self) -> None:
        """Undo the plan of a pass that has failed: its text and nodes are to be computed again."""
        root = self.session.tree.root
        self.slots.remove(self._planned_text, [node for node in self._planned if node is not root])
        for node in self._planned:
            self.session.put_back(node)
        self._forget_plan()

    def expand(self, logits: NDArray[np.float32]) -> None:
        """Give the nodes that the pass has computed children, from its logits [wanted rows, vocabulary]. A broken row
        gives none; FloatingPointError if the rule cannot do without it."""
        for node, index in zip(self._planned, self._wanted, strict=True):
            row = logits[index, : self.session.vocabulary]
            if abs(row.max()) < MAX_ABS_LOGIT:
                self._add_children(node, row)
            elif self.session.request.distributions_required:
                raise FloatingPointError("the draft's logits are not finite")
        self._forget_plan()

    def _forget_plan(self) -> None:
        self._planned, self._wanted, self._planned_text = [], [], 0

    def _add_children(self, node: Node, logits: NDArray[np.float32]) -> None:
        """Give a node children, by the request's rule."""
        session, sampler = self.session, self.session.request.sampler
        query = session.query(node)
        if sampler.rule is Rule.REJECTION:
            if (proposal := rejection.propose(logits, query)) is not None:
                assert proposal.token is not None
                session.add_draw(node, proposal.token, proposal.row)
            return
        if sampler.rule is Rule.CONTRASTIVE:
            session.add_distribution(node, contrastive.amateur_distribution(logits, sampler.contrast))
        tokens, logprobs = draft_candidates(logits, query, session.policy.max_branches)
        session.add_children(node, tokens, logprobs)
