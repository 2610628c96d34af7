"""The suffix cache: the latest finished texts of each tenant, for n-gram lookup by its next requests.

Off by default, since it holds other users' text. No text can leak through it: a proposal is accepted only if it is the
target's own choice. But response times can reveal that a text was generated before. So, as in the prefix cache, texts
are shared within a tenant only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from specdec.decoding.ngrams import Tokens

MAX_TENANTS = 64
"""Maximum tenants with kept texts; the least recently active one is forgotten first."""

BREAK = -1
"""Separator of two texts: not a token id, so that no lookup continues across it."""


class SuffixCache:
    """The last `most` tokens of each tenant's finished texts."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._texts: OrderedDict[str, _Recent] = OrderedDict()

    def add(self, tenant: str, text: Sequence[int]) -> None:
        """Add a finished text."""
        if not self._most:
            return
        recent = self._texts.get(tenant)
        if recent is None:
            recent = self._texts[tenant] = _Recent(self._most)
        self._texts.move_to_end(tenant)
        recent.add([BREAK, *text[max(0, len(text) + 1 - self._most) :]])
        if len(self._texts) > MAX_TENANTS:
            self._texts.popitem(last=False)

    def tokens_of(self, tenant: str) -> Tokens | None:
        """Return a view of a tenant's texts, the latest last; None if there are none."""
        recent = self._texts.get(tenant)
        return None if recent is None else recent.tokens


class _Recent:
    """A contiguous buffer of the last `most` tokens added."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffer = np.empty(2 * most, dtype=np.int32)
        self._end = 0

    @property
    def tokens(self) -> Tokens:
        return self._buffer[max(0, self._end - self._most) : self._end]

    def add(self, tokens: Sequence[int]) -> None:
        """Append at most `most` tokens."""
        if self._end + len(tokens) > len(self._buffer):
            kept = self.tokens.copy()
            self._buffer[: len(kept)] = kept
            self._end = len(kept)
        self._buffer[self._end : self._end + len(tokens)] = tokens
        self._end += len(tokens)
