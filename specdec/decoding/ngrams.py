"""The n-gram pool of lookahead decoding (Fu et al. 2024, "Break the sequential dependency of LLM inference using
lookahead decoding"): what the target itself has guessed will follow a token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MOST_KEYS = 2048
"""Tokens of which something is remembered; the one that was longest untouched is forgotten first."""


class NgramPool:
    """Of every first token the `guesses` n-grams that came last; one that comes again is new again."""

    def __init__(self, guesses: int) -> None:
        self._guesses = guesses
        self._after: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, ngram: Sequence[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        known = self._after.setdefault(first, OrderedDict())
        self._after.move_to_end(first)
        known[rest] = None
        known.move_to_end(rest)
        if len(known) > self._guesses:
            known.popitem(last=False)
        if len(self._after) > MOST_KEYS:
            self._after.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What may follow a token, the latest first."""
        return list(reversed(self._after.get(token, ())))
