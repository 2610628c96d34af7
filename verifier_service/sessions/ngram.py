"""A session's n-grams: candidates found without a draft model, by n-gram lookup and lookahead windows.

Both add to the token tree beside the draft's candidates. N-gram lookup (`continuations`) proposes the tokens that
followed an earlier occurrence of the text's last tokens, and costs only the rows that verify them. A lookahead window
(`lookahead.py`) costs rows in every step to compute its n-grams. P(a proposal is right) depends on how many preceding
tokens agree with its source, and is learned from verify results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from specdec.decoding.lookahead import Lookahead, Window
from specdec.decoding.ngrams import MAX_MATCH, NgramPool, Tokens, continuations
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.query import PenaltyState, RequestSampler, SamplingQuery
from specdec.decoding.sampling import Rule
from specdec.decoding.tree import Node, Paths, TokenTree
from verifier_service.backend.result import LOOKAHEAD, NGRAM
from verifier_service.sessions.window_gain import WindowGain
from verifier_service.settings.tuning import DEFAULTS, NgramTuning

MAX_OWN_NODES = 128
"""Approximate limit on proposers' nodes in a session's token tree, besides those granted to its draft."""


class Confidence:
    """Estimates P(a proposal is right) by the length of the match between the text and the proposal's source."""

    def __init__(self, tuning: NgramTuning = DEFAULTS.ngrams) -> None:
        self._tuning = tuning
        self._scores = [math.log(1 - 0.8 / (1 + 0.5 * match)) for match in range(MAX_MATCH + 1)]

    def logprobs(self, match: int, most: int, least: float) -> list[float]:
        """Return the logprobs of up to `most` consecutive proposals after a match of `match` tokens, while their sum is
        at least `least`. Each proposal extends the match for the next one."""
        found: list[float] = []
        for agreement in range(match, match + most):
            logprob = self._scores[min(agreement, MAX_MATCH)]
            least -= logprob
            if least > 0:
                break
            found.append(logprob)
        return found

    def learn(self, match: int, right: bool) -> None:
        match = min(match, MAX_MATCH)
        rate = math.exp(self._scores[match])
        rate += self._tuning.confidence_smoothing * (right - rate)
        self._scores[match] = math.log(max(rate, self._tuning.least_rate))


class LookaheadRows(NamedTuple):
    """A window's rows in a step."""

    nodes: list[Node]  # parents first
    queried: list[Node]  # nodes with a query below them; the one without a parent is the root
    candidates: list[Node]  # the nodes in the token tree


