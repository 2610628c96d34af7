"""N-grams of a text: lookup of earlier occurrences, and the pool of lookahead decoding.

Lookup finds the tokens after earlier occurrences of a text's last tokens. The more tokens two places share, the more
likely they continue alike (Saxena 2023, "Prompt lookup decoding"; Oliaro et al. 2024, "SuffixDecoding"). There is no
index: comparing all tokens of a text with one token takes microseconds, and the first comparison leaves few places.

The pool holds the target's own guesses at how a token continues (Fu et al. 2024, "Break the sequential dependency of
LLM inference using lookahead decoding").
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_KEYS = 2048
"""Maximum number of first tokens with n-grams in the pool. The one that has gained no n-gram for longest is evicted."""


class NgramPool:
    """A pool of the `guesses` latest n-grams of every first token; adding one again makes it the latest."""

    def __init__(self, guesses: int) -> None:
        self.guesses = guesses
        self._after: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, ngram: Sequence[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        known = self._after.setdefault(first, OrderedDict())
        self._after.move_to_end(first)
        known[rest] = None
        known.move_to_end(rest)
        while len(known) > self.guesses:
            known.popitem(last=False)
        if len(self._after) > MAX_KEYS:
            self._after.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return the known continuations of a token, latest first."""
        return list(reversed(self._after.get(token, ())))


Tokens = NDArray[np.int32]

MAX_MATCH = 16
"""Longest match: maximum number of tokens over which two places are compared."""

COMPARED = 4096
"""Maximum number of places compared, latest first. A text of one repeated token matches everywhere."""

RECENT = 32
"""Maximum places considered per match length, latest first."""


class Continuation(NamedTuple):
    """The tokens after a matching place, and the number of matching tokens before them."""

    tokens: Tokens
    match: int


def continuations(written: Tokens, end: Tokens, most: int, depth: int) -> list[Continuation]:
    """Return up to `most` continuations: up to `depth` tokens that follow the last tokens of `end` in `written`.

    Their first tokens differ. Longer matches come first; of equally long ones, the latest. `end` may be the end of
    `written` itself. Negative numbers in `written` separate texts.
    """
    places = np.flatnonzero(written[:-1] == end[-1])[-COMPARED:]
    by_match = [places]
    for match in range(2, min(len(end), MAX_MATCH) + 1):
        places = places[places >= match - 1]
        places = places[written[places - (match - 1)] == end[-match]]
        if not len(places):
            break
        by_match.append(places)
    found: dict[int, Continuation] = {}
    for match in range(len(by_match), 0, -1):
        for place in by_match[match - 1][: -RECENT - 1 : -1].tolist():
            tokens = written[place + 1 : place + 1 + depth]
            if tokens[0] < 0 or int(tokens[0]) in found:
                continue
            if tokens.min() < 0:
                tokens = tokens[: int((tokens < 0).argmax())]
            found[int(tokens[0])] = Continuation(tokens, match)
            if len(found) == most:
                return list(found.values())
    return list(found.values())
