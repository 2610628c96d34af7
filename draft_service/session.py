"""A session at the draft: its text, its token tree, the node to expand next, and the candidates to send."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from draft_service.candidate_queue import CandidateQueue
from draft_service.frontier import Frontier
from draft_service.request import MIN_PROBABILITY, DrafterSessionRequest, ExpansionPolicy
from specdec.decoding import rejection
from specdec.decoding.calibration import RANKS, Calibration, corrected
from specdec.decoding.contrastive import DraftQuery
from specdec.decoding.noise import text_hash
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.query import PenaltyState, SamplingQuery
from specdec.decoding.sampling import Rule
from specdec.decoding.speculation import Scorer
from specdec.decoding.tree import Node, TokenTree
from specdec.serving.errors import InvalidRequestError
from specdec.serving.target_logprobs import TargetLogprobs

MIN_CHILD_LOGPROB = math.log(MIN_PROBABILITY)
"""Minimum logprob of a child, except a node's first. By default, a less probable child would not be expanded even with
its parent as the root."""


MAX_PLACES = 1024
"""Maximum places of a text to keep the target's log-probabilities for, 388 bytes each; later places are dropped."""

UNCALIBRATED = [0.0] * RANKS
"""Shifts of siblings scored by the draft's own probabilities."""


class RootMove(NamedTuple):
    """The effect of a commit on a tree: the new tokens, the nodes on their path (starting at a child of the former
    root), and the nodes alive below the new root."""

    tokens: Sequence[int]
    followed: Sequence[Node]
    alive: frozenset[Node]


