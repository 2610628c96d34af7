"""Tree verification: from the logits of a step to the tokens committed for every session.

Start at the root, take the target's own choice, move to the child with that token, and stop where there is none. All
sessions advance together, one level at a time, so that one vectorised call makes all their choices (`verify_trees`).
Where a session verifies blocks (REJECTION), a chain of draws is tested as a whole, down to the next node with several
children or the last row of the step. Under TYPICAL, the accepted path below a node is found as a whole.
`TreeVerification` holds one session's part, `VerifiedStep` the outcome of a whole step.

This file and `choice.py`, `rejection.py`, `block_verification.py`, `contrastive.py` and `typical.py` in
`specdec/decoding`, which choose tokens under each acceptance rule, are the whole of speculative decoding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from specdec.decoding import contrastive
from specdec.decoding.block_verification import ChainQuery
from specdec.decoding.choice import Tokens, choose
from specdec.decoding.contrastive import DraftQuery
from specdec.decoding.proposal import Proposal
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.step_logits import StepLogits
from specdec.decoding.token_mask import TokenMask
from specdec.decoding.tree import Node
from specdec.decoding.typical import TypicalCandidate, TypicalQuery
from specdec.engine.engine import Pass
from specdec.grammar.grammar import GrammarError
from specdec.serving.errors import GrammarFailureError
from specdec.serving.target_logprobs import TargetLogprobs
from verifier_service.backend.result import (
    BONUS,
    CORRECTION,
    PLAIN,
    REMOTE_DRAFT,
    PromptScores,
    RejectedCandidate,
    VerifyResult,
)
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import VerifierSession
from verifier_service.sessions.step_rows import ScheduledRows, TreeRows

Prompts = Sequence[tuple[VerifierSession, ScheduledRows]]
"""Rows of prompts in a step, without the root: they choose no token."""


PLACES_A_STEP = 8
"""Maximum positions per step with log-probabilities for drafts that learn: each takes a pass over the vocabulary."""

Item = TypeVar("Item")


def evenly(items: Sequence[Item], most: int) -> Sequence[Item]:
    """Return at most `most` of the items, evenly spaced, in order."""
    return items[:: -(-len(items) // most)] if len(items) > most else items


class VerifiedStep:
    """The verified trees of a step. The constructor waits for the forward pass, launched at time `launched`, and
    verifies; it commits nothing, and errors propagate. `apply` commits the tokens and makes the `draft_queries` of
    sessions whose row was undecided (CONTRASTIVE). `beside` is called while an asynchronous engine computes. `observe`
    is called with the verifications, the prompt rows that stop short of a root, and the logits, which are not kept. The
    verifications include failed ones, but not undecided ones without a token."""

    def __init__(
        self,
        entries: Sequence[tuple[RunningSession, ScheduledRows]],
        computing: Pass,
        launched: float,
        beside: Callable[[], None] = lambda: None,
        observe: Callable[[Sequence[TreeVerification], Prompts, StepLogits], None] = lambda *_: None,
    ) -> None:
        pairs = [(e, TreeVerification(e.session, rows)) for e, rows in entries if rows.root_row is not None]
        verifications = [verification for _, verification in pairs]

        def asked() -> Mapping[int, SamplingQuery]:
            queries = dict(chain.from_iterable([v.queries() for v in verifications]))
            beside()
            return queries

        logits = computing.logits(asked)
        self.forward_seconds = time.monotonic() - launched
        verify_trees(verifications, logits)
        scores = _prompt_scores(entries, logits)
        failed = {entry: verification.error for entry, verification in pairs if verification.error is not None}
        failed |= {e: NotFiniteError() for e, scored in scores if any(math.isnan(p.chosen) for p in scored.logprobs)}
        self.failed = list(failed.items())
        self.scores = [(entry, scored) for entry, scored in scores if entry not in failed]
        self._prefilled = [(e, rows.count) for e, rows in entries if rows.root_row is None and e not in failed]
        sound = [(entry, verification) for entry, verification in pairs if entry not in failed]
        self._undecided = [(entry, verification) for entry, verification in sound if verification.lacks is not None]
        self.draft_queries: list[tuple[RunningSession, DraftQuery]] = []
        self._sound = [(entry, verification) for entry, verification in sound if verification.result.tokens]
        # Slots (from, to) to copy: accepted candidates of side branches.
        self.kv_copies = [copy for _, verification in self._sound for copy in verification.kv_copies]
        self._add_logprobs(logits)
        self._add_overruled(logits)
        prompts = [(e.session, rows) for e, rows in entries if rows.root_row is None and e not in failed]
        observe([v for v in verifications if v.lacks is None or v.result.tokens], prompts, logits)

    def _add_logprobs(self, logits: StepLogits) -> None:
        """Add the log-probabilities of committed tokens to the results of the requests that ask for them."""
        asking = [
            verification for _, verification in self._sound if verification.session.request.top_logprobs is not None
        ]
        if not asking:
            return
        rows = [row for verification in asking for row in verification.rows]
        tokens = np.asarray([token for verification in asking for token in verification.result.tokens])
        tops = [verification.session.request.top_logprobs or 0 for verification in asking for _ in verification.rows]
        found = iter(logits.logprobs(rows, tokens, tops))
        for verification in asking:
            verification.result.logprobs = list(islice(found, len(verification.rows)))

    def _add_overruled(self, logits: StepLogits) -> None:
        """Add the target's log-probabilities to the results at positions where it overruled a remote draft that learns:
        at most PLACES_A_STEP, since all sessions wait for them."""
        places = [(verification, place) for _, verification in self._sound for place in verification.overruled]
        if not places:
            return
        asking = evenly(places, PLACES_A_STEP)
        tokens = np.asarray([place.token for _, place in asking])
        tops = [verification.session.policy.overruled_logprobs for verification, _ in asking]
        found = logits.logprobs([place.row for _, place in asking], tokens, tops)
        for (verification, place), logprobs in zip(asking, found, strict=True):
            verification.result.overruled.append(TargetLogprobs.of(place.position, logprobs))

    @property
    def results(self) -> list[tuple[RunningSession, VerifyResult]]:
        """The tokens to commit; `failed` sessions have none."""
        return [(entry, verification.result) for entry, verification in self._sound]

    def apply(self, now: float) -> list[tuple[RunningSession, VerifyResult]]:
        """Commit and return accepted tokens; `failed` sessions get nothing."""
        for entry, count in self._prefilled:
            entry.session.computed += count
        for entry, scores in self.scores:
            entry.session.apply_scores(scores)
        results = [(entry, verification.apply(now)) for entry, verification in self._sound]
        for entry, verification in self._undecided:
            if not verification.result.tokens:
                entry.session.computed += verification.planned.count - 1  # the root's row is computed again
            assert verification.lacks is not None
            self.draft_queries.append((entry, entry.session.ask(verification.lacks)))
        for entry, _ in self._sound:  # not of unfinished prompts: their logits are still unchecked
            entry.session.cache_prefix()
        return results


def _prompt_scores(
    entries: Sequence[tuple[RunningSession, ScheduledRows]], logits: StepLogits
) -> list[tuple[RunningSession, PromptScores]]:
    """Return the log-probabilities of the prompt tokens scored in this step, for the requests that ask for them."""
    asking = [(entry, rows.scored) for entry, rows in entries if rows.scored]
    if not asking:
        return []
    tokens, tops = list[int](), list[int]()
    for entry, scored in asking:
        request, first = entry.session.request, entry.session.scored
        tokens += request.prompt[first : first + len(scored)]
        tops += [request.prompt_logprobs or 0] * len(scored)
    found = iter(logits.logprobs([row for _, scored in asking for row in scored], np.asarray(tokens), tops))
    return [(e, PromptScores(e.session.scored, list(islice(found, len(scored))))) for e, scored in asking]


class OverruledPlace(NamedTuple):
    """A place where the target chose another token than a remote draft's likeliest."""

    row: int  # index among the results
    position: int  # of the token in the text
    token: int  # the target's


