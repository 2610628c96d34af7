"""The layers of a decoder of the Llama kind: written once, run as compiled code or as Python.

As compiled code, all layers of a step are one call, which never takes or releases the GIL. As Python, they accept any
kind of product, such as one without prepacked weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specdec.engine.cpu.arithmetic import Array
from specdec.engine.cpu.attention import kernel
from specdec.engine.cpu.compiling import closed
from specdec.engine.cpu.loops import add_and_normalise, gate, rotate
from specdec.engine.cpu.openmp import Cuts, SharedLoop
from specdec.engine.cpu.packed_gemm import product

PRODUCTS = 4
"""Products in a layer. They read the buffers `normal`, `attended`, `normal` and `gated`, in this order."""

QKV, BACK, GATE_AND_UP, DOWN = range(PRODUCTS)

NO_SOFTCAP = np.float32(0.0)


class Weights(NamedTuple):
    """Weights and constants of all layers, except the weights of products."""

    norms: Array  # [2 * layers + 1, hidden] each layer's norms before attention and before the MLP; the last norm
    head_norms: Array  # [layers, 2, width] query and key norms, or [layers, 0, width]
    epsilon: Any
    cos: Array  # float32 [positions, width / 2]
    sin: Array
    windows: Array  # [layers] tokens a row sees, counted backwards
    scales: Array  # float32 [layers]


class StepRows(NamedTuple):
    """The arrays of a ragged batch that the layers read."""

    positions: Array  # [t]
    slots: Array  # [t]
    path: Array  # slots of all paths
    first: Array  # [t] start of each row's path
    pieces: Array  # [p + 1] row bounds of pieces
    integers: Array  # [threads, ...] scratch (`cpu/attention.py`: `Scratch`)
    floats: Array


class Buffers(NamedTuple):
    """Memory that all layers use in turn, in the stored dtype except for queries."""

    residual: Array  # [t, hidden]
    normal: Array  # [t, hidden]
    query: Array  # float32 [t, heads, width]
    attended: Array  # [t, heads, width]
    gated: Array  # [t, inner]


class ThreadShares(NamedTuple):
    """The cuts that split each kind of loop among the OpenMP team."""

    norms: Cuts
    heads: Cuts
    gates: Cuts
    attention: Cuts


class Loops(NamedTuple):
    """The loops of a layer, for compiled code or for Python."""

    add_and_normalise: Callable[..., None]
    rotate: Callable[..., None]
    gate: Callable[..., None]
    attend: Callable[..., None]  # for heads of one width


def _loops(width: int) -> tuple[SharedLoop, ...]:
    """Return the loops in the order of `Loops`."""
    return add_and_normalise, rotate, gate, kernel(width, width)


def sequence(loops: Loops, multiply: Callable[[Any, int], Array]) -> Callable[..., None]:
    """Return the function that runs all layers. multiply(products, number) must compute the numbered product."""
    add_and_normalise, rotate, gate, attend = loops

    def layers(
        products: Any,
        weights: Any,
        rows: Any,
        keys: Any,  # [layers, kv_heads, slots, width]
        values: Any,
        buffers: Any,
        shares: Any,
        update: Any,  # [t, hidden]
    ) -> None:
        """Run all layers: add the update (initially the embedded tokens) and each layer's output to the residual, and
        leave the last norm in `normal`."""
        residual, normal, norms = buffers.residual, buffers.normal, weights.norms
        for layer in range(len(keys)):
            own = PRODUCTS * layer
            add_and_normalise(residual, update, norms[2 * layer], weights.epsilon, normal, shares.norms)
            rotate(
                multiply(products, own + QKV),
                weights.head_norms[layer],
                weights.epsilon,
                weights.cos,
                weights.sin,
                rows.positions,
                rows.slots,
                buffers.query,
                keys[layer],
                values[layer],
                rows.floats,
                shares.heads,
            )
            attend(
                buffers.query,
                keys[layer],
                values[layer],
                rows.path,
                rows.first,
                rows.positions,
                rows.pieces,
                weights.windows[layer],
                weights.scales[layer],
                NO_SOFTCAP,
                buffers.attended,
                rows.integers,
                rows.floats,
                shares.attention,
            )
            update = multiply(products, own + BACK)
            add_and_normalise(residual, update, norms[2 * layer + 1], weights.epsilon, normal, shares.norms)
            gate(multiply(products, own + GATE_AND_UP), buffers.gated, shares.gates)
            update = multiply(products, own + DOWN)
        add_and_normalise(residual, update, norms[2 * len(keys)], weights.epsilon, normal, shares.norms)

    return layers


@functools.cache
def compiled(width: int) -> Callable[..., None]:
    """Compile the layers for heads of this width and prepacked GEMMs (`cpu/packed_gemm.py`: `Products`)."""
    layers = sequence(Loops(*(loop.inside for loop in _loops(width))), product)
    layers.__qualname__ = f"layers_{width}"  # becomes part of symbol names (`cpu/openmp.py`)
    return closed(f"layers-{width}")(layers)  # type: ignore[no-any-return]


@functools.cache
def interpreted(width: int) -> Callable[..., None]:
    """Return the layers as Python, for heads of this width; `products` is a list of functions that return a product."""
    return sequence(Loops(*_loops(width)), lambda products, number: products[number]())
