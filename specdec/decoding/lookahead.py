"""The lookahead window (Fu et al. 2024, "Break the sequential dependency of LLM inference using lookahead decoding",
section 3): the target guesses at W future positions at once, and every guess is made better by N - 1 rounds of it.

Level 0 are W - 1 tokens in a row behind the tip; level l >= 1 are W tokens, what the target chose after level l - 1, a
step later. Counted from the tip, token i of level l stands at i + l (in level 0, the tip itself is number 0). It sees
the committed text, level 0 up to number i, and its own column in the levels between: so the window is a token tree, a
chain from which every column hangs at its own height. What the target chooses below the last level completes an
n-gram a column. A level is made a step; the first, guesses without reason, begins longer by one token for each that is
still to come, since every step takes one off.

With N = 2 there is level 0 alone, and the window is Jacobi decoding (Santilli et al. 2023, "Accelerating
transformer inference for translation via parallel decoding"): level 0 itself is what may come next, each step
makes all of it anew, and it moves on by what was committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Lookahead(NamedTuple):
    """The size of a window: W positions, n-grams of N tokens, G guesses kept for each first token."""

    window: int
    ngram: int
    guesses: int

    @property
    def rows(self) -> int:
        """Tokens that a full window adds to a step."""
        return self.window * (self.ngram - 1) - 1

    @property
    def most_rows(self) -> int:
        """No window has more, not even while its levels are made."""
        return (self.window + self.ngram - 3) * (self.ngram - 1)


class Window:
    """Token ids of all levels. `seeds` are what level 0 begins with, W + N - 3 of them."""

    def __init__(self, size: Lookahead, seeds: Sequence[int]) -> None:
        self._size = size
        self.levels = [list(seeds[: size.window + size.ngram - 3])]

    @property
    def jacobi(self) -> bool:
        return self._size.ngram == 2

    @property
    def full(self) -> bool:
        """Whether all levels are made."""
        return len(self.levels) == self._size.ngram - 1

    @property
    def columns(self) -> list[list[int]]:
        """Tokens of each column below level 0, from the one at the tip on."""
        return [list(column) for column in zip(*self.levels[1:], strict=True)]

    def advance(self, tip: int, chosen: Sequence[int], committed: int = 1) -> list[list[int]]:
        """The target has chosen a token after every column (after the tip and every token of level 0, while
        there is no column), and the text went on from `tip` by `committed` tokens: the n-grams that are complete now.

        The window moves on by one token, however many were committed; by all of them with N = 2.
        """
        first_level = self.levels[0]
        if self.jacobi:
            left = list(chosen[committed:])
            self.levels = [left + [chosen[-1]] * (len(first_level) - len(left))]
            return []
        if not self.full:
            # Below the tip's own place, the first of a new level would stand on what is decided already.
            self.levels = [level[1:] for level in self.levels] + [list(chosen[1:])]
            return []
        firsts = [tip, *first_level]
        ngrams = [[first, *column, last] for first, column, last in zip(firsts, self.columns, chosen, strict=True)]
        self.levels = [self.levels[1][1:], *self.levels[2:], list(chosen)]
        return ngrams
