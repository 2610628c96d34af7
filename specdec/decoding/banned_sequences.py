"""Banned sequences of tokens, such as the words a request bans: the tokens that would complete one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence


class BannedSequences:
    """The banned sequences of a request. A sequence's last token is ruled out where the text ends with the others."""

    def __init__(self, sequences: Collection[Sequence[int]]) -> None:
        """There is at least one sequence, and each has at least two tokens: a single one is banned everywhere."""
        self._completing: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # last tokens, by those before
        for *before, last in sequences:
            self._completing[tuple(before)].append(last)
        self._lengths = sorted({len(before) for before in self._completing})

    def ruled_out(self, text: Sequence[int], path: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a sequence after a text and a path below it, in any order. Takes one
        lookup for each length of a sequence, whatever their number and the vocabulary."""
        longest = self._lengths[-1]
        end = (*text[-longest:], *path[-longest:])
        found: list[int] = []
        for length in self._lengths:
            if length > len(end):
                break
            found += self._completing.get(end[-length:], ())
        return found
