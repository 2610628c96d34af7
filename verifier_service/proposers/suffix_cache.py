"""What a tenant's requests have said lately, for the next ones to guess from.

Off unless asked for: it is other people's text. Nobody is told any of it, since a guess is only ever accepted if it is
the target's own choice; but the time that an answer takes tells whether somebody has said it before. So texts are
shared within a tenant only, as computed prompts are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from specdec.decoding.suffix import Tokens

MOST_TENANTS = 64
"""Whose texts are kept; who was longest silent is forgotten first."""

BREAK = -1
"""Between two texts: no token, so that nothing agrees across it."""


class SuffixCache:
    """The last `most` tokens of each tenant's finished texts."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._texts: OrderedDict[str, _Recent] = OrderedDict()

    def add(self, tenant: str, text: Sequence[int]) -> None:
        """A text has ended."""
        if not self._most:
            return
        recent = self._texts.setdefault(tenant, _Recent(self._most))
        self._texts.move_to_end(tenant)
        recent.add([BREAK, *text[max(0, len(text) + 1 - self._most) :]])
        if len(self._texts) > MOST_TENANTS:
            self._texts.popitem(last=False)

    def tokens_of(self, tenant: str) -> Tokens | None:
        """A view of a tenant's texts, the latest last."""
        recent = self._texts.get(tenant)
        return None if recent is None else recent.tokens


class _Recent:
    """The last tokens of a growing row of them, always in one piece."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffer = np.empty(2 * most, dtype=np.int32)
        self._end = 0

    @property
    def tokens(self) -> Tokens:
        return self._buffer[max(0, self._end - self._most) : self._end]

    def add(self, tokens: Sequence[int]) -> None:
        """At most as many as are kept."""
        if self._end + len(tokens) > len(self._buffer):
            kept = self.tokens.copy()
            self._buffer[: len(kept)] = kept
            self._end = len(kept)
        self._buffer[self._end : self._end + len(tokens)] = tokens
        self._end += len(tokens)