class DrafterSession:
    """A draft session, owned by the draft loop's thread.

    A drafter takes the best unexpanded node (`best_logprob`, `take_best`) and gives it children. Their logprobs are
    calibrated; a child is sent, or held back until it is probable enough. A child held back stays in the tree: it may
    become likely once the text comes near, and its parent is not expanded again.
    """

    def __init__(
        self, request: DrafterSessionRequest, policy: ExpansionPolicy, vocabulary: int, calibration: Calibration
    ) -> None:
        self.request = request
        self.policy = policy
        self.vocabulary = vocabulary
        self.max_nodes = policy.max_nodes  # memory is reserved for these at the opening, so later policies are capped
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
        self.outgoing = CandidateQueue(self.tree, request.sampler, policy)
        self._calibration = calibration  # of this text
        self._frontier = Frontier()  # nodes that may have children
        self._too_deep: list[tuple[float, Node]] = []  # off the frontier until the root or the policy changes
        # Unix seconds, to compare with the times at which other machines forget tenants.
        self.begun = time.time() - request.age
        self.overruled: list[int] = []
        """Indices of committed tokens that are not the draft's likeliest guess, ascending."""
        self.places: list[TargetLogprobs] = []
        """Places where the draft was overruled, with the target's log-probabilities, ascending."""
        self._expanded: dict[Node, int] = {}  # live nodes, root included: depth below the root at expansion
        self._frontier.add(0.0, self.tree.root)

    # --- messages from the orchestrator -------------------------------------------------------------

    def commit(self, base: int, tokens: list[int]) -> RootMove:
        """Append committed tokens and move the root; drop nodes off the committed path.

        Tokens committed before are skipped. ValueError if the commit leaves a gap, contradicts the committed text, or
        ends beyond `max_tokens`. InvalidRequestError for a token outside this model's vocabulary, and for a commit that
        fills this model's context in a session that needs its distributions (CONTRASTIVE): properties of this text, not
        faults.
        """
        tree = self.tree
        new_tokens = self._new_tokens(base, tokens)
        followed, passed = self._follow(new_tokens)
        self._restore_deep()
        alive = frozenset(tree.commit(new_tokens))
        if self.request.distributions_required and tree.base >= self.request.context:
            problem = f"make the text {tree.base} tokens long, the draft's context is {self.request.context}"
            raise InvalidRequestError([("committed.tokens", problem)])
        if self.penalty_state is not None:
            self.penalty_state.extend(new_tokens)
        if self.grammar is not None:
            self.grammar.commit(new_tokens)
        self._frontier.descend(passed, alive)
        self._expanded = {node: at for node, at in self._expanded.items() if node in alive or node is tree.root}
        if not self.root_is_expanded:
            self._frontier.add(0.0, tree.root)
        self.outgoing.follow_root(passed, alive)
        return RootMove(new_tokens, followed, alive)

    def add_places(self, places: Sequence[TargetLogprobs]) -> None:
        """Keep the target's log-probabilities at places of committed tokens; `places` ascend, known ones are
        skipped."""
        last = self.places[-1].position if self.places else -1
        new = [place for place in places if place.position > last]
        self.places += new[: MAX_PLACES - len(self.places)]

    def ask(self, query: DraftQuery) -> None:
        """Answer a query about the committed text (CONTRASTIVE). A query about an earlier text comes too late and is
        skipped. ValueError if the rule has no queries, or if the text is not committed yet."""
        rule, base = self.request.sampler.rule, self.tree.base
        if not self.request.distributions_required:
            raise ValueError(f"query: the rule is {rule.name}, must be {Rule.CONTRASTIVE.name}")
        if query.base > base:
            raise ValueError(f"query.base: is {query.base}, the committed text has {base} tokens")
        if query.base == base:
            self.outgoing.ask(query)

    def set_policy(self, policy: ExpansionPolicy) -> None:
        """Replace the policy; it takes effect immediately."""
        self.policy = policy
        self._restore_deep()
        self.outgoing.set_policy(policy)

    def _new_tokens(self, base: int, tokens: list[int]) -> list[int]:
        """Return the tokens of a commit that are not committed yet; errors as in `commit`."""
        known, most = self.tree.base - base, len(self.request.prompt) + self.request.max_tokens
        if base + len(tokens) > most:
            raise ValueError(f"a commit ends at token {base + len(tokens)}, the text has at most {most}")
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
        """Return the nodes on the path of committed tokens, and the path's logprob.

        Record the places where the draft was overruled. Calibrate with the outcome at every node on the path: the child
        that was taken, if any, even if it was not sent. Use the node's depth at expansion, since commits may have
        reduced it.
        """
        node, followed, passed = self.tree.root, [], 0.0
        for place, token in enumerate(tokens, self.tree.base):
            if not node.children:
                break
            child = node.children.get(token)
            taken = None if child is None else list(node.children).index(token)
            if taken != 0:
                self.overruled.append(place)
            if self.policy.scorer is Scorer.CALIBRATED:
                self._calibration.learn(
                    self._expanded[node], taken, [sibling.logprob for sibling in node.children.values()]
                )
            if child is None:
                break
            followed.append(child)
            passed += child.logprob
            node = child
        return followed, passed

    # --- choosing the next node ---------------------------------------------------------------------

    def best_logprob(self) -> float:
        """Return the path logprob of the best node worth expanding; -inf if there is none. Nodes too deep for now are
        set aside."""
        policy = self.policy
        if policy.paused or self.over or self._full:
            return -math.inf
        deepest = self.tree.root.position + policy.deepest
        while self._frontier:
            path_logprob, node = self._frontier.best()
            if node.position <= deepest:
                return path_logprob if path_logprob >= policy.min_logprob else -math.inf
            self._too_deep.append(self._frontier.pop_best())
        return -math.inf

    def take_best(self) -> Node:
        """Remove the best node from the frontier and return it; it counts as expanded."""
        _, node = self._frontier.pop_best()
        self._expanded[node] = node.position - self.tree.root.position
        return node

    def take_node(self, node: Node) -> bool:
        """Take a node from the frontier, whether or not it is the best; it counts as expanded. Return False if it is
        not on the frontier, or not worth expanding now."""
        policy, depth = self.policy, node.position - self.tree.root.position
        if self._full or depth > policy.deepest or node.path_logprob() < policy.min_logprob:
            return False
        if not self._frontier.remove(node):
            return False
        self._expanded[node] = depth
        return True

    def take_root(self) -> bool:
        """Take the root, even if it has children, to add better ones. Return False if the session has `max_nodes`
        nodes."""
        if self._full:
            return False
        self._frontier.remove(self.tree.root)
        self._expanded[self.tree.root] = 0
        return True

    def put_back(self, node: Node) -> None:
        """Return a node to the frontier: the pass that should have given it children failed."""
        self._expanded.pop(node, None)
        self._frontier.add(node.path_logprob(), node)

    @property
    def root_is_expanded(self) -> bool:
        """True if the root has got its children, or gets them in the planned pass."""
        return self.tree.root in self._expanded

    def abandon_frontier(self) -> None:
        """Take all nodes off the frontier, except a root that is not expanded: the next model has computed none of
        their ancestors. It expands nothing until a commit moves the root to an unexpanded node. The tree's candidates,
        and the distributions they were drawn from, stay."""
        self._frontier.clear()
        self._too_deep.clear()
        if not self.root_is_expanded:
            self._frontier.add(0.0, self.tree.root)

    @property
    def over(self) -> bool:
        """True if the text is complete or fills this model's context."""
        return self.tree.base >= self.end

    @property
    def _full(self) -> bool:
        """True if the expanded nodes (without the root), or the offered ones, number `max_nodes`."""
        expanded = len(self._expanded) - (self.tree.root in self._expanded)
        return max(expanded, self.outgoing.offered) >= self.policy.max_nodes

    def _restore_deep(self) -> None:
        """Put nodes set aside as too deep back on the frontier: depths or the policy have changed."""
        for path_logprob, node in self._too_deep:
            self._frontier.add(path_logprob, node)
        self._too_deep.clear()

    # --- children from a drafter --------------------------------------------------------------------

    def query(self, node: Node) -> SamplingQuery:
        """Return the sampling query for the children of a node."""
        path = [ancestor.token for ancestor in node.path()]
        sampler = self.request.sampler
        return SamplingQuery(
            sampler,
            node.position + 1,
            self.penalty_state,
            path,
            allowed=None if self.grammar is None else self.grammar.hint(path),
            ruled_out=sampler.ruled_out(self.tree.committed, path),
            text_hash=text_hash(self.tree.committed, path) if sampler.rule is Rule.REJECTION else 0,
        )

    def width(self, node: Node) -> int:
        return self.policy.width(self._expanded[node])

    def shifts(self, node: Node) -> list[float]:
        """Return the calibration's shifts for the children of a node; zeros for the draft's own probabilities."""
        if self.policy.scorer is Scorer.PROBABILITY:
            return UNCALIBRATED
        return self._calibration.shifts(self._expanded[node])

    def add_calibrated(self, node: Node, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add the children that the policy allows, from `tokens` with calibrated logprobs, both likeliest first. A
        child that exists already (`take_root`) gets its new logprob; one that is missing from `tokens` becomes the
        last."""
        path_logprob, least = node.path_logprob(), -math.inf if self.policy.expansion else MIN_CHILD_LOGPROB
        earlier = frozenset(node.children)
        found: dict[int, float] = {}
        for token, logprob in zip(tokens[: self.width(node)], logprobs, strict=False):
            # Keep the first child even if improbable: the likeliest next token is always sent.
            if logprob == -math.inf or (logprob < least and found):
                break
            found[token] = logprob
            if token not in earlier:
                self._add_child(node, token, logprob, path_logprob + logprob)
        if earlier and found:
            self._rank_again(node, found)

    def _rank_again(self, node: Node, found: Mapping[int, float]) -> None:
        """Give children their new logprobs, likeliest first. The others follow them, none more likely."""
        children, lowest = node.children, min(found.values())
        for token, child in children.items():
            child.logprob = found.get(token, min(child.logprob, lowest))
        node.children = {token: children[token] for token in (*found, *children) if token in children}
        self._restore_deep()
        self._frontier.rescore()
        self.outgoing.rescore()

    def add_draws(self, node: Node, tokens: Sequence[int], distribution: DraftDistribution) -> None:
        """Add children drawn from this distribution without replacement, in the order of the draws (REJECTION). The
        first is always added, the others if they are probable enough, within `max_nodes`. Their number is computed
        without the drawn tokens, since it must not depend on them."""
        node.distribution = distribution
        estimates = np.log(rejection.acceptances(distribution, len(tokens)))
        (logprobs,) = corrected([self.shifts(node)], estimates[None]).tolist()
        path_logprob, least = node.path_logprob(), -math.inf if self.policy.expansion else MIN_CHILD_LOGPROB
        probable = sum(logprob >= least for logprob in logprobs)  # logprobs are non-increasing
        count = max(1, min(probable, self.policy.max_nodes - self.outgoing.offered))
        added = [
            self._grow(node, token, logprob, path_logprob + logprob)
            for token, logprob in zip(tokens[:count], logprobs, strict=False)
        ]
        if added[0] is not None:
            self.outgoing.add(path_logprob + logprobs[0], added[0])

    def add_distribution(self, node: Node, distribution: DraftDistribution) -> None:
        node.distribution = distribution
        self.outgoing.add_distribution(node)

    def _add_child(self, parent: Node, token: int, logprob: float, path_logprob: float) -> None:
        child = self._grow(parent, token, logprob, path_logprob)
        if child is not None:
            self.outgoing.add(path_logprob, child)

    def _grow(self, parent: Node, token: int, logprob: float, path_logprob: float) -> Node | None:
        """Add a child to the tree, and to the frontier if it may have children."""
        child = self.tree.add(parent, token, logprob)
        if child is not None and child.position < self.end - 1 and token not in self.request.end_tokens:
            self._frontier.add(path_logprob, child)
        return child
