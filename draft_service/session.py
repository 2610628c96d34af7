"""A session at the draft: its text, its token tree, and the memory of both."""

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
"""Whole distributions in a message, about: over a vocabulary of 128,000 tokens each takes a quarter of a megabyte."""

PAUSED_LAG_TOKENS = 512
"""Most committed tokens that a paused draft leaves pending: short texts cost other sessions nothing, and when it is
wanted again it catches up in one step."""

MIN_PROBABILITY = 0.002
"""Least path probability at which a node is computed."""

MIN_CHILD_LOGPROB = math.log(MIN_PROBABILITY)
"""Logprob below which a child is not added (but for a node's first): it would not be computed even with its parent as
the root."""

SEND_FACTOR = 3.0
"""Least path probability at which a node is sent, in multiples of the least at which one is computed.

Most of what is expanded early lies where the text will not go, so it is sent only once the text has come this near.
That halves the bytes, at no cost in tokens a second (`python -m bench simulate`)."""


class Extension(NamedTuple):
    """New candidates below the committed text of `base` tokens, which the draft has known for `held` seconds; 0 if the
    send timer has seen no commit yet."""

    base: int
    paths: Paths
    held: float


@dataclass(frozen=True)
class ExpansionPolicy:
    """A validated DraftPolicy."""

    max_nodes: int = 256  # most nodes offered to the verifier, and most computed
    max_depth: int = 64
    max_branches: int = 5
    min_path_probability: float = MIN_PROBABILITY
    extend_interval: float = 0.0  # least seconds between two messages
    round_trip: float = 0.0  # seconds from verifier to draft and back; 0: unknown
    paused: bool = False  # nothing is to be done but to keep up, more or less

    @property
    def min_logprob(self) -> float:
        """`min_path_probability` as a log-probability."""
        if self.paused:
            return 0.0
        return math.log(self.min_path_probability) if self.min_path_probability > 0 else -math.inf

    @property
    def min_sent_logprob(self) -> float:
        """Least path logprob at which a node is sent."""
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
    """A draft session, owned by the draft loop's thread.

    A node's `state` is its slot in the KV cache once it is computed, None before. Its children exist only after that,
    and all are kept: one that is improbable now may be likely once the text has come near, and its parent is not
    computed again. `prefix` holds the slots of the committed text as far as it is computed; when a commit follows the
    tree, the nodes' slots become the prefix's: nothing is copied.
    """

    def __init__(
        self, request: SessionRequest, policy: ExpansionPolicy, vocabulary: int, calibration: Calibration
    ) -> None:
        self.request = request
        self.policy = policy
        self.vocabulary = vocabulary
        self._calibration = calibration  # shared with sessions of one rule and about one temperature
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
        self._too_deep: list[tuple[float, Node]] = []  # taken from the frontier until root or policy change
        self._held_back = Frontier()  # nodes not sent until the text has come nearer
        self.send_timer = SendTimer()
        self._free: list[int] = []
        self._planned: list[tuple[Node, int]] = []  # (node, index of its row among the step's logits)
        self._computed = 0  # tokens of the prefix before the planned step
        self._computing: list[Node] = []  # nodes that the planned step computes

    def allocate(self, slots: Slots) -> None:
        """Take the session's slots, enough for the text and every node."""
        self.slots = slots
        self._free = slots.tolist()

    def undo_step(self) -> None:
        """Undo the plan of a step that has failed: its text and nodes are pending again."""
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
        """True if the verifier can choose no token without this session's distributions."""
        return self.request.sampler.rule is Rule.CONTRASTIVE

    # --- commits from the verifier -----------------------------------------------------------------

    def commit(self, base: int, tokens: list[int]) -> None:
        """Append committed tokens and move the root; nodes that contradict them are dropped, and their slots freed.

        Tokens that are known already are skipped. ValueError if the commit leaves a gap, contradicts the committed
        text, has a token that this model does not know, or exceeds this model's context in a session that cannot do
        without it (CONTRASTIVE).
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
            self.unsent_distributions.append(tree.root)  # the verifier may have dropped it, having no room for its node
        self._release()
        kept = {*(n.state for n in alive), *self.prefix[base:]}
        self._free += [slot for slot in held - kept if isinstance(slot, int)]

    def _learn(self, tokens: list[int]) -> None:
        """Calibrate by which children, if any, the committed tokens are, whether or not they were sent."""
        node: Node | None = self.tree.root
        for depth, token in enumerate(tokens):
            if node is None or not node.children:
                return
            siblings = list(node.children)
            taken = siblings.index(token) if token in node.children else None
            self._calibration.learn(depth, taken, [child.logprob for child in node.children.values()])
            node = node.children.get(token)

    # --- expansion ---------------------------------------------------------------------------------

    @property
    def pending_text(self) -> int:
        """Committed tokens that must be computed before anything can be proposed."""
        return self.tree.base - len(self.prefix)

    def best_logprob(self) -> float:
        """Return the path logprob of the best node that is worth computing: 0 while text is pending, -inf if there is
        none. Nodes that are too deep for now are put aside."""
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
        """True if `max_nodes` nodes are computed, so that there is no memory for more, or offered already."""
        read = len(self.slots) - len(self._free) - len(self.prefix)
        return max(read, self._offered) >= self.policy.max_nodes

    @property
    def _offered(self) -> int:
        """Number of nodes that were sent or are about to be."""
        return self.tree.size - len(self._held_back)

    def _restore_deep(self) -> None:
        """Put nodes that were too deep back on the frontier, since depths or the policy change."""
        for path_logprob, node in self._too_deep:
            self._frontier.add(path_logprob, node)
        self._too_deep.clear()

    def _depth(self, node: Node) -> int:
        return node.position - self.tree.root.position

    def _may_have_children(self, node: Node) -> bool:
        return node.position < self.end - 1 and node.token not in self.request.end_tokens

    def plan_text(self, packer: Packer, budget: int) -> int:
        """Plan to compute pending text, at the start or after a correction: one chain of at most `budget` rows. Return
        the number of rows."""
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
        """Plan to compute the most probable pending nodes, `most` at most; return how many.

        They are one tree of the packer: its keys are the prefix, the nodes' ancestors and the nodes; a mask has what
        each row sees."""
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
        """Give the nodes just computed children, by the request's rule. A broken row of logits gives none."""
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
        """Add one child, drawn from the draft distribution. Whether it is added must not depend on which token it is,
        so the token is not looked at."""
        proposal = rejection.propose(logits, query)
        if proposal is None:
            return
        token, node.distribution = proposal
        assert token is not None
        (logprob,) = self._calibration.corrected(self._depth(node), [math.log(rejection.acceptance(node.distribution))])
        self._add_child(node, token, logprob, node.path_logprob() + logprob)

    def _branch(self, node: Node, logits: NDArray[np.float32], query: SamplingQuery) -> None:
        """Add the likeliest children."""
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
        """Add a child of this path logprob; send it now or hold it back, and put it on the frontier if it may have
        children."""
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
        """Put a node into the next message. With it goes the distribution that it was drawn from (REJECTION), or the
        one over its children if it is computed (CONTRASTIVE)."""
        self.unsent.append(node)
        if self.request.sampler.rule is Rule.REJECTION:
            assert node.parent is not None
            self.unsent_distributions.append(node.parent)
        elif node.distribution is not None:
            self.unsent_distributions.append(node)

    def _worth_sending(self, path_logprob: float, node: Node) -> bool:
        """Return True if the node is probable enough and, itself included, at most `max_nodes` are offered.

        The likeliest next token is always sent: else a verifier would wait for nothing."""
        near = path_logprob >= self.policy.min_sent_logprob and self._offered <= self.policy.max_nodes
        return near or node is self._likeliest

    @property
    def _likeliest(self) -> Node | None:
        """The likeliest next token: the root's first child."""
        return next(iter(self.tree.root.children.values()), None)

    def _release(self) -> None:
        """Send held-back nodes that are worth it now: the text has come nearer, or the policy has changed."""
        kept, policy = self._held_back, self.policy
        while kept:
            path_logprob, node = kept.best()  # the likeliest next token comes first if it is held back
            near = path_logprob >= policy.min_sent_logprob and self._offered < policy.max_nodes
            if not near and node is not self._likeliest:
                break
            self._offer(kept.take()[1])

    def send_at(self, step: float) -> float:
        """Return the moment from which on unsent nodes are due, perhaps long past; `step`: seconds of a draft's step.

        The distribution of the next token is sent at once: without it no token can be chosen (CONTRASTIVE), or a draw
        arrives after the choice at its position and is lost (REJECTION). A message's worth of whole distributions does
        not wait either (CONTRASTIVE). Draws wait, however many there are: an end token is the last of its chain, and
        the time at which it is sent must not depend on it."""
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
        """True if there is anything to send."""
        return bool(self.unsent or self.unsent_distributions)

    def committed_at(self, now: float) -> None:
        """Note that a commit came at this time."""
        self.send_timer.committed(now, unsent=self.has_unsent)

    def take_unsent(self, now: float) -> Extension:
        """Return everything unsent as one extension, and count it as sent."""
        paths = spell(self.unsent, self.unsent_distributions)
        self.unsent, self.unsent_distributions = [], []
        self.send_timer.sent(now)
        return Extension(self.tree.base, paths, self.send_timer.base_age(now))

    def set_policy(self, policy: ExpansionPolicy) -> None:
        """Expand by another policy from now on."""
        if self.policy.paused and not policy.paused:
            self.send_timer = SendTimer()  # while paused, many commits came at once
        self.policy = policy
        self._restore_deep()
        self._release()

    def resend(self) -> None:
        """Count all nodes as unsent, and forget the pace of commits: this verifier may step at another."""
        self.unsent, self.unsent_distributions = [], []
        self._held_back.clear()
        for path_logprob, node in self.tree.by_path_logprob():
            self._held_back.add(path_logprob, node)
        if self._required and self.tree.root.distribution is not None:
            self.unsent_distributions.append(self.tree.root)
        self._release()
        self.send_timer = SendTimer()
