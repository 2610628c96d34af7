"""What a session guesses by itself, without a draft: the verifier's own drafter, which is never far and never down.

Two sources feed the token tree beside the draft's candidates: what followed where the text said the same before
(`suffix.py`), which costs no row but those that verify it, and the n-grams of a lookahead window (`lookahead.py`),
whose rows are in every step. How sure a guess is depends on how far it is known to agree; that is learned from
verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from specdec.decoding.choice import RequestSampler, SamplingQuery
from specdec.decoding.lookahead import Lookahead, Window
from specdec.decoding.ngrams import NgramPool
from specdec.decoding.processing import PenaltyState
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.sampling import Rule
from specdec.decoding.suffix import LONGEST, Tokens, continuations
from specdec.decoding.tree import Node, Paths, TokenTree

NGRAM, LOOKAHEAD = 5, 6  # specdec.v2.TokenSource

BRANCHES = 3
DEPTH = 24
"""Of what the text itself suggests, so many continuations of so many tokens are tried."""

MAX_OWN_NODES = 128
"""Guesses of its own that a session may have alive, about, besides the nodes that its draft was granted."""

MIN_PROBABILITY = 0.02
PRICE_SHARE = 0.5
"""A guess is put into the tree if it is reached at least so often, and where rows cost half as much as of late."""

FRUITLESS_STEPS, MAX_SKIPPED = 8, 15
"""Looking takes time of the step: after every so many steps in a row in which no guess was right, one step more is left
out between two looks, up to so many."""

CONFIDENCE_SMOOTHING = 0.1
LEAST_RATE = 0.01

WINDOWS = (Lookahead(15, 5, 15), Lookahead(10, 5, 10), Lookahead(7, 5, 7), Lookahead(5, 4, 5), Lookahead(4, 3, 4))
"""Sizes of windows to choose from where a request asks for none: the larger, the better and the dearer."""

GAIN_SMOOTHING = 0.05
INITIAL_GAIN = 0.5
"""Tokens a step that a window is hoped to bring when it is opened."""

FIRST_WINDOW_PAUSE, LONGEST_WINDOW_PAUSE = 64, 4096
"""Steps until a window that did not pay is tried again, twice as many each time."""


class Confidence:
    """P(a guess is right), by the number of tokens before it on which the text and its source agree."""

    def __init__(self) -> None:
        self._scores = [math.log(1 - 0.8 / (1 + 0.5 * match)) for match in range(LONGEST + 1)]

    def logprobs(self, match: int, most: int, least: float) -> list[float]:
        """Logarithms for a guess and those that hang on it, `most` at most, while their sum is not below `least`."""
        found: list[float] = []
        for agreement in range(match, match + most):
            logprob = self._scores[min(agreement, LONGEST)]
            least -= logprob
            if least > 0:
                break
            found.append(logprob)
        return found

    def learn(self, match: int, right: bool) -> None:
        match = min(match, LONGEST)
        rate = math.exp(self._scores[match])
        self._scores[match] = math.log(max(rate + CONFIDENCE_SMOOTHING * (right - rate), LEAST_RATE))


class LookaheadRows(NamedTuple):
    """A window's rows in a step."""

    nodes: list[Node]  # parents first
    queried: list[Node]  # below which a choice is wanted; one without a parent is the tip
    candidates: list[Node]  # nodes that live in the token tree


