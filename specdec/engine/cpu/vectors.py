"""Dot products and weighted sums of keys and values for compiled loops, in a fixed order of arithmetic.

A compiler reorders float32 sums separately in each loop: a row that shares its loads with three others may get other
bits than a row on its own. Here both functions use vectors of 16 numbers on every processor, with a single order for
every sum. So rows can be computed several at a time without changing their results.

Keys and values are flat arrays; `at` is the offset of each key or value. They may be bfloat16 (`cpu/arithmetic.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Numbers in a vector: one register of AVX-512, two of AVX2."""

ACCUMULATORS = 8
"""Vectors of a weighted sum kept in registers."""

LINE = 64
"""Bytes in a cache line, the unit of a fetch."""

AHEAD = 32
"""Prefetch distance in keys. Hardware prefetchers follow only sequential reads, and stop at the end of a page."""

_float, _half, _word, _size, _byte = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.IntType(8)


@functools.cache
def dots(rows: int, width: int, fetched: int = 0) -> Any:
    """Return dots(queries, keys, key_at, values, value_at, begin, end, products). It writes the dot products of the
    `rows` queries [rows, width] with the keys key_at[begin:end] to products[row, j]. If `fetched`, it also prefetches
    the keys ahead, and `fetched` numbers of each key's value."""

    @intrinsic  # type: ignore[untyped-decorator]
    def compiled(
        _: Any, queries: Any, keys: Any, key_at: Any, values: Any, value_at: Any, begin: Any, end: Any, products: Any
    ) -> Any:
        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            kinds = signature.args
            query, key, key_places, value, value_places, results = (
                _data(context, b, kinds[i], arguments[i]) for i in (0, 1, 2, 3, 4, 7)
            )
            stored, (_, stride) = kinds[1].dtype, _shape(context, b, kinds[7], arguments[7])
            last = b.sub(arguments[6], _number(1))
            with cgutils.for_range_slice(b, arguments[5], arguments[6], _number(1)) as (j, _):
                place = b.load(b.gep(key_places, [j]))
                if fetched:
                    following = b.add(j, _number(AHEAD))
                    following = b.select(b.icmp_signed("<", following, last), following, last)
                    _fetch(b, key, b.load(b.gep(key_places, [following])), width, stored)
                    _fetch(b, value, b.load(b.gep(value_places, [j])), fetched, stored)
                parts = [_load(b, b.gep(key, [_plus(b, place, d)]), stored, n) for d, n in _vectors(width)]
                for row in range(rows):
                    total = None
                    for part, (d, n) in zip(parts, _vectors(width), strict=True):
                        of_query = _load(b, b.gep(query, [_number(row * width + d)]), types.float32, n)
                        total = b.fmul(of_query, part) if total is None else _fma(b, of_query, part, total)
                    b.store(_sum(b, total), b.gep(results, [b.add(b.mul(stride, _number(row)), j)]))
            return context.get_dummy_value()

        kinds = (queries, keys, key_at, values, value_at, types.intp, types.intp, products)
        return types.void(*kinds), generate

    return compiled


