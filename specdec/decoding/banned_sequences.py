"""The banned token sequences of a request, such as its banned words, and the tokens that would complete one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence


class BannedSequences:
    """The banned sequences of a request. If the text ends with all but the last token of a sequence, that last token is
    banned."""

    def __init__(self, sequences: Collection[Sequence[int]]) -> None:
        """`sequences`: at least one, each of at least two tokens. Single tokens are banned everywhere, not here."""
        self._completing: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # last tokens, by prefix
        for *before, last in sequences:
            self._completing[tuple(before)].append(last)
        self._lengths = sorted({len(before) for before in self._completing})

    def ruled_out(self, text: Sequence[int], path: Sequence[int]) -> list[int]:
        """Return, in any order, the tokens that would complete a sequence after a text and a path below it. The cost is
        one lookup per distinct sequence length, whatever the number of sequences or the vocabulary size."""
        longest = self._lengths[-1]
        end = (*text[-longest:], *path[-longest:])
        found: list[int] = []
        for length in self._lengths:
            if length > len(end):
                break
            found += self._completing.get(end[-length:], ())
        return found
