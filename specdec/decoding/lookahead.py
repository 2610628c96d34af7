"""The lookahead window (Fu et al. 2024, "Break the sequential dependency of LLM inference using lookahead decoding",
section 3): the target guesses at W future positions together, and N - 1 steps refine every guess.

Level 0 is the root and the W - 1 tokens after it. Every further level holds W tokens: the target's choices after the
level before it, made one step later than that level. Token i of level l is i + l positions after the root. It sees the
committed text, level 0 up to token i, and its own column in the levels between. So the window is a token tree: a chain,
with one column below each of its tokens. The target's choices below the last level complete one n-gram per column.

Every step adds a level. In a full window, level 1 then takes the place of level 0. Until the window is full, a step
drops the first token of each level. So level 0 starts with W - 1 arbitrary tokens, and one more for each missing level.

With N = 2 there is only level 0, and the window is Jacobi decoding (Santilli et al. 2023, "Accelerating transformer
inference for translation via parallel decoding"): level 0 proposes the next tokens; each step recomputes the level and
advances it by the committed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Lookahead(NamedTuple):
    """The size of a window: W positions, n-grams of N tokens, G n-grams kept for each first token."""

    window: int
    ngram: int
    guesses: int

    @property
    def rows(self) -> int:
        """Rows a full window adds to a step."""
        return self.window * (self.ngram - 1) - 1

    @property
    def most_rows(self) -> int:
        """Upper bound on the rows a window adds to a step, also before the window is full."""
        return (self.window + self.ngram - 3) * (self.ngram - 1)


class Window:
    """A lookahead window: the token ids of all its levels. `seeds` are the initial level 0, W + N - 3 tokens."""

    def __init__(self, size: Lookahead, seeds: Sequence[int]) -> None:
        self._size = size
        self.levels = [list(seeds[: size.window + size.ngram - 3])]

    @property
    def jacobi(self) -> bool:
        return self._size.ngram == 2

    @property
    def full(self) -> bool:
        """True if the window has all its levels."""
        return len(self.levels) == self._size.ngram - 1

    @property
    def columns(self) -> list[list[int]]:
        """The columns below level 0; the first one is below the root."""
        return [list(column) for column in zip(*self.levels[1:], strict=True)]

    def advance(self, root: int, chosen: Sequence[int], committed: int = 1) -> list[list[int]]:
        """Add the target's choices to the window and return the n-grams they complete.

        `root` is the token at the root of the step; the step then committed `committed` tokens. `chosen` holds the
        target's choice after every column, or after the root and every token of level 0 while there are no columns. The
        window advances by one token, however many were committed; with N = 2, it advances by all committed tokens.
        """
        first_level = self.levels[0]
        if self.jacobi:
            left = list(chosen[committed:])
            self.levels = [left + [chosen[-1]] * (len(first_level) - len(left))]
            return []
        if not self.full:
            # The first choice belongs to the old root's column, which leaves the window.
            self.levels = [level[1:] for level in self.levels] + [list(chosen[1:])]
            return []
        firsts = [root, *first_level]
        ngrams = [[first, *column, last] for first, column, last in zip(firsts, self.columns, chosen, strict=True)]
        self.levels = [self.levels[1][1:], *self.levels[2:], list(chosen)]
        return ngrams
