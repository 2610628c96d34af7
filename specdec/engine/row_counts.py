"""Row classes: the numbers of rows at which a matrix product gives every row the same bits.

A kernel may split its sums otherwise for one row than for eight, or for sixty-four; then a token's logits would
depend on how many others share its step. At a fixed number of rows they never do. So the numbers of rows are
sorted into classes of equal bits when a model is loaded (`invariance.py`), for each shape of product, and each runs
at the members of one class only: a batch is padded to a number that all of them can make up, and a product of which
that is no member runs as several tiles.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Shape = tuple[int, int]
"""Of a product: columns of its input and of its result."""


@dataclass(frozen=True)
class InvariantRowCounts:
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

    def exact_tiles(self, rows: int) -> list[int] | None:
        """Members that add up to `rows`, always the largest that fits; None if that leaves a rest."""
        tiles: list[int] = []
        for count in reversed(self.counts):
            whole, rows = divmod(rows, count)
            tiles += [count] * whole
        return None if rows else tiles

    def __str__(self) -> str:
        return f"{self.counts[0]}..{self.counts[-1]}of{len(self.counts)}"


@dataclass(frozen=True)
class ShapeRowCounts:
    """One for each shape of product, and the numbers of rows of a `batch`, which have tiles in all of them."""

    batch: InvariantRowCounts
    products: Mapping[Shape, InvariantRowCounts]

    @classmethod
    def alike(cls, counts: tuple[int, ...], shapes: Iterable[Shape]) -> ShapeRowCounts:
        """One class for everything."""
        rows = InvariantRowCounts(counts)
        return cls(rows, dict.fromkeys(shapes, rows))

    def tiles(self, shape: Shape, rows: int) -> list[int]:
        """Of a product in a batch of so many rows, which must be padded. A shape that another rank of a model in parts
        may have, and nobody knows, has those of the batch: the check of the whole says whether that will do."""
        own, tiles = self.products.get(shape, self.batch), []
        for tile in self.batch.tiles(rows):
            parts = own.exact_tiles(tile)
            assert parts is not None  # else it were no number of rows of a batch
            tiles += parts
        return tiles

    def cut(self, largest: Mapping[Shape, int]) -> ShapeRowCounts:
        """With no tiles larger than these, where they are members and the batch's numbers of rows can be made up of
        them and smaller ones."""
        products = dict(self.products)
        for shape, own in self.products.items():
            if (most := largest.get(shape)) not in own.counts:
                continue
            smaller = InvariantRowCounts(tuple(count for count in own.counts if count <= most))
            if all(smaller.exact_tiles(rows) for rows in self.batch.counts):
                products[shape] = smaller
        return ShapeRowCounts(self.batch, products)

    def __str__(self) -> str:
        """Tells other classes, from which other bits may follow, apart."""
        whole = sorted((shape, rows.counts) for shape, rows in self.products.items())
        return f"{self.batch}-{zlib.crc32(repr(whole).encode()):08x}"
