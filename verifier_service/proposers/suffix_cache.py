"""The suffix cache: the latest finished texts of each tenant, for n-gram lookups by its next requests.

Off unless asked for: it is other people's text. Nobody receives any of it, since a proposal is only accepted if it is
the target's own choice; but the time that an answer takes can tell that somebody has said it before. So texts are
shared within a tenant only, as computed prompts are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from specdec.decoding.suffix import Tokens

MOST_TENANTS = 64
"""Most tenants whose texts are kept; the one that has been silent longest is forgotten first."""

BREAK = -1
"""Separator of two texts: no token id, so that no lookup continues across it."""


class SuffixCache:
    """The last `most` tokens of each tenant's finished texts."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._texts: OrderedDict[str, _Recent] = OrderedDict()

    def add(self, tenant: str, text: Sequence[int]) -> None:
        """Add a finished text."""
        if not self._most:
            return
        recent = self._texts.setdefault(tenant, _Recent(self._most))
        self._texts.move_to_end(tenant)
        recent.add([BREAK, *text[max(0, len(text) + 1 - self._most) :]])
        if len(self._texts) > MOST_TENANTS:
            self._texts.popitem(last=False)

    def tokens_of(self, tenant: str) -> Tokens | None:
        """Return a view of a tenant's texts, the latest last; None if there are none."""
        recent = self._texts.get(tenant)
        return None if recent is None else recent.tokens


class _Recent:
    """A buffer of the last `most` tokens that were added, always contiguous."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffer = np.empty(2 * most, dtype=np.int32)
        self._end = 0

    @property
    def tokens(self) -> Tokens:
        return self._buffer[max(0, self._end - self._most) : self._end]

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens, `most` of them at most."""
        if self._end + len(tokens) > len(self._buffer):
            kept = self.tokens.copy()
            self._buffer[: len(kept)] = kept
            self._end = len(kept)
        self._buffer[self._end : self._end + len(tokens)] = tokens
        self._end += len(tokens)
