"""A session at the draft: its text, its token tree, which node to expand next, and what is to be sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draft_service.frontier import Frontier
from draft_service.request import MIN_PROBABILITY, ExpansionPolicy, SessionRequest
from draft_service.send_queue import SendQueue
from specdec.decoding import rejection
from specdec.decoding.calibration import Calibration, corrected
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.query import PenaltyState, SamplingQuery
from specdec.decoding.tree import Node, TokenTree
from specdec.serving.errors import InvalidRequestError

MIN_CHILD_LOGPROB = math.log(MIN_PROBABILITY)
"""Logprob below which a child is not added (but for a node's first): it would not be expanded even with its parent as
the root."""


class RootMove(NamedTuple):
    """The move of a tree's root by a commit: the new tokens, the nodes that they go through, from the former root's
    child down, and the nodes that are left below the new root."""

    tokens: Sequence[int]
    followed: Sequence[Node]
    alive: frozenset[Node]


class Session:
    """A draft session, owned by the draft loop's thread.

    A drafter takes the best node that is not expanded (`best_logprob`, `take_best`) and gives it children. Their
    logprobs are calibrated, and each is sent, or held back until it is probable enough. All are kept: one that is
    improbable now may be likely once the text has come near, and its parent is not expanded again.
    """

    def __init__(
        self, request: SessionRequest, policy: ExpansionPolicy, vocabulary: int, calibration: Calibration
    ) -> None:
        self.request = request
        self.policy = policy
        self.vocabulary = vocabulary
        self.max_nodes = policy.max_nodes  # of the opening: there is memory for no more, whatever a later policy allows
        self.grammar = None if request.grammar is None else request.grammar.begin(request.generated, request.end_tokens)
        self.end = min(len(request.prompt) + request.max_tokens, request.context)
        self.tree = TokenTree(
            request.prompt + request.generated,
            vocabulary=vocabulary,
            last_position=self.end - 1,
            end_tokens=request.end_tokens,
        )
        self.penalty_state = (
            PenaltyState(vocabulary, request.prompt, request.generated) if request.sampler.sampling.penalises else None
        )
        self.outgoing = SendQueue(self.tree, request.sampler.rule, policy)
        self._calibration = calibration  # of this text
        self._frontier = Frontier()  # nodes that may have children
        self._too_deep: list[tuple[float, Node]] = []  # taken from the frontier until root or policy change
        self._expanded: dict[Node, int] = {}  # of the root and the nodes below it, and how deep each was at the time
        self._frontier.add(0.0, self.tree.root)

    # --- what the orchestrator sends ----------------------------------------------------------------

    def commit(self, base: int, tokens: list[int]) -> RootMove:
        """Append committed tokens and move the root; nodes that contradict them are dropped.

        Tokens that are known already are skipped. ValueError if the commit leaves a gap, contradicts the committed
        text, or exceeds this model's context in a session that cannot do without it (CONTRASTIVE). InvalidRequestError
        if it has a token that this model does not know, which is a fact of this text and no fault.
        """
        tree = self.tree
        new_tokens = self._new_tokens(base, tokens)
        followed, passed = self._follow(new_tokens)
        self._restore_deep()
        alive = frozenset(tree.commit(new_tokens))
        if self.request.distributions_required and tree.base >= self.request.context:
            raise ValueError(f"the text has {tree.base} tokens, the draft's context is {self.request.context}")
        if self.penalty_state is not None:
            self.penalty_state.extend(new_tokens)
        if self.grammar is not None:
            self.grammar.commit(new_tokens)
        self._frontier.descend(passed, alive)
        self._expanded = {node: at for node, at in self._expanded.items() if node in alive or node is tree.root}
        if tree.root not in self._expanded:
            self._frontier.add(0.0, tree.root)
        self.outgoing.follow_root(passed, alive)
        return RootMove(new_tokens, followed, alive)

    def set_policy(self, policy: ExpansionPolicy) -> None:
        """Expand and send by another policy from now on."""
        self.policy = policy
        self._restore_deep()
        self.outgoing.set_policy(policy)

    def _new_tokens(self, base: int, tokens: list[int]) -> list[int]:
        """Return the tokens of a commit that are not committed yet; ValueError if it cannot be."""
        known = self.tree.base - base
        if known < 0:
            raise ValueError(f"commit at {base}, the committed text has {self.tree.base} tokens")
        overlap, new_tokens = tokens[:known], tokens[known:]
        if self.tree.committed[base : base + len(overlap)] != overlap:
            raise ValueError(f"commit at {base} contradicts the committed text")
        if max(tokens, default=0) >= self.vocabulary:
            problem = f"has token {max(tokens)}, the draft's vocabulary has {self.vocabulary} tokens"
            raise InvalidRequestError([("committed.tokens", problem)])
        return new_tokens

    def _follow(self, tokens: Sequence[int]) -> tuple[list[Node], float]:
        """Return the nodes that committed tokens go through, and the logprob of their path. Calibrate by which
        children, if any, the tokens are, whether or not they were sent: at the depth at which these were made, since
        the draft runs ahead and the text comes nearer."""
        node, followed, passed = self.tree.root, [], 0.0
        for token in tokens:
            if not node.children:
                break
            child = node.children.get(token)
            taken = None if child is None else list(node.children).index(token)
            self._calibration.learn(
                self._expanded[node], taken, [sibling.logprob for sibling in node.children.values()]
            )
            if child is None:
                break
            followed.append(child)
            passed += child.logprob
            node = child
        return followed, passed

    # --- which node is next -------------------------------------------------------------------------

    def best_logprob(self) -> float:
        """Return the path logprob of the best node that is worth expanding; -inf if there is none. Nodes that are too
        deep for now are put aside."""
        policy = self.policy
        if policy.paused or self.over or self._full:
            return -math.inf
        deepest = self.tree.root.position + policy.max_depth - 1
        while self._frontier:
            path_logprob, node = self._frontier.best()
            if node.position <= deepest:
                return path_logprob if path_logprob >= policy.min_logprob else -math.inf
            self._too_deep.append(self._frontier.take())
        return -math.inf

    def take_best(self) -> Node:
        """Return the best node, which counts as expanded from now on."""
        _, node = self._frontier.take()
        self._expanded[node] = node.position - self.tree.root.position
        return node

    def put_back(self, node: Node) -> None:
        """Count a node as not expanded: what was to give it children has failed."""
        self._expanded.pop(node, None)
        self._frontier.add(node.path_logprob(), node)

    @property
    def over(self) -> bool:
        """True if the text is complete, or longer than what this model can hold."""
        return self.tree.base >= self.end

    @property
    def _full(self) -> bool:
        """True if `max_nodes` nodes are expanded or offered. The root is none of them."""
        expanded = len(self._expanded) - (self.tree.root in self._expanded)
        return max(expanded, self.outgoing.offered) >= self.policy.max_nodes

    def _restore_deep(self) -> None:
        """Put nodes that were too deep back on the frontier, since depths or the policy change."""
        for path_logprob, node in self._too_deep:
            self._frontier.add(path_logprob, node)
        self._too_deep.clear()

    # --- what a drafter gives a node ----------------------------------------------------------------

    def query(self, node: Node) -> SamplingQuery:
        """Return the sampling query below a node."""
        path = [ancestor.token for ancestor in node.path()]
        allowed = None if self.grammar is None else self.grammar.hint(path)
        return SamplingQuery(self.request.sampler, node.position + 1, self.penalty_state, path, allowed=allowed)

    def shifts(self, node: Node) -> list[float]:
        """Return the calibration's shifts of a node's children."""
        return self._calibration.shifts(self._expanded[node])

    def add_calibrated(self, node: Node, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add children as the policy wants them, the likeliest first, from `tokens` with calibrated logprobs."""
        path_logprob = node.path_logprob()
        for token, logprob in zip(tokens[: self.policy.max_branches], logprobs, strict=False):
            if logprob < MIN_CHILD_LOGPROB and (node.children or logprob == -math.inf):
                break
            self._add_child(node, token, logprob, path_logprob + logprob)

    def add_draw(self, node: Node, token: int, distribution: DraftDistribution) -> None:
        """Add one child that was drawn from this distribution (REJECTION). Whether it is added must not depend on which
        token it is, so the token is not looked at."""
        node.distribution = distribution
        (logprob,) = self._calibration.corrected(self._expanded[node], [math.log(rejection.acceptance(distribution))])
        self._add_child(node, token, logprob, node.path_logprob() + logprob)

    def add_distribution(self, node: Node, distribution: DraftDistribution) -> None:
        """Add the draft's distribution over a node's children (CONTRASTIVE)."""
        node.distribution = distribution
        self.outgoing.add_distribution(node)

    def _add_child(self, parent: Node, token: int, logprob: float, path_logprob: float) -> None:
        child = self.tree.add(parent, token, logprob)
        if child is None:
            return
        if child.position < self.end - 1 and token not in self.request.end_tokens:
            self._frontier.add(path_logprob, child)
        self.outgoing.add(path_logprob, child)


def add_children(
    nodes: Sequence[tuple[Session, Node]], tokens: NDArray[np.int64], logprobs: NDArray[np.float64]
) -> dict[Session, Exception]:
    """Give nodes of sessions children: a draft's tokens and their logprobs, [n, width] each, the likeliest first. Where
    a node has fewer, logprobs are -inf. Return the sessions that cannot go on, and why."""
    failed: dict[Session, Exception] = {}
    calibrated = corrected([session.shifts(node) for session, node in nodes], logprobs)
    for (session, node), own_tokens, own_logprobs in zip(nodes, tokens.tolist(), calibrated.tolist(), strict=True):
        try:
            session.add_calibrated(node, own_tokens, own_logprobs)
        except Exception as error:  # one session's error does not end the others
            failed[session] = error
    return failed