@functools.cache
def weighted_sums(rows: int, width: int) -> Any:
    """Return weighted_sums(sums, weights, values, at, begin, end). It adds the values at[begin:end], times weights[row,
    begin:end], to each of the `rows` sums [rows, width], in order."""
    vectors = list(_vectors(width))
    at_once = max(1, ACCUMULATORS // rows)

    @intrinsic  # type: ignore[untyped-decorator]
    def compiled(_: Any, sums: Any, weights: Any, values: Any, at: Any, begin: Any, end: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            kinds = signature.args
            result, weight, value, places = (_data(context, b, kinds[i], arguments[i]) for i in range(4))
            stored, (_, stride) = kinds[2].dtype, _shape(context, b, kinds[1], arguments[1])
            for first in range(0, len(vectors), at_once):
                some = vectors[first : first + at_once]
                into = [b.gep(result, [_number(row * width + d)]) for row in range(rows) for d, _ in some]
                totals = []
                for pointer, (_, n) in zip(into, some * rows, strict=True):
                    before = _load(b, pointer, types.float32, n, fill=False)
                    totals.append(cgutils.alloca_once_value(b, before))
                with cgutils.for_range_slice(b, arguments[4], arguments[5], _number(1)) as (j, _):
                    place = b.load(b.gep(places, [j]))
                    parts = [_load(b, b.gep(value, [_plus(b, place, d)]), stored, n, fill=False) for d, n in some]
                    for row in range(rows):
                        factor = b.load(b.gep(weight, [b.add(b.mul(stride, _number(row)), j)]))
                        for part, total in zip(parts, totals[row * len(some) :], strict=False):
                            b.store(_fma(b, _spread(b, factor, part.type.count), part, b.load(total)), total)
                for pointer, total in zip(into, totals, strict=True):
                    after = b.load(total)
                    b.store(after, b.bitcast(pointer, after.type.as_pointer())).align = 4
            return context.get_dummy_value()

        return types.void(sums, weights, values, at, types.intp, types.intp), generate

    return compiled


def _vectors(width: int) -> Iterator[tuple[int, int]]:
    """Return the offset and length of each vector in `width` numbers."""
    return ((d, min(LANES, width - d)) for d in range(0, width, LANES))


def _data(context: Any, b: Any, kind: Any, array: Any) -> Any:
    """Return the address of a contiguous array's data."""
    return context.make_array(kind)(context, b, array).data


def _shape(context: Any, b: Any, kind: Any, array: Any) -> Sequence[Any]:
    shape: Sequence[Any] = cgutils.unpack_tuple(b, context.make_array(kind)(context, b, array).shape)
    return shape


def _number(value: int) -> Any:
    return ir.Constant(_size, value)


def _plus(b: Any, place: Any, offset: int) -> Any:
    return b.add(place, _number(offset))


def _load(b: Any, pointer: Any, stored: Any, count: int, *, fill: bool = True) -> Any:
    """Load `count` stored numbers as a vector of float32; with `fill`, padded with zeros to LANES."""
    kind = _float if stored == types.float32 else _half
    vector = b.load(b.bitcast(pointer, ir.VectorType(kind, count).as_pointer()))
    vector.align = 4 if kind is _float else 2
    if kind is _half:  # the bits of a bfloat16 followed by sixteen zeros
        bits = b.shl(b.zext(vector, ir.VectorType(_word, count)), _all(_word, 16, count))
        vector = b.bitcast(bits, ir.VectorType(_float, count))
    if fill and count < LANES:
        lanes = [min(lane, count) for lane in range(LANES)]
        vector = b.shuffle_vector(vector, _all(_float, 0.0, count), _lanes(lanes))
    return vector


def _sum(b: Any, vector: Any) -> Any:
    """Return the sum of a vector by pairwise halving."""
    count = LANES
    while count > 1:
        count //= 2
        halves = (_lanes(range(first, first + count)) for first in (0, count))
        vector = b.fadd(*(b.shuffle_vector(vector, vector, half) for half in halves))
    return b.extract_element(vector, ir.Constant(_word, 0))


def _spread(b: Any, number: Any, count: int) -> Any:
    """Return a vector that repeats this number."""
    single = ir.Constant(ir.VectorType(_float, count), ir.Undefined)
    return b.shuffle_vector(b.insert_element(single, number, ir.Constant(_word, 0)), single, _lanes([0] * count))


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z, rounded once."""
    kind = ir.FunctionType(x.type, [x.type] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{x.type.count}f32"), [x, y, z])


def _fetch(b: Any, memory: Any, place: Any, width: int, stored: Any) -> None:
    """Prefetch a key or value into the nearest cache."""
    size = stored.bitwidth // 8
    kind = ir.FunctionType(ir.VoidType(), [_byte.as_pointer(), _word, _word, _word])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    for offset in range(0, width, LINE // size):
        address = b.bitcast(b.gep(memory, [_plus(b, place, offset)]), _byte.as_pointer())
        b.call(prefetch, [address, *(ir.Constant(_word, flag) for flag in (0, 3, 1))])  # read, high locality, data


def _all(kind: Any, value: float, count: int) -> Any:
    return ir.Constant(ir.VectorType(kind, count), [ir.Constant(kind, value)] * count)


def _lanes(numbers: Sequence[int]) -> Any:
    return ir.Constant(ir.VectorType(_word, len(numbers)), [ir.Constant(_word, number) for number in numbers])