class NgramProposer:
    """Owned by its session. `text` are prompt and generated tokens so far; it ends before position `end`."""

    def __init__(self, text: Sequence[int], end: int, sampler: RequestSampler) -> None:
        self._text = np.empty(max(end, len(text)) + 1, dtype=np.int32)
        self._text[: len(text)] = text
        self._length = len(text)
        self._end = end
        # A guess is deterministic: under a rule that draws otherwise, the best one is the most probable token.
        likeliest = replace(sampler.sampling, temperature=0.0)
        self._sampler = sampler if sampler.rule is Rule.COUPLED else RequestSampler(likeliest)
        self.lookup_confidence, self.lookahead_confidence = Confidence(), Confidence()
        self._proposed = 0  # length of the text at which guesses were last made
        self._fruitless = self._skipped = 0  # steps in a row
        self._size: Lookahead | None = None
        self.window: Window | None = None
        self.pool: NgramPool | None = None
        self.gain = INITIAL_GAIN  # tokens a step that the window brings, moving average
        self._window_pause, self._next_window_pause = 0, FIRST_WINDOW_PAUSE  # steps

    # --- candidates ---------------------------------------------------------------------------------

    def propose(
        self,
        tree: TokenTree,
        price: float,
        shared: Tokens | None,
        *,
        every: bool,
        sampled: bool,
        lookups: bool = True,
        windows: bool = True,
    ) -> bool:
        """Put what may follow the text into the tree, by what it says itself and by what `shared` ones say, as far as
        it may be worth its row's `price`, or `every` n-gram of a window; False if that is done already."""
        if self._proposed == self._length:
            return False
        self._proposed = self._length
        if self._skipped < min(self._fruitless // FRUITLESS_STEPS, MAX_SKIPPED) and not every:
            self._skipped += 1
            return False
        self._skipped = 0
        worth = math.log(max(MIN_PROBABILITY, price * PRICE_SHARE))
        text = self._text[: self._length]
        for tokens, match in continuations(text, text[-LONGEST:], BRANCHES, DEPTH) if lookups else ():
            # What reaches the end of the text goes on as it has begun: the text repeats itself.
            self._insert_lookup(tree, np.resize(tokens, DEPTH), match, worth, sampled)
        if shared is not None and lookups:
            for tokens, match in continuations(shared, text[-LONGEST:], BRANCHES, DEPTH):
                self._insert_lookup(tree, tokens, match, worth, sampled)
        if self.pool is not None and windows:
            for ngram in self.pool.after(int(text[-1])):
                logprobs = self.lookahead_confidence.logprobs(1, len(ngram), -math.inf if every else worth)
                self._insert(tree, ngram[: len(logprobs)], logprobs, 1, LOOKAHEAD, sampled)
        return True

    def _insert_lookup(self, tree: TokenTree, tokens: Tokens, match: int, worth: float, sampled: bool) -> None:
        logprobs = self.lookup_confidence.logprobs(match, len(tokens), worth)
        self._insert(tree, tokens[: len(logprobs)].tolist(), logprobs, match, NGRAM, sampled)

    def _insert(
        self, tree: TokenTree, tokens: Sequence[int], logprobs: Sequence[float], match: int, origin: int, sampled: bool
    ) -> None:
        rows = [(parent, _certain(token)) for parent, token in enumerate(tokens)] if sampled else ()
        for node in tree.insert(tree.base, Paths(tokens, range(len(tokens)), logprobs, rows), origin):
            node.state = match + node.position - tree.base

    def learn(self, node: Node, right: bool) -> None:
        """The target has chosen at a place for which one of these guesses was offered."""
        if isinstance(node.state, int):
            (self.lookup_confidence if node.origin == NGRAM else self.lookahead_confidence).learn(node.state, right)

    def extend(self, tokens: Sequence[int], sources: Sequence[int]) -> None:
        """The text goes on."""
        self._text[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)
        self._fruitless = 0 if NGRAM in sources or LOOKAHEAD in sources else self._fruitless + 1
        if self.window is None:
            self._window_pause -= 1
        elif self.window.full:
            self.gain += GAIN_SMOOTHING * (sources.count(LOOKAHEAD) - self.gain)

    # --- the window ---------------------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[Lookahead, ...]:
        """Those that a window of the next step may have if nobody asks for one."""
        if self.window is None or self._size is None:
            return () if self._window_pause > 0 else WINDOWS
        return (self._size,)

    def open_window(self, tree: TokenTree, size: Lookahead) -> LookaheadRows | None:
        """The rows of a window for this step, which is opened if there is none of this size; None at the end of a
        text, where there is nothing ahead."""
        if tree.base + size.window + size.ngram - 3 > self._end:
            return None
        if self.window is None or self._size != size:
            count = size.window + size.ngram - 3
            seeds = np.resize(self._text[max(0, self._length - count) : self._length], count)
            self._size, self.window, self.pool = size, Window(size, seeds.tolist()), NgramPool(size.guesses)
        return _jacobi(self.window, tree) if self.window.jacobi else _lookahead_rows(self.window, tree)

    def close_window(self) -> None:
        """No window in this step: what it saw is soon out of date. Its n-grams stay."""
        if self.window is not None:
            self.window, self.gain = None, INITIAL_GAIN
            self._window_pause, self._next_window_pause = (
                self._next_window_pause,
                min(2 * self._next_window_pause, LONGEST_WINDOW_PAUSE),
            )

    def queries(self, lookahead_rows: LookaheadRows, penalty_state: PenaltyState | None) -> Iterator[SamplingQuery]:
        """What is to be chosen below the window."""
        for node in lookahead_rows.queried:
            path = [step.token for step in node.path()]
            yield SamplingQuery(self._sampler, node.position + 1, penalty_state, path, None)

    def observe_window(self, chosen: Sequence[int], committed: int) -> None:
        """What the target chose where it was asked; by the same step the text is to go on by `committed` tokens."""
        assert self.window is not None
        assert self.pool is not None
        for ngram in self.window.advance(int(self._text[self._length - 1]), chosen, committed):
            self.pool.add(ngram)


def _certain(token: int) -> DraftDistribution:
    """A distribution that is sure of a token."""
    return DraftDistribution(np.asarray([token], dtype=np.int64), np.ones(1, dtype=np.float16))


def _chain(parent: Node, tokens: Sequence[int]) -> list[Node]:
    nodes = []
    for token in tokens:
        parent = Node(token, parent.position + 1, parent, 0.0, LOOKAHEAD)
        nodes.append(parent)
    return nodes


def _lookahead_rows(window: Window, tree: TokenTree) -> LookaheadRows:
    """A tree of its own behind the tip: nothing of it is seen by candidates, nor are they."""
    tip = Node(tree.root.token, tree.root.position, None, 0.0, 0)
    first_level = _chain(tip, window.levels[0])
    if len(window.levels) == 1:
        return LookaheadRows(first_level, [tip, *first_level], [])
    columns = [_chain(above, column) for above, column in zip([tip, *first_level], window.columns, strict=True)]
    nodes = first_level + [node for column in columns for node in column]
    return LookaheadRows(nodes, [column[-1] for column in columns], [])


def _jacobi(window: Window, tree: TokenTree) -> LookaheadRows:
    """The first level as candidates: each token is where the walk finds it, or beside the tree if it cannot be
    there."""
    nodes: list[Node] = []
    candidates: list[Node] = []
    place = tree.root
    for token in window.levels[0]:
        child = place.children.get(token)
        if child is None and len(candidates) == len(nodes):
            child = tree.add(place, token, 0.0, LOOKAHEAD)
        if child is None:
            child = Node(token, place.position + 1, place, 0.0, LOOKAHEAD)
        else:
            candidates.append(child)
        nodes.append(child)
        place = child
    return LookaheadRows(nodes, [tree.root, *nodes], candidates)
