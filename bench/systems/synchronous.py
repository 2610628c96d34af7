"""The synchronous baseline: speculative decoding by request and response (Leviathan et al. 2023), over our protocol.

After every verify result the draft proposes K candidates for the new text and sends them as one Extend; the verifier
steps a session once the Extend for its current text has come. Nothing is drafted ahead and nothing is sent in between:
a round takes a target step, the draft's steps (K for a chain) and every hop between them. Engines, loops, protocol,
orchestrator and tokens are the same as in the ordinary system. `bench.systems.pod` runs either service as a process.

K is a request's `max_depth`: a chain of K if its `max_branches` is 1, else the K best nodes of a tree.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import draft_service.servicer
import draft_service.session
import verifier_service.servicer
import verifier_service.sessions.session
from draft_service.candidate_queue import CandidateQueue, Extension
from draft_service.frontier import Frontier
from draft_service.request import ExpansionPolicy
from draft_service.session import RootMove
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Rule
from specdec.decoding.speculation import Outlook
from specdec.decoding.tree import Node, Paths, TokenTree
from specdec.serving.response_queue import ResponseQueue
from specdec.serving.timeline import Timeline
from specdec.v2 import draft_pb2, verifier_pb2
from verifier_service.backend.request import Policy
from verifier_service.backend.result import CommitDetails, VerifyResult
from verifier_service.backend.session_backend import BackendSession
from verifier_service.responses import SessionResponses
from verifier_service.settings.tuning import DEFAULTS

TUNING = replace(DEFAULTS, latency=replace(DEFAULTS.latency, certain_error=math.inf))
"""A step verifies the draft's whole answer: no step omits candidates to learn the cost of fewer rows."""


class RankedFrontier(Frontier):
    """A frontier that also returns the path logprob of its k-th best node."""

    def logprob_of(self, place: int) -> float:
        """Return the path logprob of the best node (`place` 1), the second best (2), ...; -inf if there are fewer."""
        entries = heapq.nsmallest(place, self._heap)
        return -entries[-1][0] - self._passed if len(entries) == place else -math.inf


class AllAtOnce(CandidateQueue):
    """A send queue that holds every candidate back until the K best are known, and sends these together."""

    def __init__(
        self, tree: TokenTree, sampler: RequestSampler, policy: ExpansionPolicy, complete: Callable[[], bool]
    ) -> None:
        super().__init__(tree, sampler, policy)
        self._held_back: RankedFrontier = RankedFrontier()
        self.answered = 0  # base of the last Extend
        self._complete = complete  # returns True if nothing is left to expand

    def add(self, path_logprob: float, node: Node) -> None:
        self._hold_back(path_logprob, node)

    def _release(self) -> None:
        """Hold everything back: only `pop_extension` offers candidates."""

    def kth_best(self) -> float:
        """Return the path logprob of the last of the K best nodes; -inf if there are fewer."""
        return self._held_back.logprob_of(self._policy.max_nodes)

    def send_at(self, now: float, step: float) -> float:
        """Return a past time once nothing is left to expand: an answer is sent even without candidates."""
        return -math.inf if self.answered != self._tree.base and self._complete() else math.inf

    def pop_extension(self, now: float) -> Extension:
        """Return the K best candidates without improbable ones; an answer may have none."""
        self.answered = self._tree.base
        while self._held_back and len(self._unsent) < self._policy.max_nodes:
            if self._unsent and self._held_back.best()[0] < self._policy.min_logprob:
                break
            self._offer_best()
        return super().pop_extension(now)

    def resend(self) -> None:
        super().resend()
        self.answered = 0


class DraftSession(draft_service.session.DrafterSession):
    """A draft session that drafts from scratch after each commit, and answers it once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.outgoing: AllAtOnce = AllAtOnce(
            self.tree, self.request.sampler, self.policy, lambda: self.best_logprob() == -math.inf
        )

    def commit(self, base: int, tokens: list[int]) -> RootMove:
        """Append committed tokens, and restart the tree: the root is recomputed, for its children."""
        move = super().commit(base, tokens)
        if not move.tokens:
            return move
        root = self.tree.root
        self.tree.root = Node(root.token, root.position, None, 0.0, 0)
        self.tree.size = 0
        self._frontier.clear()
        self._frontier.add(0.0, self.tree.root)
        self._expanded.clear()
        self.outgoing.follow_root(0.0, ())
        whole = len(move.followed) == len(move.tokens)
        return RootMove(move.tokens, move.followed[:-1] if whole else move.followed, frozenset())

    def best_logprob(self) -> float:
        """Return -inf once the answer is sent, or once the K best are known: no other node can lead to a better one."""
        best = -math.inf if self.outgoing.answered == self.tree.base else super().best_logprob()
        return best if best > self.outgoing.kth_best() else -math.inf


class DraftServicer(draft_service.servicer.DraftServicer):
    """A draft servicer of synchronous sessions."""

    def parse(self, request: draft_pb2.DraftRequest, deadline: float | None) -> DraftSession:
        plain = super().parse(request, deadline)
        calibration = self._calibrations.of(plain.request.sampler, request.open.tenant)
        return DraftSession(plain.request, plain.policy, plain.vocabulary, calibration)

    def _policy(self, message: draft_pb2.DraftPolicy, most_nodes: int, rule: Rule) -> ExpansionPolicy:
        """Return a policy of K nodes, regardless of the break-even probability; improbable nodes are omitted, for a
        faster answer."""
        policy = super()._policy(message, most_nodes, rule)
        nodes = min(policy.max_depth, most_nodes)
        return replace(
            policy,
            max_nodes=nodes,
            min_path_probability=self._limits.defaults.min_path_probability,
            extend_interval=0.0,
        )


class VerifierSession(verifier_service.sessions.session.VerifierSession):
    """A verifier session that skips steps until its draft has answered."""

    _answered = 0  # base of the last Extend

    @property
    def computable(self) -> int:
        """Committed tokens available for a step: all, except the root until the draft has answered."""
        return self.remaining_prompt + (self._answered == self.tree.base or not self.policy.remote)

    def extend(self, base: int, paths: Paths, arrived: float, base_age: float = 0.0) -> None:
        super().extend(base, paths, arrived, base_age)
        self._answered = base


class VerifierServicer(verifier_service.servicer.VerifierServicer):
    """A verifier servicer of synchronous sessions."""

    def parse(self, request: verifier_pb2.VerifyRequest, deadline: float | None) -> VerifierSession:
        plain = cast("verifier_service.sessions.session.VerifierSession", super().parse(request, deadline))
        vocabulary = self.identity.vocabulary_size
        return VerifierSession(plain.request, plain.policy, self._limits.max_nodes, vocabulary)

    def attach(
        self,
        session: BackendSession,
        responses: ResponseQueue[verifier_pb2.VerifyResponse],
        timeline: Timeline,
    ) -> None:
        self._backend.serve(session, responses, FreeOfCharge(timeline), timeline)

    def _policy(self, message: verifier_pb2.VerifyPolicy, rule: Rule) -> Policy:
        """Return the policy without step delay, since a draft sends one answer only, and without the speculation
        controller."""
        return replace(super()._policy(message, rule), patience=0.0, forced=True)


class FreeOfCharge(SessionResponses):
    """Requests candidates at any cost: otherwise the draft would pause, and this verifier would wait for it forever."""

    def commit(self, result: VerifyResult, details: CommitDetails) -> verifier_pb2.VerifyResponse:
        return super().commit(result, replace(details, outlook=Outlook(drafting_wanted=True, break_even=0.0)))
