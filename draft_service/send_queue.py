"""The send queue: which candidates of a session go to the verifier, and when.

A node is *offered* once it is probable enough: it is sent with the next message. Until then it is *held back*. A commit
makes the surviving nodes more probable, so held-back nodes are looked at again after each.
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
"""Whole distributions in a message, about: over a vocabulary of 128,000 tokens each takes a quarter of a megabyte."""


MOST_DISTRIBUTION_BYTES = 4 << 20
"""Bytes of the distributions in a message, which holds one in any case: a message has 16 MiB at most."""


class Extension(NamedTuple):
    """New candidates below the committed text of `base` tokens, which the draft has known for `held` seconds; 0 if the
    send timer has seen no commit yet."""

    base: int
    paths: Paths
    held: float


class SendQueue:
    """The send queue of one session. It reads the session's tree, and changes nothing in it."""

    def __init__(self, tree: TokenTree, rule: Rule, policy: ExpansionPolicy) -> None:
        self._tree = tree
        self._drawn = rule is Rule.REJECTION  # a node goes with the distribution that it was drawn from
        self._contrasted = rule is Rule.CONTRASTIVE  # no token can be chosen without the distributions
        self._policy = policy
        self._unsent: list[Node] = []
        self._unsent_distributions: list[Node] = []  # nodes whose distribution over their children is to be sent
        self._held_back = Frontier()
        self._timer = SendTimer()

    @property
    def offered(self) -> int:
        """The number of live nodes that were sent or are about to be."""
        return self._tree.size - len(self._held_back)

    @property
    def has_unsent(self) -> bool:
        """True if there is anything to send."""
        return bool(self._unsent or self._unsent_distributions)

    # --- what comes in ------------------------------------------------------------------------------

    def add(self, path_logprob: float, node: Node) -> None:
        """Take a new node of the tree: offer it if it is probable enough and, itself included, at most `max_nodes` are
        offered; else hold it back. The likeliest next token is always sent: else a verifier would wait for nothing."""
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
        """Follow the tree's root, which has moved down a path of logprob `passed`, and left these nodes alive."""
        root = self._tree.root
        self._held_back.descend(passed, alive)
        self._unsent = [node for node in self._unsent if node in alive]
        self._unsent_distributions = [n for n in self._unsent_distributions if n is root or n in alive]
        if self._contrasted and root.distribution is not None and root not in self._unsent_distributions:
            self._unsent_distributions.insert(0, root)  # the verifier may have dropped it, having no room for its node
        self._release()

    def commit_arrived(self, now: float) -> None:
        """Note that a commit came at this time."""
        self._timer.committed(now, unsent=self.has_unsent)

    def set_policy(self, policy: ExpansionPolicy) -> None:
        """Send by another policy from now on."""
        if self._policy.paused and not policy.paused:
            self._timer = SendTimer()  # while paused, many commits came at once
        self._policy = policy
        self._release()

    def resend(self) -> None:
        """Count all nodes as unsent, and forget the pace of commits: this verifier may step at another."""
        self._unsent, self._unsent_distributions = [], []
        self._held_back.clear()
        for path_logprob, node in self._tree.by_path_logprob():
            self._held_back.add(path_logprob, node)
        if self._contrasted and self._tree.root.distribution is not None:
            self._unsent_distributions.append(self._tree.root)
        self._release()
        self._timer = SendTimer()

    # --- what is offered ----------------------------------------------------------------------------

    @property
    def _likeliest(self) -> Node | None:
        """The likeliest next token: the root's first child."""
        return next(iter(self._tree.root.children.values()), None)

    def _offer(self, node: Node) -> None:
        """Put a node into the next message. With it goes the distribution that it was drawn from (REJECTION), or the
        one over its children if it has one (CONTRASTIVE)."""
        self._unsent.append(node)
        if self._drawn:
            assert node.parent is not None
            self._unsent_distributions.append(node.parent)
        elif node.distribution is not None:
            self._unsent_distributions.append(node)

    def _release(self) -> None:
        """Offer held-back nodes that are worth it now: the text has come nearer, or the policy has changed."""
        held_back, policy = self._held_back, self._policy
        while held_back:
            path_logprob, node = held_back.best()  # the likeliest next token comes first if it is held back
            sendable = path_logprob >= policy.min_sent_logprob and self.offered < policy.max_nodes
            if not sendable and node is not self._likeliest:
                break
            self._offer(held_back.take()[1])

    # --- what goes out ------------------------------------------------------------------------------

    def send_at(self, step: float) -> float:
        """Return the moment from which on unsent nodes are due, perhaps long past; `step`: seconds of a draft's step.

        The distribution of the next token is sent at once: without it no token can be chosen (CONTRASTIVE), or a draw
        arrives after the choice at its position and is lost (REJECTION). A message's worth of whole distributions does
        not wait either (CONTRASTIVE). Draws wait, however many there are: an end token is the last of its chain, and
        the time at which it is sent must not depend on it."""
        if not self.has_unsent:
            return math.inf
        if self._tree.root in self._unsent_distributions or (
            self._contrasted and len(self._unsent_distributions) >= DISTRIBUTIONS_A_MESSAGE
        ):
            return -math.inf
        nothing_sent = len(self._unsent) == self.offered
        policy = self._policy
        return self._timer.next_send_at(policy.extend_interval, policy.round_trip, step, urgent=nothing_sent)

    def take(self, now: float) -> Extension:
        """Return what is unsent as one extension, and count it as sent; of distributions as many as fit into a
        message, and of drawn nodes those that go with them."""
        sent, later = self._first_distributions()
        behind = set(map(id, later)) if self._drawn else set()
        nodes = [node for node in self._unsent if id(node.parent) not in behind]
        self._unsent = [node for node in self._unsent if id(node.parent) in behind]
        self._unsent_distributions = later
        self._timer.sent(now)
        return Extension(self._tree.base, spell(nodes, sent), self._timer.base_age(now))

    def _first_distributions(self) -> tuple[list[Node], list[Node]]:
        """Return the nodes whose unsent distributions fit into a message, and the others."""
        unsent, size = self._unsent_distributions, 0
        for place, node in enumerate(unsent):
            row = node.distribution
            size += 0 if row is None else row.values.nbytes + (0 if row.ids is None else row.ids.nbytes)
            if place and size > MOST_DISTRIBUTION_BYTES:
                return unsent[:place], unsent[place:]
        return unsent, []
