"""The candidate queue: which candidates of a session go to the verifier, and when.

A node is *offered* once it is probable enough: the next message contains it. Until then it is *held back*. A commit
raises the path probability of surviving nodes, so held-back nodes are checked after every commit.

Under CONTRASTIVE a node holds log q of the whole vocabulary, and a message contains the part that the verifier probably
needs. The verifier queries missing parts once the text has reached the node.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from draft_service.frontier import Frontier
from draft_service.request import ExpansionPolicy
from draft_service.send_timing import SendTimer
from specdec.decoding import contrastive
from specdec.decoding.contrastive import DraftQuery
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Rule
from specdec.decoding.tree import Node, Paths, TokenTree, paths_to

DISTRIBUTIONS_A_MESSAGE = 4
"""Unsent whole distributions that make a message due immediately: each takes 256 KB for 128,000 tokens."""

MARGIN, MIN_MARGIN, MAX_MARGIN = 4.0, 2.0, 10.0
"""Margin in nats for the tokens of a partial distribution (`contrastive.likeliest`): initial value and limits. With 4,
partial distributions of the demo pair have 90 tokens on average (alpha = 0.1), and 4 % lack a plausible token."""

WIDENED, NARROWED = 1.0, 0.02
"""Nats that a query adds to the margin, and that a commit subtracts; they balance at about one query in fifty commits.
A query costs a pass of the target and a round trip, more than sending a few hundred bytes."""

MAX_DISTRIBUTION_BYTES = 4 << 20
"""Limit on the bytes of distributions in a message; a single one may exceed it. The whole message is limited to 16
MiB."""

BYTES_A_TOKEN, MAX_SAVED_BYTES = 6 << 10, 24 << 10
"""Budget for a session's partial distributions: bytes added for each committed token, and the maximum balance. Once the
budget is used up, only the likeliest next token is still offered: a verifier may be waiting for it. The demo pair needs
4 kB a token; without the budget, a draft whose candidates are never right would send several times as much."""

MAX_OWED_BYTES = 4 * MAX_SAVED_BYTES
"""Limit on the overdraft of this budget, from distributions that are sent in any case. Each committed token repays what
they leave of its BYTES_A_TOKEN."""


class Extension(NamedTuple):
    """New candidates below a committed text of `base` tokens. `base_age`: seconds since the draft received that text; 0
    if the send timer has seen no commit yet."""

    base: int
    paths: Paths
    base_age: float


class CandidateQueue:
    """The candidate queue of one session. It reads the session's tree without changing it."""

    def __init__(self, tree: TokenTree, sampler: RequestSampler, policy: ExpansionPolicy) -> None:
        rule = sampler.rule
        self._tree = tree
        self._contrast = sampler.contrast
        self._drawn = rule is Rule.REJECTION  # siblings are sent together, with the distribution they were drawn from
        self._contrasted = rule is Rule.CONTRASTIVE  # no token can be chosen without the distributions
        self._margin = MARGIN
        self._query: DraftQuery | None = None  # the verifier's query about the root's row, if any
        self._bytes_left = float(MAX_SAVED_BYTES)  # balance of the budget for partial distributions
        self._base = tree.base  # as of the last commit
        self._policy = policy
        self._unsent: list[Node] = []
        self._unsent_distributions: list[Node] = []  # nodes with an unsent distribution over their children
        self._held_back = Frontier()  # siblings drawn together are represented by the first
        self._held_nodes = 0  # number of nodes held back, siblings included
        self._timer = SendTimer()
        self._all_unsent = True  # nothing was sent since `resend`, or since the start

    @property
    def offered(self) -> int:
        """The number of live nodes sent or about to be sent."""
        return self._tree.size - self._held_nodes

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent or self._unsent_distributions)

    # --- input --------------------------------------------------------------------------------------

    def add(self, path_logprob: float, node: Node) -> None:
        """Add a new node of the tree, or the first of siblings drawn together. Offer it if it is probable enough, the
        byte budget is not used up, and at most `max_nodes` are offered, itself included; otherwise hold it back. The
        likeliest next token is always sent: a verifier may be waiting for it."""
        policy = self._policy
        sendable = self._affordable and path_logprob >= policy.min_sent_logprob and self.offered <= policy.max_nodes
        if sendable or (node.parent is self._tree.root and node is self._likeliest):
            self._offer(node)
        else:
            self._hold_back(path_logprob, node)

    def add_distribution(self, node: Node) -> None:
        """Add a node's new distribution over its children (CONTRASTIVE); it is sent unless the node is held back."""
        if node not in self._held_back:
            self._unsent_distributions.append(node)

    def ask(self, query: DraftQuery) -> None:
        """Answer a query about the root's row: immediately if the row exists, else as soon as it does (CONTRASTIVE)."""
        self._query = query
        self._margin = min(MAX_MARGIN, self._margin + WIDENED)
        if self._tree.root.distribution is not None and self._tree.root not in self._unsent_distributions:
            self._unsent_distributions.insert(0, self._tree.root)

    def follow_root(self, passed: float, alive: Collection[Node]) -> None:
        """Follow the tree's root down a path of logprob `passed`; only `alive` nodes are left."""
        root = self._tree.root
        self._query = None
        self._margin = max(MIN_MARGIN, self._margin - NARROWED)
        self._bytes_left = min(MAX_SAVED_BYTES, self._bytes_left + BYTES_A_TOKEN * (self._tree.base - self._base))
        self._base = self._tree.base
        self._held_back.descend(passed, alive)
        self._held_nodes = sum(map(self._count_together, self._held_back))
        self._unsent = [node for node in self._unsent if node in alive]
        self._unsent_distributions = [n for n in self._unsent_distributions if n is root or n in alive]
        if self._contrasted and root.distribution is not None and root not in self._unsent_distributions:
            # Send it again: a verifier with a full tree has dropped node and row.
            self._unsent_distributions.insert(0, root)
        self._release()

    def rescore(self) -> None:
        """Follow changed logprobs of nodes, and a new order of the root's children."""
        self._held_back.rescore()
        likeliest = self._likeliest
        if likeliest is not None and self._held_back.remove(likeliest):  # others may be equally likely
            self._held_nodes -= self._count_together(likeliest)
            self._offer(likeliest)
        self._release()

    def commit_arrived(self, now: float) -> None:
        self._timer.committed(now, unsent=self.has_unsent)

    def set_policy(self, policy: ExpansionPolicy) -> None:
        """Replace the policy; held-back nodes that meet it are offered immediately."""
        if self._policy.paused and not policy.paused:
            self._timer = SendTimer()  # commits batched during the pause distort its estimates
        self._policy = policy
        self._release()

    def resend(self) -> None:
        """Begin again with another verifier: mark all nodes unsent, and reset query, byte budget and send timer."""
        self._query = None
        self._bytes_left = float(MAX_SAVED_BYTES)
        self._timer = SendTimer()
        if self._all_unsent:  # already done; a caller may repeat the request
            self._release()
            return
        self._all_unsent = True
        self._unsent, self._unsent_distributions = [], []
        self._held_back.clear()
        self._held_nodes = 0
        for path_logprob, node in self._tree.by_path_logprob():
            if node is self._sent_together(node)[0]:
                self._hold_back(path_logprob, node)
        if self._contrasted and self._tree.root.distribution is not None:
            self._unsent_distributions.append(self._tree.root)
        self._release()

    # --- offering -----------------------------------------------------------------------------------

    @property
    def _likeliest(self) -> Node | None:
        """The likeliest next token: the root's first child."""
        return next(iter(self._tree.root.children.values()), None)

    @property
    def _affordable(self) -> bool:
        """True while the byte budget allows the distribution of a further candidate (CONTRASTIVE)."""
        return self._bytes_left > 0

    def _sent_together(self, node: Node) -> list[Node]:
        """Return the nodes sent together with this one, itself included, in order. Under REJECTION these are all its
        siblings, since whether a draw is sent must not depend on its value."""
        if not self._drawn:
            return [node]
        assert node.parent is not None
        return list(node.parent.children.values())

    def _count_together(self, node: Node) -> int:
        """Return the number of nodes sent together with this one, itself included."""
        if not self._drawn:
            return 1
        assert node.parent is not None
        return len(node.parent.children)

    def _hold_back(self, path_logprob: float, node: Node) -> None:
        self._held_back.add(path_logprob, node)
        self._held_nodes += self._count_together(node)

    def _offer_best(self) -> None:
        """Offer the best of the nodes held back."""
        _, node = self._held_back.pop_best()
        self._held_nodes -= self._count_together(node)
        self._offer(node)

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
        """Offer the held-back nodes that may now be sent, best first."""
        held_back, policy = self._held_back, self._policy
        while held_back:
            path_logprob, node = held_back.best()  # if the likeliest next token is held back, it is the best
            nodes = self.offered + self._count_together(node)
            sendable = self._affordable and path_logprob >= policy.min_sent_logprob and nodes <= policy.max_nodes
            if not sendable and node is not self._likeliest:
                break
            self._offer_best()

    # --- output -------------------------------------------------------------------------------------

    def send_at(self, now: float, step: float) -> float:
        """Return the time at which unsent nodes become due, possibly in the past; inf if there are none. `step`:
        seconds of a draft step.

        The root's distribution is sent immediately: without it the verifier cannot choose a token (CONTRASTIVE), or
        chooses one before the draws arrive, which are then lost (REJECTION). A full message of whole distributions does
        not wait either (CONTRASTIVE). Draws below other nodes wait for the timer, whatever their number: that number
        depends on the tokens, since an end token ends its chain.
        """
        if not self.has_unsent:
            return math.inf
        policy, whole = self._policy, self._contrasted and not self._policy.partial_distributions
        if self._tree.root in self._unsent_distributions or (
            whole and len(self._unsent_distributions) >= DISTRIBUTIONS_A_MESSAGE
        ):
            return -math.inf
        nothing_sent = len(self._unsent) == self.offered
        return self._timer.next_send_at(now, policy.extend_interval, policy.round_trip, step, urgent=nothing_sent)

    def pop_extension(self, now: float) -> Extension:
        """Return unsent nodes as one extension and mark them sent: distributions up to the message limit, and only the
        drawn nodes whose distribution is included."""
        self._all_unsent = False
        rows, later = self._first_rows()
        if self._contrasted and self._policy.partial_distributions:
            sent = sum(row.nbytes for _, row in rows if not row.answer)
            self._bytes_left = max(-MAX_OWED_BYTES, self._bytes_left - sent)
        behind = set(map(id, later)) if self._drawn else set()
        nodes = [node for node in self._unsent if id(node.parent) not in behind]
        self._unsent = [node for node in self._unsent if id(node.parent) in behind]
        self._unsent_distributions = later
        self._timer.sent(now)
        return Extension(self._tree.base, paths_to(nodes, rows), self._timer.base_age(now))

    def _first_rows(self) -> tuple[list[tuple[Node, DraftDistribution]], list[Node]]:
        """Return nodes with the part of their distribution to send, up to the message limit, and the remaining nodes
        with unsent distributions."""
        rows, size = list[tuple[Node, DraftDistribution]](), 0
        for place, node in enumerate(self._unsent_distributions):
            assert node.distribution is not None  # it existed when the node was added here
            row = self._sent(node, node.distribution)
            size += row.nbytes
            if place and size > MAX_DISTRIBUTION_BYTES:
                return rows, self._unsent_distributions[place:]
            rows.append((node, row))
        return rows, []

    def _sent(self, node: Node, row: DraftDistribution) -> DraftDistribution:
        """Return the part of a node's distribution to send: all, unless partial distributions are used
        (CONTRASTIVE)."""
        if not (self._contrasted and self._policy.partial_distributions):
            return row
        if node is self._tree.root and self._query is not None:
            return contrastive.answer(row, self._query.ids)
        return contrastive.likeliest(row, self._contrast, self._margin)
