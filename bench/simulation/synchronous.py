"""The usual way to speculate, as a baseline: draft and target take turns.

The draft waits for the verdict, drops what it has guessed, grows a tree of `max_nodes` and sends it at once; the
target steps a session only with the candidates for its present text.
"""

from __future__ import annotations

from dataclasses import replace

from draft_service import session as draft
from draft_service.servicer import DraftServicer
from specdec.decoding.tree import Paths
from specdec.v1 import draft_pb2, verifier_pb2
from verifier_service import session as verifier
from verifier_service.servicer import VerifierServicer


class WaitingSession(verifier.Session):
    """At the target."""

    _answered = -1  # the base that the last candidates start from

    def extend(self, base: int, paths: Paths, arrived: float) -> None:
        super().extend(base, paths, arrived)
        self._answered = base

    @property
    def computable(self) -> int:
        return self.remaining_prompt + (self._answered == self.tree.base)


class TurnTakingSession(draft.Session):
    """At the draft."""

    def commit(self, base: int, tokens: list[int]) -> None:
        super().commit(base, tokens)
        root = self.tree.root
        self._free += [node.state for node in root.walk() if isinstance(node.state, int)]
        root.children.clear()
        self.tree.size = 0
        self.unsent = []
        if not self.unread_text:
            self._free.append(self.prefix.pop())  # read anew, for what follows it

    def follow(self, policy: draft.GrowthPolicy) -> None:
        """Neither price nor pace: every turn has its tree."""
        super().follow(replace(policy, min_reach=0.0, extend_interval=0.0))

    def due(self, now: float) -> bool:
        return bool(self.unsent) and not self.frontier(1)


class WaitingVerifier(VerifierServicer):
    def parse(self, request: verifier_pb2.VerifyRequest) -> WaitingSession:
        usual = super().parse(request)
        impatient = replace(usual.policy, patience=0.0)
        return WaitingSession(usual.request, impatient, self._limits.max_nodes, self._identity.vocabulary_size)


class TurnTakingDraft(DraftServicer):
    def parse(self, request: draft_pb2.DraftRequest) -> TurnTakingSession:
        usual = super().parse(request)
        policy = replace(usual.policy, min_reach=0.0)
        return TurnTakingSession(usual.request, policy, usual.vocabulary, self._calibration(usual.request.chooser))
