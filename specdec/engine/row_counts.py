"""Invariant row counts: numbers of rows at which a matrix product gives a row the same bits.

A kernel may split its sums differently for one, eight and sixty-four rows; then a token's logits would depend on the
number of rows in its step. At a fixed number of rows, the split is always the same. So when a model is loaded,
`hf/batch_invariance.py` groups the row counts of each shape of product by equal bits, and a product runs only at the
counts of one group. A batch is padded to a row count that is a sum of counts in every product's group. A product whose
group lacks the row count itself runs as several tiles.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CANDIDATES = (*range(1, 17), *range(20, 33, 4), *range(40, 65, 8), 80, 96, 112, 128, 192, 256, 384, 512)
"""Row counts that are compared."""

Shape = tuple[int, int]
"""The shape of a product: columns of its input and of its result."""


@dataclass(frozen=True)
class InvariantRowCounts:
    """Numbers of rows that give equal bits, in ascending order."""

    counts: tuple[int, ...]

    def tiles(self, rows: int) -> list[int]:
        """Return counts with a sum of at least `rows`: the largest repeatedly, then the smallest that covers the
        rest."""
        largest = self.counts[-1]
        whole, rest = divmod(rows, largest)
        return [largest] * whole + ([next(count for count in self.counts if count >= rest)] if rest else [])

    def padded(self, rows: int) -> int:
        return sum(self.tiles(rows))

    def exact_tiles(self, rows: int) -> list[int] | None:
        """Return counts with a sum of exactly `rows`, chosen greedily from the largest; None if a rest remains."""
        tiles: list[int] = []
        for count in reversed(self.counts):
            whole, rows = divmod(rows, count)
            tiles += [count] * whole
        return None if rows else tiles

    def __str__(self) -> str:
        return f"{self.counts[0]}..{self.counts[-1]}of{len(self.counts)}"


@dataclass(frozen=True)
class ShapeRowCounts:
    """Invariant row counts of each shape of product, and of a `batch`: the counts that every product can compose from
    its own."""

    batch: InvariantRowCounts
    products: Mapping[Shape, InvariantRowCounts]

    @classmethod
    def alike(cls, counts: tuple[int, ...], shapes: Iterable[Shape]) -> ShapeRowCounts:
        """Use the same counts for batches and for all shapes."""
        rows = InvariantRowCounts(counts)
        return cls(rows, dict.fromkeys(shapes, rows))

    @classmethod
    def made_up_of(cls, products: Mapping[Shape, InvariantRowCounts]) -> ShapeRowCounts | None:
        """Return the counts of these products, and for batches all CANDIDATES that each product can compose; None if
        there are none."""
        batch = [count for count in CANDIDATES if all(rows.exact_tiles(count) for rows in products.values())]
        return cls(InvariantRowCounts(tuple(batch)), products) if batch else None

    def tiles(self, shape: Shape, rows: int) -> list[int]:
        """Return the tiles of a product of this shape in a batch of `rows`, a padded count.

        An unknown shape, such as an output head whose rows need not be exact, gets the tiles of the batch.
        """
        own, tiles = self.products.get(shape, self.batch), []
        for tile in self.batch.tiles(rows):
            parts = own.exact_tiles(tile)
            assert parts is not None  # guaranteed for the row counts of batches
            tiles += parts
        return tiles

    def cut(self, largest: Mapping[Shape, int]) -> ShapeRowCounts:
        """Return counts without tiles above each shape's `largest`. A shape keeps all its counts if its `largest` is
        not among them, or if the batch's counts need larger ones."""
        products = dict(self.products)
        for shape, own in self.products.items():
            if (most := largest.get(shape)) not in own.counts:
                continue
            smaller = InvariantRowCounts(tuple(count for count in own.counts if count <= most))
            if all(smaller.exact_tiles(rows) for rows in self.batch.counts):
                products[shape] = smaller
        return ShapeRowCounts(self.batch, products)

    def __str__(self) -> str:
        """Return a name that identifies the counts, since other counts may give other bits."""
        whole = sorted((shape, rows.counts) for shape, rows in self.products.items())
        return f"{self.batch}-{zlib.crc32(repr(whole).encode()):08x}"