class TreeVerification:
    """The verification of a session's token tree in one step; a `TreeWalker` for `verify_trees`."""

    __slots__ = (
        "_asked",
        "_blocks",
        "_is_undecided",
        "_node",
        "_path",
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
        self.row = planned.root_row
        self._node = session.tree.root
        self._path: list[int] = []
        self._asked: dict[int, SamplingQuery] = {}  # queries made in advance, by row
        self._blocks = session.verifies_blocks
        self._typical = session.request.sampler.rule is Rule.TYPICAL

    def query(self) -> SamplingQuery:
        asked = self._asked.get(self.row)
        return self._query(self._node, self._path, self.session.allowed(self._path)) if asked is None else asked

    def queries(self) -> Iterator[tuple[int, SamplingQuery]]:
        """Yield (row index among the results, sampling query) for every row the step may reach: the root's, the
        candidates', and the window's. A row is left out, and queried when reached, if a chain query covers it and the
        window does not use it, or if its grammar cannot give a mask in advance."""
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
            self._asked[row] = query = self._query(node, path, allowed)
            yield row, query
        yield from ((row, query) for row, query in self.lookahead_queries() if row not in nodes or row in in_chain)

    def chain(self) -> ChainQuery | None:
        """Return the query about the chain of draws below the current node, as far as the step has rows for it and no
        node has several children. None if there is no chain, or draws are tested one by one."""
        if not self._blocks:
            return None
        tree, node, path, row = self.planned.tree, self._node, self._path, self.row
        rows, queries = list[int](), list[SamplingQuery]()
        try:
            while len(node.children) <= 1:
                queries.append(self._query(node, path, self.session.allowed(path)))
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

    def typical(self) -> TypicalQuery | None:
        """Return the query about the candidates of the step below the current node; None if there are none, or the rule
        is not TYPICAL."""
        tree = self.planned.tree
        if tree is None or not self._typical:
            return None
        rows, queries, candidates = list[int](), list[SamplingQuery](), list[TypicalCandidate]()
        waiting: list[tuple[Node, list[int], int, int | None]] = [(self._node, self._path, self.row, None)]
        for node, path, row, place in waiting:  # grows by each node's children
            below = [child for child in node.children.values() if id(child) in tree.results]
            if not below:
                continue
            query = self._asked.get(row)
            try:
                query = query or self._query(node, path, self.session.allowed(path))
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
        if self.session.policy.overruled_logprobs and _overrules(self._node, token):
            self.overruled.append(OverruledPlace(self.row, position, token))
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
        if self.result.tokens and isinstance(error, GrammarFailureError):
            self._stop_above()
        else:
            self.error = error

    def lack(self, tokens: Tokens) -> None:
        self.lacks = tokens
        if self.result.tokens:
            self._stop_above()

    def _stop_above(self) -> None:
        """Keep the tokens chosen so far, the last one as a bonus token: the next step begins with it as its root, and
        decides there or fails."""
        self._is_undecided = True
        self.result.accepted -= 1
        self.result.sources[-1] = BONUS

    def apply(self, now: float) -> VerifyResult:
        """Apply the result to the session and return it."""
        if self.session.request.rejected_candidates and self.planned.tree is not None:
            self.result.rejected = list(self._rejected(self.planned.tree))
        if self.planned.undrafted:
            self.result.undrafted = len(self.result.tokens)
        if self.planned.decision is not None:
            self.result.decisions.append(self.planned.decision)
        self.session.apply(self.result, self.planned.count, now)
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
        """Return the chosen candidate if it was in this step, and update the n-grams' confidence with this place."""
        for candidate in self._node.children.values():
            if candidate.origin != REMOTE_DRAFT and id(candidate) in tree.results:
                self.session.ngrams.learn(candidate, candidate.token == token)
        child = self._node.children.get(token)
        return child if child is not None and id(child) in tree.results else None

    def _query(self, node: Node, path: list[int], allowed: TokenMask | None) -> SamplingQuery:
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


ANY = SamplingQuery(RequestSampler(Sampling(temperature=0.0)), 0)
"""The query for a row's likeliest token."""


class NotFiniteError(FloatingPointError):
    """The logits of a row are not finite."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite")


class TreeWalker(Protocol):
    """A session's position in its tree during verification, at first the root."""

    row: int
    """Index of the current node's logits among the results."""

    def chain(self) -> ChainQuery | None:
        """Return the query about a chain below the current node; None if the node is decided alone."""

    def typical(self) -> TypicalQuery | None:
        """Return the query about the candidates below the current node (TYPICAL); None if there is none."""

    def query(self) -> SamplingQuery:
        """Return the sampling query below the current node; GrammarError if the grammar is too complex."""

    def take(self, token: int) -> bool:
        """Commit the chosen token and move to its child; return False if verification ends here."""

    def fail(self, error: Exception) -> None:
        """End verification with an error: non-finite logits, or a grammar too complex to give a mask."""

    def lack(self, tokens: Tokens) -> None:
        """End verification at an undecided row: the draft's distribution lacks some of the plausible `tokens`
        (CONTRASTIVE)."""


def verify_trees(walkers: Sequence[TreeWalker], rows: StepLogits) -> None:
    """Verify the trees of all walkers, each until it ends or fails. The node that a chain leads to is decided alone: it
    has several children, or its row is broken."""
    while walkers:
        walkers = _at_one_level(_past_typical(_past_chains(walkers, rows), rows), rows)


def _past_chains(walkers: Sequence[TreeWalker], rows: StepLogits) -> Sequence[TreeWalker]:
    """Verify the chains below the current nodes; return the walkers that go on."""
    queries = [walker.chain() for walker in walkers]
    asked = [query for query in queries if query is not None]
    if not asked:
        return walkers
    remaining: list[TreeWalker] = []
    found = iter(rows.verify_chains(asked))
    for walker, query in zip(walkers, queries, strict=True):
        tokens = list[int]()
        if query is not None:
            accepted, drawn = next(found)
            tokens = query.draws[:accepted] + ([] if drawn is None else [drawn])
        for token in tokens:
            if not walker.take(token):
                break
        else:  # also without a chain: one level at a time
            remaining.append(walker)
    return remaining


def _past_typical(walkers: Sequence[TreeWalker], rows: StepLogits) -> Sequence[TreeWalker]:
    """Take the typical candidates below the current nodes (TYPICAL); return the walkers that go on."""
    queries = [walker.typical() for walker in walkers]
    asked = [query for query in queries if query is not None]
    if not asked:
        return walkers
    found = iter(rows.accept_typical(asked))
    accepted = [[] if query is None else next(found) for query in queries]
    return [
        walker for walker, tokens in zip(walkers, accepted, strict=True) if all(walker.take(token) for token in tokens)
    ]


def _at_one_level(walkers: Sequence[TreeWalker], rows: StepLogits) -> list[TreeWalker]:
    """Choose a token at the current node of each walker; return the walkers that go on."""
    queries: list[SamplingQuery] = []
    asking: list[TreeWalker] = []
    for walker in walkers:
        try:
            queries.append(walker.query())
        except GrammarError as error:
            _, (finite,) = rows.choose([walker.row], [ANY])  # non-finite: its memory must be wiped
            walker.fail(GrammarFailureError(str(error)) if finite else NotFiniteError())
        else:
            asking.append(walker)
    remaining: list[TreeWalker] = []
    if asking:
        tokens, sound = rows.choose([walker.row for walker in asking], queries)
        undecided: list[tuple[TreeWalker, SamplingQuery]] = []
        for walker, query, token, finite in zip(asking, queries, tokens.tolist(), sound.tolist(), strict=True):
            if not finite:
                walker.fail(NotFiniteError())
            elif token == contrastive.UNDECIDED:
                undecided.append((walker, query))
            elif walker.take(token):
                remaining.append(walker)
        if undecided:
            lacking = rows.plausible([walker.row for walker, _ in undecided], [query for _, query in undecided])
            for (walker, _), plausible in zip(undecided, lacking, strict=True):
                walker.lack(plausible)
    return remaining


def warm_up(vocabulary: int) -> None:
    """Draw a token, so that no request waits for code compiled on first use or loaded from the cache folder."""
    from specdec.decoding import gumbel_pruning  # Numba takes a second to import, wasted on a refused start
    from specdec.engine.cpu.code_cache import kept

    kept("collect", gumbel_pruning.__file__, gumbel_pruning.collect)
    choose(np.zeros((1, vocabulary), dtype=np.float32), [SamplingQuery(RequestSampler(Sampling(temperature=1.0)), 0)])
