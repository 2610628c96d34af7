"""One session at the draft: its text, its growing tree, and the memory of both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draft_service.frontier import Frontier
from draft_service.send_timing import SendTimer
from specdec.decoding import contrastive, rejection
from specdec.decoding.calibration import Calibration
from specdec.decoding.choice import RequestSampler, SamplingQuery
from specdec.decoding.processing import MAX_ABS_LOGIT, PenaltyState
from specdec.decoding.sampling import Rule
from specdec.decoding.tree import Node, Paths, TokenTree, spell
from specdec.engine.batch import Packer
from specdec.engine.kv.slots import Slots

DISTRIBUTIONS_A_MESSAGE = 4
"""Whole distributions in a message, about: one over a vocabulary of 128,000 tokens takes a quarter of a megabyte."""

PAUSED_LAG_TOKENS = 512
"""Tokens that a draft at rest leaves unread: short texts cost its neighbours nothing, and whenever it is wanted again
it has caught up in a step."""

MIN_PROBABILITY = 0.002
"""Probability, from which on a node is read at all."""

MIN_CHILD_LOGPROB = math.log(MIN_PROBABILITY)
"""A child that is less likely than this below its parent will not be read even once the text has come to it."""

SEND_FACTOR = 3.0
"""In least reaches. What is grown ahead of need lies mostly where the text will not go: it is sent once the text has
come so near. That halves the bytes, at no cost in tokens a second (`python -m bench.simulate`)."""


class Extension(NamedTuple):
    """New candidates below the committed text of `base` tokens, which has been known for `held` seconds; 0: for longer
    than that."""

    base: int
    paths: Paths
    held: float


@dataclass(frozen=True)
class ExpansionPolicy:
    """A validated DraftPolicy."""

    max_nodes: int = 256  # so many offered to the verifier at most, and so many read
    max_depth: int = 64
    max_branches: int = 5
    min_path_probability: float = MIN_PROBABILITY
    extend_interval: float = 0.0  # seconds
    round_trip: float = 0.0  # seconds; 0: unknown
    paused: bool = False  # nothing is to be done but to keep up, more or less

    @property
    def min_logprob(self) -> float:
        """`min_path_probability` as a log-probability."""
        if self.paused:
            return 0.0
        return math.log(self.min_path_probability) if self.min_path_probability > 0 else -math.inf

    @property
    def min_sent_logprob(self) -> float:
        """Log-probability, from which on a node is sent."""
        return self.min_logprob + math.log(SEND_FACTOR)


@dataclass(frozen=True)
class SessionRequest:
    """A validated DraftOpen."""

    prompt: list[int]
    generated: list[int]
    sampler: RequestSampler
    end_tokens: frozenset[int]
    max_tokens: int
    context: int


class Session:
    """Owned by the draft loop's thread.

    A node's `state` is its slot of key/value memory once the model has read it, None before; its
    children exist only after that, and are all kept: what is hopeless now is likely once the text has come near,
    and its parent is not read again. `prefix` are the slots of the committed text as far as it is read;
    when a commit follows the tree, the nodes' slots become the prefix's: nothing is copied.
    """

    def __init__(
        self, request: SessionRequest, policy: ExpansionPolicy, vocabulary: int, calibration: Calibration
    ) -> None:
        self.request = request
        self.policy = policy
        self.vocabulary = vocabulary
        self._calibration = calibration  # shared with the sessions that it also fits
        self.end = min(len(request.prompt) + request.max_tokens, request.context)
        self.penalty_state = (
            PenaltyState(vocabulary, request.prompt, request.generated) if request.sampler.sampling.penalises else None
        )
        self.slots: Slots = np.zeros(0, dtype=np.int64)
        text = request.prompt + request.generated
        self.tree = TokenTree(text, vocabulary=vocabulary, last_position=self.end - 1, end_tokens=request.end_tokens)
        self.prefix: list[int] = []
        self.unsent: list[Node] = []
        self.unsent_distributions: list[Node] = []  # nodes whose distribution over their children is to be sent
        self._frontier = Frontier()  # nodes that may have children
        self._too_deep: list[tuple[float, Node]] = []  # of them, as long as root and policy stay
        self._held_back = Frontier()  # not worth a message until the text has come nearer
        self.send_timer = SendTimer()
        self._free: list[int] = []
        self._planned: list[tuple[Node, int]] = []  # (node, index among the results)
        self._computed = 0  # tokens of the prefix before the step that is planned
        self._computing: list[Node] = []  # nodes that it reads

    def allocate(self, slots: Slots) -> None:
        """Take possession of memory, enough for the text and every node."""
        self.slots = slots
        self._free = slots.tolist()

    def undo_step(self) -> None:
        """Take back what was planned for a step that has failed: it counts as not read."""
        self._free += self.prefix[self._computed :]
        del self.prefix[self._computed :]
        for node in self._computing:
            assert isinstance(node.state, int)
            self._free.append(node.state)
            node.state = None
            self._frontier.add(node.path_logprob(), node)
        self._computing, self._planned = [], []

    @property
    def _required(self) -> bool:
        """Whether no token can be chosen without what this session says."""
        return self.request.sampler.rule is Rule.CONTRASTIVE

    # --- what the verifier said --------------------------------------------------------------------

    def commit(self, base: int, tokens: list[int]) -> None:
        """Re-root at the new text; what contradicts it is dropped, memory and all.

        A commit that overlaps what is known is cut to its news; ValueError if it leaves a gap, contradicts
        the committed text, names a token this model does not have, or leaves this model behind where the
        session cannot do without it.
        """
        tree = self.tree
        known = tree.base - base
        if known < 0:
            raise ValueError(f"commit at {base}, the committed text has {tree.base} tokens")
        overlap, news = tokens[:known], tokens[known:]
        if tree.committed[base : base + len(overlap)] != overlap:
            raise ValueError(f"commit at {base} contradicts the committed text")
        if max(tokens, default=0) >= self.vocabulary:
            raise ValueError(f"token {max(tokens)} is not in the draft's vocabulary of {self.vocabulary}")
        held = {node.state for node in tree.root.walk()}
        self._learn(news)
        node, passed = (None if self.pending_text else tree.root), 0.0
        for token in news:
            node = node.children.get(token) if node is not None else None
            if node is None or node.state is None:
                break
            assert isinstance(node.state, int)
            self.prefix.append(node.state)
            passed += node.logprob
        self._restore_deep()
        tree.commit(news)
        if self._required and tree.base >= self.request.context:
            raise ValueError(f"the text has {tree.base} tokens, the draft's context is {self.request.context}")
        if self.penalty_state is not None:
            self.penalty_state.extend(news)
        alive = set(tree.root.walk())
        self._frontier.descend(passed, alive)
        self._held_back.descend(passed, alive)
        self.unsent = [n for n in self.unsent if n in alive]
        self.unsent_distributions = [n for n in self.unsent_distributions if n is tree.root or n in alive]
        if self._required and tree.root.distribution is not None and tree.root not in self.unsent_distributions:
            self.unsent_distributions.append(tree.root)  # it may have been dropped where there was no room for its node
        self._release()
        kept = {*(n.state for n in alive), *self.prefix[base:]}
        self._free += [slot for slot in held - kept if isinstance(slot, int)]

    def _learn(self, tokens: list[int]) -> None:
        """How often is the target's choice a child, and which? Offered or not, each verdict tells."""
        node: Node | None = self.tree.root
        for depth, token in enumerate(tokens):
            if node is None or not node.children:
                return
            siblings = list(node.children)
            taken = siblings.index(token) if token in node.children else None
            self._calibration.learn(depth, taken, [child.logprob for child in node.children.values()])
            node = node.children.get(token)

    # --- growing -----------------------------------------------------------------------------------

    @property
    def pending_text(self) -> int:
        """Committed tokens to be read before anything can be guessed."""
        return self.tree.base - len(self.prefix)

    def best_logprob(self) -> float:
        """Log-reach of the best node that is worth reading: 0 while there is text to be read, -inf if there is none.
        What is too deep for now is put aside."""
        policy, tree = self.policy, self.tree
        if tree.base >= self.end:
            return -math.inf  # the text is over, or past what this model can hold
        if self.pending_text > (PAUSED_LAG_TOKENS if policy.paused else 0):
            return 0.0
        if policy.paused or self._full:
            return -math.inf
        while self._frontier:
            path_logprob, node = self._frontier.best()
            if self._depth(node) < policy.max_depth:
                return path_logprob if path_logprob >= policy.min_logprob else -math.inf
            self._too_deep.append(self._frontier.take())
        return -math.inf

    @property
    def _full(self) -> bool:
        """Whether there is no memory for another node, or no credit for what it would bring."""
        read = len(self.slots) - len(self._free) - len(self.prefix)
        return max(read, self._offered) >= self.policy.max_nodes

    @property
    def _offered(self) -> int:
        """Nodes that were sent, or are about to be."""
        return self.tree.size - len(self._held_back)

    def _restore_deep(self) -> None:
        """Depths are about to change, or how much of it is wanted."""
        for path_logprob, node in self._too_deep:
            self._frontier.add(path_logprob, node)
        self._too_deep.clear()

    def _depth(self, node: Node) -> int:
        return node.position - self.tree.root.position

    def _may_have_children(self, node: Node) -> bool:
        return node.position < self.end - 1 and node.token not in self.request.end_tokens

    def plan_text(self, packer: Packer, budget: int) -> int:
        """Catching up, after a correction or at the start: one chain of at most `budget` rows; how many."""
        start = self._computed = len(self.prefix)
        text = self.tree.committed[start : start + budget]
        slots = [self._free.pop() for _ in text]
        self.prefix += slots
        rows = packer.add_rows(text, start, slots)
        packer.add_path(np.asarray(self.prefix), list(rows))
        if len(self.prefix) == self.tree.base:
            self._planned.append((self.tree.root, packer.want(rows[-1])))
        return len(text)

    def plan_nodes(self, packer: Packer, most: int) -> int:
        """The nodes most worth reading, `most` at most; how many.

        One lane: the prefix, the nodes' ancestors, the nodes; a mask says who sees whom."""
        self._computed, chosen = len(self.prefix), self._computing
        while len(chosen) < most and self.best_logprob() > -math.inf:
            _, node = self._frontier.take()
            node.state = self._free.pop()
            chosen.append(node)
        tail: dict[int, int] = {}  # id(node) -> column after the prefix
        column_slots: list[int] = []
        column_positions: list[int] = []
        paths = [node.path() for node in chosen]
        for path in paths:
            for node in path:
                if id(node) not in tail:
                    tail[id(node)] = len(column_slots)
                    assert isinstance(node.state, int)
                    column_slots.append(node.state)
                    column_positions.append(node.position)
        base = self.tree.base
        visible = np.zeros((len(chosen), base + len(tail)), dtype=bool)
        visible[:, :base] = True
        rows: list[int] = []
        for i, (node, path) in enumerate(zip(chosen, paths, strict=True)):
            visible[i, [base + tail[id(n)] for n in path]] = True
            assert isinstance(node.state, int)
            row = packer.add_row(node.token, node.position, node.state)
            rows.append(row)
            self._planned.append((node, packer.want(row)))
        keys = np.asarray(self.prefix + column_slots)
        packer.add_tree(keys, np.asarray([*range(base), *column_positions]), rows, visible)
        return len(chosen)

    def expand(self, logits: NDArray[np.float32]) -> None:
        """Give the nodes just read children, by the request's rule. A broken row of logits gives none."""
        for node, index in self._planned:
            row = logits[index, : self.vocabulary]
            if abs(row.max()) < MAX_ABS_LOGIT:
                query = SamplingQuery(
                    self.request.sampler, node.position + 1, self.penalty_state, [n.token for n in node.path()]
                )
                if self.request.sampler.rule is Rule.REJECTION:
                    self._sample(node, row, query)
                else:
                    self._branch(node, row, query)
            elif self._required:
                raise FloatingPointError("the draft's logits are not finite")
        self._computing, self._planned = [], []

    def _sample(self, node: Node, logits: NDArray[np.float32], query: SamplingQuery) -> None:
        """One child, drawn. Whether there is one must not depend on which it is, so nothing is asked of it."""
        proposal = rejection.propose(logits, query)
        if proposal is None:
            return
        token, node.distribution = proposal
        assert token is not None
        (logprob,) = self._calibration.corrected(self._depth(node), [math.log(rejection.acceptance(node.distribution))])
        self._add_child(node, token, logprob, node.path_logprob() + logprob)

    def _branch(self, node: Node, logits: NDArray[np.float32], query: SamplingQuery) -> None:
        """The likeliest children."""
        policy, sampler = self.policy, self.request.sampler
        if sampler.rule is Rule.CONTRASTIVE:
            node.distribution = contrastive.amateur_distribution(logits, sampler.contrast)
            if node not in self._held_back:
                self.unsent_distributions.append(node)
        tokens, logprobs = sampler.draft_candidates(
            logits, query.position, query.penalty_state, query.path, policy.max_branches
        )
        path_logprob = node.path_logprob()
        for token, logprob in zip(tokens, self._calibration.corrected(self._depth(node), logprobs), strict=True):
            if logprob < MIN_CHILD_LOGPROB and node.children:
                break
            self._add_child(node, token, logprob, path_logprob + logprob)

    # --- sending -----------------------------------------------------------------------------------

    def _add_child(self, parent: Node, token: int, logprob: float, path_logprob: float) -> None:
        """Make a child of this reach, to be sent and read as far as it is worth it."""
        child = self.tree.add(parent, token, logprob)
        if child is None:
            return
        if self._may_have_children(child):
            self._frontier.add(path_logprob, child)
        if self._worth_sending(path_logprob, child):
            self._offer(child)
        else:
            self._held_back.add(path_logprob, child)

    def _offer(self, node: Node) -> None:
        """Into the next message. A draw goes together with what it was drawn from (REJECTION), and a node that has been
        read with the distribution below it (CONTRASTIVE)."""
        self.unsent.append(node)
        if self.request.sampler.rule is Rule.REJECTION:
            assert node.parent is not None
            self.unsent_distributions.append(node.parent)
        elif node.distribution is not None:
            self.unsent_distributions.append(node)

    def _worth_sending(self, path_logprob: float, node: Node) -> bool:
        """Whether it is near enough, and there is credit for it, itself included. The likeliest next token always is:
        else a verifier would wait for nothing."""
        near = path_logprob >= self.policy.min_sent_logprob and self._offered <= self.policy.max_nodes
        return near or node is self._likeliest

    @property
    def _likeliest(self) -> Node | None:
        """Next token."""
        return next(iter(self.tree.root.children.values()), None)

    def _release(self) -> None:
        """The text has come nearer, or less is worth it now."""
        kept, policy = self._held_back, self.policy
        while kept:
            path_logprob, node = kept.best()  # the likeliest next token, if that is among them
            near = path_logprob >= policy.min_sent_logprob and self._offered < policy.max_nodes
            if not near and node is not self._likeliest:
                break
            self._offer(kept.take()[1])

    def send_at(self, step: float) -> float:
        """The moment from which on what is new is to be sent, perhaps long past; `step`: seconds of a draft's step.

        The distribution of the next token is needed at once: without it nothing can be chosen (CONTRASTIVE), or a draw
        comes after the choice at its place and is lost (REJECTION). Nor do whole ones wait (CONTRASTIVE). Draws do,
        however many there are: an end token is the last of its chain, and when it is sent must not tell of it."""
        if not self.has_unsent:
            return math.inf
        if self.tree.root in self.unsent_distributions or (
            self._required and len(self.unsent_distributions) >= DISTRIBUTIONS_A_MESSAGE
        ):
            return -math.inf
        nothing_sent = len(self.unsent) == self._offered
        policy = self.policy
        return self.send_timer.next_send_at(policy.extend_interval, policy.round_trip, step, urgent=nothing_sent)

    @property
    def has_unsent(self) -> bool:
        """Whether there is anything to send."""
        return bool(self.unsent or self.unsent_distributions)

    def committed_at(self, now: float) -> None:
        """A commit came at that time."""
        self.send_timer.committed(now, unsent=self.has_unsent)

    def take_unsent(self, now: float) -> Extension:
        """What was not sent yet."""
        paths = spell(self.unsent, self.unsent_distributions)
        self.unsent, self.unsent_distributions = [], []
        self.send_timer.sent(now)
        return Extension(self.tree.base, paths, self.send_timer.base_age(now))

    def set_policy(self, policy: ExpansionPolicy) -> None:
        """Grow by another policy from now on."""
        if self.policy.paused and not policy.paused:
            self.send_timer = SendTimer()  # meanwhile it heard of many commits at once
        self.policy = policy
        self._restore_deep()
        self._release()

    def resend(self) -> None:
        """Everything counts as unsent, and nothing is known of how this verifier steps."""
        self.unsent, self.unsent_distributions = [], []
        self._held_back.clear()
        for path_logprob, node in self.tree.by_path_logprob():
            self._held_back.add(path_logprob, node)
        if self._required and self.tree.root.distribution is not None:
            self.unsent_distributions.append(self.tree.root)
        self._release()
        self.send_timer = SendTimer()
