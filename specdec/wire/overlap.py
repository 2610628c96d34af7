"""The overlap of a text's end with the beginning of a mark, which more text may complete."""

from __future__ import annotations


def overlap(text: str, mark: str, begin: int = 0) -> int:
    """Return the length of the longest suffix of text[begin:] that is a proper prefix of a mark."""
    longest = min(len(text) - begin, len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)
