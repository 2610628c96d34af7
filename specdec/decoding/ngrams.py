"""The n-gram pool of lookahead decoding (Fu et al. 2024, "Break the sequential dependency of LLM inference using
lookahead decoding"): the target's own guesses at how a token continues."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_KEYS = 2048
"""First tokens with n-grams in the pool; the least recently used one is evicted first."""


class NgramPool:
    """A pool of the `guesses` latest n-grams of every first token; adding one again makes it the latest."""

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
        if len(self._after) > MAX_KEYS:
            self._after.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return the known continuations of a token, latest first."""
        return list(reversed(self._after.get(token, ())))