class SessionNgrams:
    """The n-grams of one session. `text`: prompt and generated tokens so far; `end`: the maximum length of the text;
    `shared_pool`: replaces the session's own n-gram pool."""

    def __init__(
        self,
        text: Sequence[int],
        end: int,
        sampler: RequestSampler,
        tuning: NgramTuning = DEFAULTS.ngrams,
        gain: WindowGain | None = None,
        shared_pool: NgramPool | None = None,
    ) -> None:
        self._tuning = tuning
        self._text = np.empty(max(end, len(text)) + 1, dtype=np.int32)
        self._text[: len(text)] = text
        self._length = len(text)
        self._end = end
        # Under COUPLED and TYPICAL, a window chooses tokens with the target's noise. Under other rules the target's
        # draw cannot be foreseen: the most probable token is the best guess.
        likeliest = replace(sampler.sampling, temperature=0.0)
        self._sampler = sampler if sampler.rule in (Rule.COUPLED, Rule.TYPICAL) else RequestSampler(likeliest)
        self.lookup_confidence, self.lookahead_confidence = Confidence(tuning), Confidence(tuning)
        self._proposed = 0  # text length at the last `propose`
        self._fruitless = self._skipped = 0  # consecutive steps
        self.size: Lookahead | None = None  # of the open window
        self.window: Window | None = None
        self._shared_pool = shared_pool
        self.pool = shared_pool
        self.gain = WindowGain() if gain is None else gain

    # --- candidates ---------------------------------------------------------------------------------

    def propose(
        self,
        tree: TokenTree,
        break_even: float,
        shared: Tokens | None,
        *,
        every: bool,
        sampled: bool,
        lookups: bool = True,
        windows: bool = True,
    ) -> bool:
        """Add candidates to the tree: n-gram lookups in the text and in `shared` texts, and n-grams of the window.

        Candidates far below `break_even`, a path probability, are dropped. `every`: skip no step, and add all n-grams
        of the window; `sampled`: candidates need a distribution (REJECTION). Return False if nothing was looked up: the
        text has not grown since the last call, or this step is skipped.
        """
        if self._proposed == self._length:
            return False
        tuning, self._proposed = self._tuning, self._length
        if self._skipped < min(self._fruitless // tuning.fruitless_steps, tuning.max_skipped) and not every:
            self._skipped += 1
            return False
        self._skipped = 0
        least = math.log(max(tuning.min_probability, break_even * tuning.break_even_share))
        text = self._text[: self._length]
        if lookups:
            for tokens, match in self._looked_up(text, shared):
                self._insert_lookup(tree, tokens, match, least, sampled)
        if self.pool is not None and windows:
            for ngram in self.pool.after(int(text[-1])):
                logprobs = self.lookahead_confidence.logprobs(1, len(ngram), -math.inf if every else least)
                self._insert(tree, ngram[: len(logprobs)], logprobs, 1, LOOKAHEAD, sampled)
        return True

    def _looked_up(self, text: Tokens, shared: Tokens | None) -> list[tuple[Tokens, int]]:
        """Return what followed the text's last tokens, in the text and in `shared` texts, and the length of each match.
        The longest match comes first, since in a tree with draws (REJECTION) the first candidate of a place stays."""
        branches, depth = self._tuning.branches, self._tuning.depth
        last = text[-MAX_MATCH:]
        # A continuation reaching the end of the text wraps around: the text is assumed to repeat itself.
        found = [(np.resize(tokens, depth), match) for tokens, match in continuations(text, last, branches, depth)]
        if shared is not None:
            found += continuations(shared, last, branches, depth)
        return sorted(found, key=lambda one: -one[1])

    def _insert_lookup(self, tree: TokenTree, tokens: Tokens, match: int, least: float, sampled: bool) -> None:
        logprobs = self.lookup_confidence.logprobs(match, len(tokens), least)
        self._insert(tree, tokens[: len(logprobs)].tolist(), logprobs, match, NGRAM, sampled)

    def _insert(
        self, tree: TokenTree, tokens: Sequence[int], logprobs: Sequence[float], match: int, origin: int, sampled: bool
    ) -> None:
        rows = [(parent, DraftDistribution.certain(token)) for parent, token in enumerate(tokens)] if sampled else ()
        for node in tree.insert(tree.base, Paths(tokens, range(len(tokens)), logprobs, rows), origin):
            node.match = match + node.position - tree.base

    def learn(self, node: Node, right: bool) -> None:
        """Update the confidence with the target's choice at the place of a verified candidate `node`."""
        if node.match is not None:
            (self.lookup_confidence if node.origin == NGRAM else self.lookahead_confidence).learn(node.match, right)

    def extend(self, tokens: Sequence[int], sources: Sequence[int]) -> None:
        """Append committed tokens to the text, and update the statistics from their sources. Close the window if its
        trial has ended and no window pays now."""
        self._text[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)
        self._fruitless = 0 if NGRAM in sources or LOOKAHEAD in sources else self._fruitless + 1
        full = self.window is not None and self.window.full
        if not self.gain.observe(len(tokens), sources.count(LOOKAHEAD), full=full):
            self.close_window()
            self.pool = None

    # --- the window ---------------------------------------------------------------------------------

    def open_window(self, tree: TokenTree, size: Lookahead) -> LookaheadRows | None:
        """Return the rows of a window for this step, opening a new one if none of this size is open. None if the window
        would extend beyond the end of the text."""
        if tree.base + size.window + size.ngram - 3 > self._end:
            return None
        if self.window is None or self.size != size:
            count = size.window + size.ngram - 3
            seeds = np.resize(self._text[max(0, self._length - count) : self._length], count)
            self.size, self.window = size, Window(size, seeds.tolist())
            self.pool = self._shared_pool or self.pool or NgramPool(size.guesses)
            if self._shared_pool is None:
                self.pool.guesses = size.guesses
        return self._jacobi(self.window.levels[0], tree) if self.window.jacobi else _lookahead_rows(self.window, tree)

    def _jacobi(self, chain: Sequence[int], tree: TokenTree) -> LookaheadRows:
        """Return a Jacobi window's rows: its chain as candidates in the token tree. The first token that the tree does
        not accept, and all tokens after it, become nodes outside the tree."""
        self._insert(tree, chain, self.lookahead_confidence.logprobs(0, len(chain), -math.inf), 0, LOOKAHEAD, False)
        nodes: list[Node] = []
        candidates: list[Node] = []
        place = tree.root
        for token in chain:
            child = place.children.get(token)
            if child is None:
                child = Node(token, place.position + 1, place, 0.0, LOOKAHEAD)
            else:
                candidates.append(child)
            nodes.append(child)
            place = child
        return LookaheadRows(nodes, [tree.root, *nodes], candidates)

    def close_window(self) -> None:
        """Close the window, if any: its tokens soon go stale without steps. Its n-grams stay."""
        self.size = self.window = None

    def queries(self, lookahead_rows: LookaheadRows, penalty_state: PenaltyState | None) -> Iterator[SamplingQuery]:
        """Yield the sampling queries of the window's rows."""
        for node in lookahead_rows.queried:
            path = [step.token for step in node.path()]
            yield SamplingQuery(self._sampler, node.position + 1, penalty_state, path, None)

    def observe_window(self, chosen: Sequence[int], committed: int) -> None:
        """Advance the window with the target's choices at the queried rows, and add completed n-grams to the pool. The
        same step extends the text by `committed` tokens."""
        assert self.window is not None
        assert self.pool is not None
        for ngram in self.window.advance(int(self._text[self._length - 1]), chosen, committed):
            self.pool.add(ngram)


def _chain(parent: Node, tokens: Sequence[int]) -> list[Node]:
    nodes = []
    for token in tokens:
        parent = Node(token, parent.position + 1, parent, 0.0, LOOKAHEAD)
        nodes.append(parent)
    return nodes


def _lookahead_rows(window: Window, tree: TokenTree) -> LookaheadRows:
    """Return a window's rows as a separate tree below the root: window and candidates do not attend to each other."""
    root = Node(tree.root.token, tree.root.position, None, 0.0, 0)
    first_level = _chain(root, window.levels[0])
    if len(window.levels) == 1:
        return LookaheadRows(first_level, [root, *first_level], [])
    columns = [_chain(above, column) for above, column in zip([root, *first_level], window.columns, strict=True)]
    nodes = first_level + [node for column in columns for node in column]
    return LookaheadRows(nodes, [column[-1] for column in columns], [])
