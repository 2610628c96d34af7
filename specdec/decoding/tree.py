"""The token tree: every live candidate below the committed text.

A node is a path: the committed prefix plus its candidates. The path is its identity; nodes have no ids. So messages
that arrive late, twice or out of order insert the same paths, and a commit only moves the root. The draft owns one tree
per session and expands it; the verifier keeps a copy of the received candidates and verifies from that.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from specdec.decoding.proposal import DraftDistribution


MAX_DRAWS = 16
"""Maximum number of siblings in a sampled tree: the contract's limit on `max_branches`. Each sibling costs the verifier
a pass over the vocabulary."""


class BaseAheadError(ValueError):
    """Candidates start beyond the committed text: their sender and this tree disagree about what is committed."""


class Paths(NamedTuple):
    """Nodes as encoded in `specdec.v2.Extend`: parent 0 is the root, i the i-th token; parents precede children.
    `distributions`: pairs of a parent and the draft's distribution over its children."""

    tokens: Sequence[int]
    parents: Sequence[int]
    logprobs: Sequence[float]
    distributions: Sequence[tuple[int, DraftDistribution]] = ()


class Node:
    """One candidate. `logprob` is log P(the target takes this token | it reaches the parent)."""

    __slots__ = ("children", "distribution", "drafted", "logprob", "match", "origin", "parent", "position", "token")

    def __init__(self, token: int, position: int, parent: Node | None, logprob: float, origin: int) -> None:
        self.token = token
        self.position = position  # absolute, of this token
        self.parent = parent
        self.logprob = logprob
        self.origin = origin  # first proposer, as numbered by the tree's owner
        self.drafted = False  # proposed by a remote draft, not necessarily first
        self.children: dict[int, Node] = {}
        self.distribution: DraftDistribution | None = None  # the draft's, over the children, if the rule needs it
        self.match: int | None = None  # length of the n-gram match that proposed it

    def path(self) -> list[Node]:
        """Return the nodes from the root's child down to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def path_logprob(self) -> float:
        """Return log P(the target's text goes through this node): the sum of logprobs from the root."""
        total, node = 0.0, self
        while node.parent is not None:
            total += node.logprob
            node = node.parent
        return total

    def walk(self) -> list[Node]:
        """Return all nodes below this one, parents first."""
        below = list(self.children.values())
        for node in below:
            below += node.children.values()
        return below


def anything(_: Node) -> bool:
    return True


def _unlink(top: Node, kept: Node) -> None:
    """Remove the children of all nodes at and below `top`, except at and below `kept`.

    A node and its children refer to each other, so dropped nodes would otherwise wait for the garbage collector, which
    delays steps.
    """
    below = [top]
    for node in below:
        if node is not kept and node.children:
            below += node.children.values()
            node.children.clear()


MAX_REFUSED = 64
"""Maximum candidates of a message that `permits` may refuse, since a grammar may take long; later ones are dropped
without asking."""


class TokenTree:
    """Committed tokens and the candidates below them.

    Candidates that can never be taken are dropped silently: at positions past `last_position`, below an end token, with
    ids outside the vocabulary or non-finite logprobs, or where `permits` (parent, token) returns False. Candidates that
    arrive while `max_nodes` are alive are dropped, too.

    In a `sampled` tree (REJECTION) candidates are draws: a node gets its children together, in the order of the draws,
    with the distribution they were drawn from. The first message to arrive decides them, regardless of its tokens.
    """

    def __init__(
        self,
        committed: Sequence[int],
        *,
        vocabulary: int,
        last_position: int,
        end_tokens: frozenset[int] = frozenset(),
        max_nodes: int = 1 << 30,
        sampled: bool = False,
        permits: Callable[[Node, int], bool] | None = None,
    ) -> None:
        self.committed = list(committed)
        self.base = len(self.committed)
        """Number of committed tokens, prompt included; stored, since a step reads it about a dozen times."""
        self.root = Node(self.committed[-1], len(self.committed) - 1, None, 0.0, 0)
        self.size = 0
        self._vocabulary = vocabulary
        self._last_position = last_position
        self._end_tokens = end_tokens
        self._max_nodes = max_nodes
        self._sampled = sampled
        # Whether a draw is offered must not depend on its value (see `rejection.py`), so `permits` is ignored.
        self._permits = None if sampled else permits
        self._refusals = MAX_REFUSED  # left in the message that is being inserted

    def insert(self, base: int, paths: Paths, origin: int = 0, *, drafted: bool = False) -> list[Node]:
        """Insert paths starting from the committed text as of `base` tokens; return the new nodes. `drafted` marks them
        as a remote draft's.

        ValueError if a parent does not precede its child, BaseAheadError if the base lies beyond the committed text.
        """
        if base > self.base:
            raise BaseAheadError(f"candidates start at {base}, the committed text has {self.base} tokens")
        distributions = dict(paths.distributions)
        self._refusals = MAX_REFUSED
        made: list[Node] = []
        # A place is a node, a length of the committed text, or None for a dropped token.
        places: list[Node | int | None] = [self.root if base == self.base else base]
        for token, parent, logprob in zip(paths.tokens, paths.parents, paths.logprobs, strict=True):
            if parent >= len(places):
                raise ValueError(f"node {len(places)} names parent {parent}, which does not precede it")
            place = places[parent]
            if isinstance(place, int):
                place = self._follow(place, token)
            elif place is not None:
                size = self.size
                place = self._enter(place, token, logprob, origin, distributions.get(parent))
                if place is not None:
                    place.drafted |= drafted
                    if self.size > size:
                        made.append(place)
            places.append(place)
        if not self._sampled:
            for parent, row in distributions.items():
                place = places[parent] if parent < len(places) else None
                if isinstance(place, Node) and place.distribution is None:
                    place.distribution = row
        return made

    def _enter(
        self, place: Node, token: int, logprob: float, origin: int, row: DraftDistribution | None
    ) -> Node | None:
        """Return the child with this token, adding it if permitted; None otherwise. An existing child keeps the larger
        logprob, except in a sampled tree."""
        known = place.children.get(token)
        if known is not None:
            if math.isfinite(logprob) and not self._sampled:
                known.logprob = max(known.logprob, min(logprob, 0.0))
            return known
        if not self._sampled:
            return self.add(place, token, logprob, origin)
        # Siblings must come from one series of draws without replacement, that is, from one message.
        late = bool(place.children) and place.distribution is not row
        if late or row is None or not row.can_draw(token) or len(place.children) == MAX_DRAWS:
            return None
        child = self.add(place, token, logprob, origin)
        if child is not None:
            place.distribution = row
        return child

    def _follow(self, length: int, token: int) -> Node | int | None:
        """Follow a path inside the committed text for one token; return the new place, None if the token differs."""
        if self.committed[length] != token:
            return None
        return self.root if length + 1 == self.base else length + 1

    def add(self, parent: Node, token: int, logprob: float, origin: int = 0) -> Node | None:
        """Add a new child; None if it could never be taken or the tree is full."""
        position = parent.position + 1
        if (
            position > self._last_position
            or token >= self._vocabulary
            or not math.isfinite(logprob)
            or (parent.token in self._end_tokens and parent is not self.root)
            or self.size >= self._max_nodes
            or not self._permitted(parent, token)
        ):
            return None
        node = Node(token, position, parent, min(logprob, 0.0), origin)
        parent.children[token] = node
        self.size += 1
        return node

    def _permitted(self, parent: Node, token: int) -> bool:
        if self._permits is None:
            return True
        permitted = self._refusals > 0 and self._permits(parent, token)
        if not permitted:
            self._refusals -= 1
        return permitted

    def commit(self, tokens: Sequence[int]) -> list[Node]:
        """Append final tokens and return the surviving nodes below the new root. A node survives iff the new committed
        text is a prefix of its path. The other nodes lose their children."""
        former = self.root
        self.committed += tokens
        for token in tokens:
            child = self.root.children.get(token)
            self.root = child if child is not None else Node(token, self.base, None, 0.0, 0)
            self.root.parent = None
            self.base += 1
        _unlink(former, self.root)
        alive = self.root.walk()
        self.size = len(alive)
        return alive

    def by_path_logprob(self, usable: Callable[[Node], bool] | None = None) -> Iterator[tuple[float, Node]]:
        """Yield (path logprob, node) of every live node, most probable first, parents before children. A node that is
        not `usable` is skipped with its subtree."""
        frontier: list[tuple[float, int, Node]] = []
        order = 0  # tie-breaker: first in, first out
        parent, path_logprob = self.root, 0.0
        while True:
            children = parent.children
            if len(children) == 1 and not frontier:  # a chain needs no heap
                (parent,) = children.values()
                if usable is not None and not usable(parent):
                    return
                path_logprob += parent.logprob
            else:
                for child in children.values():
                    order += 1
                    if usable is None or usable(child):
                        heapq.heappush(frontier, (-path_logprob - child.logprob, order, child))
                if not frontier:
                    return
                negative_path_logprob, _, parent = heapq.heappop(frontier)
                path_logprob = -negative_path_logprob
            yield path_logprob, parent

    def best_chain(self, usable: Callable[[Node], bool] | None = None) -> Iterator[tuple[float, Node]]:
        """Yield (path logprob, node) down from the root, following the most likely `usable` child of each node."""
        path_logprob, node = 0.0, self.root
        while True:
            child = max(
                filter(usable or anything, node.children.values()), key=lambda child: child.logprob, default=None
            )
            if child is None:
                return
            path_logprob, node = path_logprob + child.logprob, child
            yield path_logprob, node

    def best(self, count: int) -> list[Node]:
        """Return the `count` nodes of highest path logprob, best first: always a connected tree, parents first."""
        return [node for _, node in itertools.islice(self.by_path_logprob(), count)]


class BestNodes(NamedTuple):
    """The best nodes of a tree, best first: a connected tree, parents first."""

    nodes: list[Node]
    logprobs: list[float]  # of their paths, never rising
    expected: float
    """Expected number of tokens committed by a step over these nodes: the accepted ones, and the target's own."""
    leaf: float
    """Path probability of the most likely leaf among them; 0 if there are `count` nodes, the maximum. Without nodes the
    root is the leaf, with probability 1."""

    @property
    def expected_accepted(self) -> float:
        return self.expected - 1.0

    @classmethod
    def of(cls, nodes: Iterable[tuple[float, Node]], count: int) -> BestNodes:
        """Return the first `count` of `nodes`, given in the order of `by_path_logprob` or `best_chain`."""
        taken, logprobs, expected, leaf = list[Node](), list[float](), 1.0, 0.0
        for path_logprob, node in itertools.islice(nodes, count):
            taken.append(node)
            logprobs.append(path_logprob)
            probability = math.exp(path_logprob)
            expected += probability
            if not node.children:
                leaf = max(leaf, probability)
        if not taken:
            return NO_NODES
        return cls(taken, logprobs, expected, leaf if len(taken) < count else 0.0)


NO_NODES = BestNodes([], [], 1.0, 1.0)


def paths_to(nodes: Sequence[Node], rows: Sequence[tuple[Node, DraftDistribution]] = ()) -> Paths:
    """Return these nodes, the nodes of `rows` and all their ancestors as paths.

    `rows`: distributions to send, each with the node (possibly the root) whose children it covers.
    """
    numbers: dict[Node | None, int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    logprobs: list[float] = []
    for leaf in (*nodes, *(node for node, _ in rows)):
        missing: list[Node] = []
        node = leaf
        while node.parent is not None and node not in numbers:
            missing.append(node)
            node = node.parent
        for node in reversed(missing):
            tokens.append(node.token)
            parents.append(numbers.get(node.parent, 0))
            logprobs.append(node.logprob)
            numbers[node] = len(tokens)
    return Paths(tokens, parents, logprobs, [(numbers.get(node, 0), row) for node, row in rows])
