"""The candidate queue: which candidates of a session go to the verifier, and when.

A node is *offered* once it is probable enough: the next message contains it. Until then it is *held back*. A commit
raises the path probability of surviving nodes, so held-back nodes are checked after every commit.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from draft_service.frontier import Frontier
from draft_service.request import ExpansionPolicy
from draft_service.send_timing import SendTimer
from specdec.decoding.sampling import Rule
from specdec.decoding.tree import Node, Paths, TokenTree, spell

DISTRIBUTIONS_A_MESSAGE = 4
"""Whole distributions in a message, approximately: over a vocabulary of 128,000 tokens each takes 256 KB."""


MAX_DISTRIBUTION_BYTES = 4 << 20
"""Limit on the bytes of distributions in a message; a single one may exceed it. The whole message is limited to 16
MiB."""


class Extension(NamedTuple):
    """New candidates below a committed text of `base` tokens, known to the draft for `held` seconds; 0 if the send
    timer has seen no commit yet."""

    base: int
    paths: Paths
    held: float


class CandidateQueue:
    """The candidate queue of one session. It reads the session's tree without changing it."""

    def __init__(self, tree: TokenTree, rule: Rule, policy: ExpansionPolicy) -> None:
        self._tree = tree
        self._drawn = rule is Rule.REJECTION  # siblings are sent together, with the distribution they were drawn from
        self._contrasted = rule is Rule.CONTRASTIVE  # no token can be chosen without the distributions
        self._policy = policy
        self._unsent: list[Node] = []
        self._unsent_distributions: list[Node] = []  # nodes with an unsent distribution over their children
        self._held_back = Frontier()  # of siblings drawn together, the first
        self._timer = SendTimer()

    @property
    def offered(self) -> int:
        """The number of live nodes sent or about to be sent."""
        if not self._drawn:
            return self._tree.size - len(self._held_back)
        return self._tree.size - sum(len(self._sent_together(node)) for node in self._held_back)

    @property
    def has_unsent(self) -> bool:
        """True if there is anything to send."""
        return bool(self._unsent or self._unsent_distributions)

    # --- input --------------------------------------------------------------------------------------

    def add(self, path_logprob: float, node: Node) -> None:
        """Take a new node of the tree, or the first of siblings drawn together. Offer it if it is probable enough and
        at most `max_nodes` are offered, itself included; otherwise hold it back. The likeliest next token is always
        sent: a verifier may be waiting for it."""
        policy = self._policy
        sendable = path_logprob >= policy.min_sent_logprob and self.offered <= policy.max_nodes
        if sendable or (node.parent is self._tree.root and node is self._likeliest):
            self._offer(node)
        else:
            self._held_back.add(path_logprob, node)

    def add_distribution(self, node: Node) -> None:
        """Take a node's new distribution over its children (CONTRASTIVE); it is sent unless the node is held back."""
        if node not in self._held_back:
            self._unsent_distributions.append(node)

    def follow_root(self, passed: float, alive: Collection[Node]) -> None:
        """Follow the tree's root down a path of logprob `passed`; only `alive` nodes are left."""
        root = self._tree.root
        self._held_back.descend(passed, alive)
        self._unsent = [node for node in self._unsent if node in alive]
        self._unsent_distributions = [n for n in self._unsent_distributions if n is root or n in alive]
        if self._contrasted and root.distribution is not None and root not in self._unsent_distributions:
            self._unsent_distributions.insert(0, root)  # a verifier with a full tree has dropped it with its node
        self._release()

    def commit_arrived(self, now: float) -> None:
        """Record the arrival of a commit."""
        self._timer.committed(now, unsent=self.has_unsent)

    def set_policy(self, policy: ExpansionPolicy) -> None:
        """Replace the policy; held-back nodes are offered by the new one at once."""
        if self._policy.paused and not policy.paused:
            self._timer = SendTimer()  # commits batched during the pause distort its estimates
        self._policy = policy
        self._release()

    def resend(self) -> None:
        """Mark all nodes unsent and reset the send timer: the new verifier may step at another pace."""
        self._unsent, self._unsent_distributions = [], []
        self._held_back.clear()
        for path_logprob, node in self._tree.by_path_logprob():
            if node is self._sent_together(node)[0]:
                self._held_back.add(path_logprob, node)
        if self._contrasted and self._tree.root.distribution is not None:
            self._unsent_distributions.append(self._tree.root)
        self._release()
        self._timer = SendTimer()

    # --- offering -----------------------------------------------------------------------------------

    @property
    def _likeliest(self) -> Node | None:
        """The likeliest next token: the root's first child."""
        return next(iter(self._tree.root.children.values()), None)

    def _sent_together(self, node: Node) -> list[Node]:
        """Return the nodes sent together with this one, in order: its siblings too if they were drawn with it, since
        whether one is sent must not depend on its value."""
        if not self._drawn:
            return [node]
        assert node.parent is not None
        return list(node.parent.children.values())

    def _offer(self, node: Node) -> None:
        """Put a node into the next message, with its siblings and the distribution they were drawn from (REJECTION), or
        with the distribution over its children, if any (CONTRASTIVE)."""
        self._unsent += self._sent_together(node)
        if self._drawn:
            assert node.parent is not None
            self._unsent_distributions.append(node.parent)
        elif node.distribution is not None:
            self._unsent_distributions.append(node)

    def _release(self) -> None:
        """Offer held-back nodes now above the threshold: the text has come nearer, or the policy has changed."""
        held_back, policy = self._held_back, self._policy
        while held_back:
            path_logprob, node = held_back.best()  # a held-back likeliest next token is the best of all
            nodes = self.offered + len(self._sent_together(node))
            sendable = path_logprob >= policy.min_sent_logprob and nodes <= policy.max_nodes
            if not sendable and node is not self._likeliest:
                break
            self._offer(held_back.take()[1])

    # --- output -------------------------------------------------------------------------------------

    def send_at(self, now: float, step: float) -> float:
        """Return the time at which unsent nodes become due, possibly in the past; `step`: seconds of a draft step.

        The root's distribution is sent at once: without it no token can be chosen (CONTRASTIVE), or a draw arrives
        after the choice at its position and is lost (REJECTION). A full message of whole distributions does not wait
        either (CONTRASTIVE). Draws always wait: an end token ends its chain, and the time at which it is sent must not
        reveal the token.
        """
        if not self.has_unsent:
            return math.inf
        if self._tree.root in self._unsent_distributions or (
            self._contrasted and len(self._unsent_distributions) >= DISTRIBUTIONS_A_MESSAGE
        ):
            return -math.inf
        nothing_sent = len(self._unsent) == self.offered
        policy = self._policy
        return self._timer.next_send_at(now, policy.extend_interval, policy.round_trip, step, urgent=nothing_sent)

    def take(self, now: float) -> Extension:
        """Return unsent nodes as one extension and mark them sent: distributions up to the message limit, and only the
        drawn nodes whose distribution is included."""
        sent, later = self._first_distributions()
        behind = set(map(id, later)) if self._drawn else set()
        nodes = [node for node in self._unsent if id(node.parent) not in behind]
        self._unsent = [node for node in self._unsent if id(node.parent) in behind]
        self._unsent_distributions = later
        self._timer.sent(now)
        return Extension(self._tree.base, spell(nodes, sent), self._timer.base_age(now))

    def _first_distributions(self) -> tuple[list[Node], list[Node]]:
        """Split nodes with unsent distributions into those within the message limit and the rest."""
        unsent, size = self._unsent_distributions, 0
        for place, node in enumerate(unsent):
            row = node.distribution
            size += 0 if row is None else row.values.nbytes + (0 if row.ids is None else row.ids.nbytes)
            if place and size > MAX_DISTRIBUTION_BYTES:
                return unsent[:place], unsent[place:]
        return unsent, []
