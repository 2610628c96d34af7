"""Tree verification: from the logits of a step to the tokens committed for every session.

Start at the root, take the target's own choice, move to the child with that token, and stop where there is none. All
sessions advance together, one level at a time, so that one vectorised call makes all their choices (`verify_trees`);
each session's `TreeVerification` applies them. Where a session verifies blocks (REJECTION), a chain of draws is tested
as a whole, down to the next node with several children or the last row of the step. Under TYPICAL, the accepted path
below a node is found as a whole. `verified_step.py` has the outcome of a whole step.

This folder and `choice.py`, `rejection.py`, `block_verification.py`, `contrastive.py` and `typical.py` in
`specdec/decoding`, which choose tokens under each acceptance rule, are the whole of speculative decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from specdec.decoding import contrastive
from specdec.decoding.block_verification import ChainQuery
from specdec.decoding.choice import Tokens, choose
from specdec.decoding.proposal import Proposal
from specdec.decoding.query import RequestSampler, SamplingQuery, TokenMask
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.step_logits import StepLogits
from specdec.decoding.tree import Node
from specdec.decoding.typical import TypicalCandidate, TypicalQuery
from specdec.grammar.grammar import GrammarError
from specdec.serving.errors import GrammarFailureError
from verifier_service.backend.result import (
    BONUS,
    CORRECTION,
    PLAIN,
    REMOTE_DRAFT,
    RejectedCandidate,
    VerifyResult,
)
from verifier_service.sessions.session import VerifierSession
from verifier_service.sessions.step_rows import ScheduledRows, TreeRows

ANY = SamplingQuery(RequestSampler(Sampling(temperature=0.0)), 0)
"""The query for a row's likeliest token."""

Prompts = Sequence[tuple[VerifierSession, ScheduledRows]]
"""Rows of prompts in a step that do not reach the root, so they choose no token."""


class OverruledPlace(NamedTuple):
    """A place where the target chose another token than a remote draft's likeliest."""

    row: int  # index among the results
    position: int  # of the token in the text
    token: int  # the target's


