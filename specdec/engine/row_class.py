"""Row classes: the numbers of rows at which a matrix product gives every row the same bits.

A kernel may split its sums otherwise for one row than for eight, or for sixty-four; then a token's logits would
depend on how many others share its step. At a fixed number of rows they never do. So the numbers of rows are
sorted into classes of equal bits when a model is loaded (`invariance.py`), and every product runs at the
members of one class only: a batch is padded up to one, or cut into several tiles.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowClass:
    """Ascending numbers of rows with equal bits."""

    counts: tuple[int, ...]

    def tiles(self, rows: int) -> list[int]:
        """Numbers of rows that add up to at least `rows`: the largest as often as it fits, then the smallest that
        holds the rest."""
        largest = self.counts[-1]
        whole, rest = divmod(rows, largest)
        return [largest] * whole + ([next(count for count in self.counts if count >= rest)] if rest else [])

    def padded(self, rows: int) -> int:
        return sum(self.tiles(rows))

    def __str__(self) -> str:
        return f"{self.counts[0]}..{self.counts[-1]}of{len(self.counts)}"
