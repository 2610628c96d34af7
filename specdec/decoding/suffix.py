"""What followed the last time: the end of a text, looked up in what was written before.

The longer the stretch that two places agree on, the surer that they go on alike (Saxena 2023, "Prompt lookup
decoding"; Oliaro et al. 2024, "SuffixDecoding"). There is no index to keep: comparing all tokens of a text with one
takes microseconds, and few places are left after the first comparison.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

LONGEST = 16
"""Tokens that two places are compared over at most."""

RECENT = 32
"""Of the places that agree equally far, so many are looked at, the last ones first."""


class Continuation(NamedTuple):
    """What followed at another place, and over how many tokens the two places agree before it."""

    tokens: Tokens
    match: int


def continuations(written: Tokens, end: Tokens, most: int, depth: int) -> list[Continuation]:
    """What followed, up to `depth` tokens, in `written` after what `end` ends with: at most `most`, each with another
    first token, those of the longest agreement first, and the latest among equals.

    `end` may be the end of `written` itself.
    """
    places = np.flatnonzero(written[:-1] == end[-1])
    by_match = [places]
    for match in range(2, min(len(end), LONGEST) + 1):
        places = places[places >= match - 1]
        places = places[written[places - (match - 1)] == end[-match]]
        if not len(places):
            break
        by_match.append(places)
    found: dict[int, Continuation] = {}
    for match in range(len(by_match), 0, -1):
        for place in by_match[match - 1][: -RECENT - 1 : -1].tolist():
            tokens = written[place + 1 : place + 1 + depth]
            found.setdefault(int(tokens[0]), Continuation(tokens, match))
            if len(found) == most:
                return list(found.values())
    return list(found.values())
