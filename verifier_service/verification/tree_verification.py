"""Tree verification of one session: from the logits of a step to a verify result."""

from __future__ import annotations

from collections.abc import Iterator

from specdec.decoding.proposal import Proposal
from specdec.decoding.query import SamplingQuery
from specdec.decoding.token_mask import TokenMask
from specdec.decoding.tree import Node
from specdec.grammar.grammar import GrammarError
from specdec.serving.errors import GrammarFailureError
from verifier_service.backend.result import BONUS, CORRECTION, PLAIN, REMOTE_DRAFT, VerifyResult
from verifier_service.sessions.session import VerifierSession
from verifier_service.sessions.step_rows import ScheduledRows, TreeRows


class TreeVerification:
    """The verification of a session's token tree in one step; a `TreeWalker` for `verify_trees`."""

    __slots__ = ("_asked", "_node", "_path", "error", "kv_copies", "planned", "result", "row", "rows", "session")

    def __init__(self, session: VerifierSession, planned: ScheduledRows) -> None:
        assert planned.root_row is not None  # a chunk of prompt chooses no token
        self.session = session
        self.planned = planned
        offered = 0 if planned.tree is None else len(planned.tree.results)
        self.result = VerifyResult(session.tree.base, offered)
        self.kv_copies: list[tuple[int, int]] = []  # slots (from, to) to copy
        self.rows: list[int] = []  # rows that chose a token, as indices among the results
        self.error: Exception | None = None
        self.row = planned.root_row
        self._node = session.tree.root
        self._path: list[int] = []
        self._asked: dict[int, SamplingQuery] = {}  # queries made in advance, by row

    def query(self) -> SamplingQuery:
        asked = self._asked.get(self.row)
        return self._query(self._node, self._path, self.session.allowed(self._path)) if asked is None else asked

    def queries(self) -> Iterator[tuple[int, SamplingQuery]]:
        """Yield (row index among the results, sampling query) for every row the step may reach: the root's, all
        candidates', and those of the window not among them. A row is left out if its grammar cannot give a mask in
        advance: it is queried when reached."""
        tree = self.planned.tree
        nodes, paths = {self.row: self._node}, {id(self._node): self._path}
        if tree is not None:
            for node in tree.candidates:  # parents come before their children
                nodes[tree.results[id(node)]] = node
                paths[id(node)] = [*paths[id(node.parent)], node.token]
        for row, node in nodes.items():
            path = paths[id(node)]
            try:
                allowed = self.session.allowed(path)
            except GrammarError:
                continue
            self._asked[row] = query = self._query(node, path, allowed)
            yield row, query
        yield from ((row, query) for row, query in self.lookahead_queries() if row not in nodes)

    @property
    def lookahead_count(self) -> int:
        """The number of the window's sampling queries."""
        return 0 if self.planned.tree is None else len(self.planned.tree.lookahead_results)

    def lookahead_queries(self) -> Iterator[tuple[int, SamplingQuery]]:
        """Yield the window's sampling queries, each after its row's index among the results."""
        tree = self.planned.tree
        if tree is not None and tree.lookahead is not None:
            queries = self.session.ngrams.queries(tree.lookahead, self.session.penalty_state)
            yield from zip(tree.lookahead_results, queries, strict=True)

    def take(self, token: int) -> bool:
        position = self._node.position + 1
        tree = self.planned.tree
        child = None if tree is None else self._tested(tree, token)
        self.rows.append(self.row)
        result = self.result
        result.tokens.append(token)
        result.sources.append(self._source(child))
        result.finish = self.session.finish(token, position)
        if tree is None or child is None:
            return False
        result.accepted += 1
        written, own = tree.slots[id(child)], int(self.session.slots[position])
        if written != own:
            self.kv_copies.append((written, own))
        self._path.append(token)
        self._node, self.row = child, tree.results[id(child)]
        return not result.finish

    def fail(self, error: Exception) -> None:
        if not (self.result.tokens and isinstance(error, GrammarFailureError)):
            self.error = error
            return
        # Keep the tokens chosen so far, the last one as a bonus token: the next step begins with it as its root and
        # fails there.
        self.result.accepted -= 1
        self.result.sources[-1] = BONUS

    def apply(self, now: float) -> VerifyResult:
        """Apply the result to the session and return it."""
        if self.planned.undrafted:
            self.result.undrafted = len(self.result.tokens)
        self.session.apply(self.result, self.planned.count, now)
        return self.result

    def _tested(self, tree: TreeRows, token: int) -> Node | None:
        """Return the chosen candidate if it was in this step, and update the n-grams' confidence with this place."""
        for candidate in self._node.children.values():
            if candidate.origin != REMOTE_DRAFT and id(candidate) in tree.results:
                self.session.ngrams.learn(candidate, candidate.token == token)
        child = self._node.children.get(token)
        return child if child is not None and id(child) in tree.results else None

    def _query(self, node: Node, path: list[int], allowed: TokenMask | None) -> SamplingQuery:
        """Return the sampling query below a node. A sampled child is tested even if it is not in this step: if
        accepted, the candidates below it stay alive."""
        proposal = None if node.distribution is None else Proposal(next(iter(node.children), None), node.distribution)
        return SamplingQuery(
            self.session.request.sampler,
            node.position + 1,
            self.session.penalty_state,
            path,
            proposal,
            allowed,
        )

    def _source(self, child: Node | None) -> int:
        if child is not None:
            return child.origin
        tree = self.planned.tree
        if tree is None or not tree.results:
            return PLAIN
        offered = any(id(other) in tree.results for other in self._node.children.values())
        return CORRECTION if offered else BONUS