class NotFiniteError(FloatingPointError):
    """The logits of a row are not finite."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite")


def verify_trees(verifications: Sequence[TreeVerification], logits: StepLogits) -> None:
    """Verify the trees of all sessions, each until its verification ends or fails. A chain stops at a node that has
    several children or a non-finite row; the token after that node is then chosen on its own."""
    while verifications:
        verifications = _at_one_level(_past_typical(_past_chains(verifications, logits), logits), logits)


def _past_chains(verifications: Sequence[TreeVerification], logits: StepLogits) -> Sequence[TreeVerification]:
    """Verify the chains below the current nodes; return the verifications that go on."""
    queries = [verification.chain_query() for verification in verifications]
    asked = [query for query in queries if query is not None]
    if not asked:
        return verifications
    remaining: list[TreeVerification] = []
    found = iter(logits.verify_chains(asked))
    for verification, query in zip(verifications, queries, strict=True):
        tokens = list[int]()
        if query is not None:
            accepted, drawn = next(found)
            tokens = query.draws[:accepted] + ([] if drawn is None else [drawn])
        for token in tokens:
            if not verification.take(token):
                break
        else:  # all tokens taken, or no chain
            remaining.append(verification)
    return remaining


def _past_typical(verifications: Sequence[TreeVerification], logits: StepLogits) -> Sequence[TreeVerification]:
    """Take the typical candidates below the current nodes (TYPICAL); return the verifications that go on."""
    queries = [verification.typical_query() for verification in verifications]
    asked = [query for query in queries if query is not None]
    if not asked:
        return verifications
    found = iter(logits.accept_typical(asked))
    accepted = [[] if query is None else next(found) for query in queries]
    return [
        verification
        for verification, tokens in zip(verifications, accepted, strict=True)
        if all(verification.take(token) for token in tokens)
    ]


def _at_one_level(verifications: Sequence[TreeVerification], logits: StepLogits) -> list[TreeVerification]:
    """Choose a token at the current node of each verification; return the verifications that go on."""
    queries: list[SamplingQuery] = []
    asking: list[TreeVerification] = []
    for verification in verifications:
        try:
            queries.append(verification.query())
        except GrammarError as error:
            _, (finite,) = logits.choose([verification.row], [ANY])  # if not finite, its memory must be wiped
            verification.fail(GrammarFailureError(str(error)) if finite else NotFiniteError())
        else:
            asking.append(verification)
    remaining: list[TreeVerification] = []
    if asking:
        tokens, sound = logits.choose([verification.row for verification in asking], queries)
        undecided: list[tuple[TreeVerification, SamplingQuery]] = []
        for verification, query, token, finite in zip(asking, queries, tokens.tolist(), sound.tolist(), strict=True):
            if not finite:
                verification.fail(NotFiniteError())
            elif token == contrastive.UNDECIDED:
                undecided.append((verification, query))
            elif verification.take(token):
                remaining.append(verification)
        if undecided:
            lacking = logits.plausible(
                [verification.row for verification, _ in undecided], [query for _, query in undecided]
            )
            for (verification, _), plausible in zip(undecided, lacking, strict=True):
                verification.lack(plausible)
    return remaining


class TreeVerification:
    """The verification of a session's token tree in one step, at first at the root."""

    __slots__ = (
        "_blocks",
        "_is_undecided",
        "_node",
        "_path",
        "_prepared",
        "_typical",
        "error",
        "kv_copies",
        "lacks",
        "overruled",
        "planned",
        "result",
        "row",
        "rows",
        "session",
    )

    def __init__(self, session: VerifierSession, planned: ScheduledRows) -> None:
        assert planned.root_row is not None  # a chunk of prompt chooses no token
        self.session = session
        self.planned = planned
        offered = 0 if planned.tree is None else len(planned.tree.results)
        self.result = VerifyResult(session.tree.base, offered)
        self.kv_copies: list[tuple[int, int]] = []  # slots (from, to) to copy
        self.rows: list[int] = []  # rows that chose a token, as indices among the results
        self.overruled: list[OverruledPlace] = []  # if the session's policy asks for them
        self.error: Exception | None = None
        self._is_undecided = False  # nothing was chosen below the last token
        self.lacks: Tokens | None = None  # plausible tokens of the row that was undecided, if any (CONTRASTIVE)
        self.row = planned.root_row  # of the current node's logits, as an index among the results
        self._node = session.tree.root
        self._path: list[int] = []
        self._prepared: dict[int, SamplingQuery] = {}  # queries made in advance, by row
        self._blocks = session.verifies_blocks
        self._typical = session.request.sampler.rule is Rule.TYPICAL

    def query(self) -> SamplingQuery:
        """Return the sampling query below the current node; GrammarError if the grammar is too complex."""
        prepared = self._prepared.get(self.row)
        if prepared is not None:
            return prepared
        return self._query_below(self._node, self._path, self.session.allowed(self._path))

    def prepare_queries(self) -> Iterator[tuple[int, SamplingQuery]]:
        """Make queries in advance. Yield (row index among the results, sampling query) for every row the step may
        reach: the root's, the candidates', and the window's. Two kinds of rows are left out: those of a chain query
        that the window does not use, and those without a mask in advance, which verification queries when it reaches
        them."""
        tree = self.planned.tree
        nodes, paths = {self.row: self._node}, {id(self._node): self._path}
        if tree is not None:
            for node in tree.candidates:  # parents come before their children
                nodes[tree.results[id(node)]] = node
                paths[id(node)] = [*paths[id(node.parent)], node.token]
        in_chain = {row for row, node in nodes.items() if _on_chain(node)} if self._blocks else set[int]()
        for row, node in nodes.items():
            if row in in_chain:
                continue
            path = paths[id(node)]
            try:
                allowed = self.session.allowed(path)
            except GrammarError:
                continue
            self._prepared[row] = query = self._query_below(node, path, allowed)
            yield row, query
        yield from ((row, query) for row, query in self.lookahead_queries() if row not in nodes or row in in_chain)

    def chain_query(self) -> ChainQuery | None:
        """Return the query about the chain of draws below the current node. It ends before the first candidate without
        a row, and at a node with several children. None if there is no chain, or draws are tested one by one."""
        if not self._blocks:
            return None
        tree, node, path, row = self.planned.tree, self._node, self._path, self.row
        rows, queries = list[int](), list[SamplingQuery]()
        try:
            while len(node.children) <= 1:
                queries.append(self._query_below(node, path, self.session.allowed(path)))
                rows.append(row)
                child = next(iter(node.children.values()), None)
                if child is None or tree is None or id(child) not in tree.results:
                    break
                node, path, row = child, [*path, child.token], tree.results[id(child)]
        except GrammarError:
            pass  # raised again if verification gets there
        if not queries or queries[0].proposal is None:
            return None
        return ChainQuery(rows, queries)

    def typical_query(self) -> TypicalQuery | None:
        """Return the query about the step's candidates below the current node; None if there are none, or the rule is
        not TYPICAL."""
        tree = self.planned.tree
        if tree is None or not self._typical:
            return None
        rows, queries, candidates = list[int](), list[SamplingQuery](), list[TypicalCandidate]()
        waiting: list[tuple[Node, list[int], int, int | None]] = [(self._node, self._path, self.row, None)]
        for node, path, row, place in waiting:  # grows by each node's children
            below = [child for child in node.children.values() if id(child) in tree.results]
            if not below:
                continue
            query = self._prepared.get(row)
            try:
                query = query or self._query_below(node, path, self.session.allowed(path))
            except GrammarError:
                continue  # raised again if verification gets there
            number = len(rows)
            rows.append(row)
            queries.append(query)
            if place is not None:
                candidates[place] = candidates[place]._replace(node=number)
            for child in below:
                waiting.append((child, [*path, child.token], tree.results[id(child)], len(candidates)))
                candidates.append(TypicalCandidate(number, child.token, None))
        return TypicalQuery(rows, queries, candidates) if candidates else None

    @property
    def lookahead_count(self) -> int:
        """The number of the window's sampling queries."""
        return 0 if self.planned.tree is None else len(self.planned.tree.lookahead_results)

    def lookahead_queries(self) -> Iterator[tuple[int, SamplingQuery]]:
        """Yield (row index among the results, sampling query) for the window's rows."""
        tree = self.planned.tree
        if tree is not None and tree.lookahead is not None:
            queries = self.session.ngrams.queries(tree.lookahead, self.session.penalty_state)
            yield from zip(tree.lookahead_results, queries, strict=True)

    def take(self, token: int) -> bool:
        """Commit the chosen token and move to its child; return False if verification ends here."""
        position = self._node.position + 1
        tree = self.planned.tree
        child = None if tree is None else self._tested(tree, token)
        self.rows.append(self.row)
        if self.session.policy.overruled_logprobs and _overrules(self._node, token):
            self.overruled.append(OverruledPlace(self.row, position, token))
        result = self.result
        result.tokens.append(token)
        result.sources.append(self._source(child))
        result.finish = self.session.finish_reason(token, position)
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
        """End verification with an error: non-finite logits, or a grammar too complex to give a mask."""
        if self.result.tokens and isinstance(error, GrammarFailureError):
            self._stop_above()
        else:
            self.error = error

    def lack(self, tokens: Tokens) -> None:
        """End verification at an undecided row: the draft's distribution lacks some of the plausible `tokens`
        (CONTRASTIVE)."""
        self.lacks = tokens
        if self.result.tokens:
            self._stop_above()

    def _stop_above(self) -> None:
        """Keep the tokens chosen so far, the last one as a bonus token: the next step begins with it as its root, and
        decides there or fails."""
        self._is_undecided = True
        self.result.accepted -= 1
        self.result.sources[-1] = BONUS

    def commit_result(self, now: float) -> VerifyResult:
        """Complete the result, apply it to the session and return it."""
        if self.session.request.rejected_candidates and self.planned.tree is not None:
            self.result.rejected = list(self._rejected(self.planned.tree))
        if self.planned.undrafted:
            self.result.undrafted = len(self.result.tokens)
        if self.planned.decision is not None:
            self.result.decisions.append(self.planned.decision)
        self.session.apply_result(self.result, self.planned.count, now)
        return self.result

    def _rejected(self, tree: TreeRows) -> Iterator[RejectedCandidate]:
        """Yield the candidates of this step that were not accepted, in preorder; called before the root moves."""
        prompt = len(self.session.request.prompt)
        accepted = self._node.path()
        decided = [self.session.tree.root, *accepted]
        if self._is_undecided:
            decided.pop()
        for node, taken in zip_longest(decided, accepted):
            ahead = [(child, 0) for child in node.children.values() if child is not taken]
            while ahead:
                candidate, depth = ahead.pop()
                if id(candidate) in tree.results:
                    yield RejectedCandidate(candidate.position - prompt, depth, candidate.token, candidate.origin)
                    ahead += [(child, depth + 1) for child in candidate.children.values()]

    def _tested(self, tree: TreeRows, token: int) -> Node | None:
        """Return the chosen candidate if it was in this step, and update the n-grams' confidence with the choice."""
        for candidate in self._node.children.values():
            if candidate.origin != REMOTE_DRAFT and id(candidate) in tree.results:
                self.session.ngrams.learn(candidate, candidate.token == token)
        child = self._node.children.get(token)
        return child if child is not None and id(child) in tree.results else None

    def _query_below(self, node: Node, path: list[int], allowed: TokenMask | None) -> SamplingQuery:
        """Return the sampling query below a node. Sampled children are tested even if they are not in this step: if
        one is accepted, the candidates below it stay alive."""
        proposal = None if node.distribution is None else Proposal(tuple(node.children), node.distribution)
        session, sampler = self.session, self.session.request.sampler
        ruled_out = sampler.ruled_out(session.tree.committed, path)
        return SamplingQuery(sampler, node.position + 1, session.penalty_state, path, proposal, allowed, ruled_out)

    def _source(self, child: Node | None) -> int:
        if child is not None:
            return child.origin
        tree = self.planned.tree
        if tree is None or not tree.results:
            return PLAIN
        offered = any(id(other) in tree.results for other in self._node.children.values())
        return CORRECTION if offered else BONUS


def _overrules(node: Node, token: int) -> bool:
    """Return True if a remote draft has guessed below this node, and its likeliest guess is another token."""
    guesses = [child for child in node.children.values() if child.drafted]
    return bool(guesses) and max(guesses, key=lambda guess: guess.logprob).token != token


def _on_chain(node: Node) -> bool:
    """Return True if a chain query covers this node's row: it has exactly one child, or it is a leaf and an only
    child."""
    above = node.parent
    return len(node.children) == 1 or (not node.children and above is not None and len(above.children) == 1)


def warm_up(vocabulary: int) -> None:
    """Draw a token, so that no request waits for code to be compiled, or loaded from the cache folder, on first use."""
    from specdec.decoding import gumbel_pruning  # Numba takes a second to import, wasted on a refused start
    from specdec.engine.cpu.code_cache import kept

    kept("collect", gumbel_pruning.__file__, gumbel_pruning.collect)
    choose(np.zeros((1, vocabulary), dtype=np.float32), [SamplingQuery(RequestSampler(Sampling(temperature=1.0)), 0)])
