"""The loops between a decoder layer's matrix products, each a single pass over memory, compiled by Numba.

Arrays have their stored dtype (`cpu/arithmetic.py`). Each row is computed on its own in float32, and rounded once when
stored, so that no row's arithmetic depends on another's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec.engine.cpu import openmp
from specdec.engine.cpu.arithmetic import REORDERED, exp, narrowed, widened


@openmp.shared(fastmath=REORDERED, error_model="numpy")
def add_and_normalise(
    residual: Any,  # [t, hidden]
    update: Any,  # [t, hidden]
    weight: Any,  # [hidden]
    epsilon: Any,
    out: Any,  # [t, hidden]
    cuts: Any,  # [2] first row and end
) -> None:
    """Add the update to the residual, and write the RMS norm of the sum to `out` (Zhang and Sennrich 2019, "Root mean
    square layer normalization", eq. 4)."""
    hidden = residual.shape[1]
    for r in range(cuts[0], cuts[1]):
        x, added, y = residual[r], update[r], out[r]
        squares = np.float32(0.0)
        for d in range(hidden):
            x[d] = narrowed(widened(x[d]) + widened(added[d]), x[d])
            squares += widened(x[d]) * widened(x[d])
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(hidden) + epsilon)
        for d in range(hidden):
            y[d] = narrowed(widened(x[d]) * scale * widened(weight[d]), y[d])


@openmp.shared(scratch=1, fastmath=REORDERED, error_model="numpy")
def rotate(
    projected: Any,  # [t, (heads + 2 * kv_heads) * width]: queries, keys, values
    norms: Any,  # [2, width] weights of the query and key RMS norms, or [0, width]
    epsilon: Any,
    cos: Any,  # float32 [positions, width / 2]
    sin: Any,
    positions: Any,  # [t]
    slots: Any,  # [t] destination of keys and values
    query: Any,  # float32 [t, heads, width], written
    keys: Any,  # [kv_heads, slots, width], written
    values: Any,
    turned: Any,  # float32 [width or more], scratch
    cuts: Any,  # [2] first row and end
) -> None:
    """Split a row into heads, rotate queries and keys by their position (Su et al. 2021, "RoFormer", eq. 34, pairing
    the two halves of a head instead of neighbours), and store keys and values."""
    heads, width = query.shape[1:]
    kv_heads = len(keys)
    for r in range(cuts[0], cuts[1]):
        row, c, s = projected[r], cos[positions[r]], sin[positions[r]]
        for head in range(heads + kv_heads):
            x = row[head * width : (head + 1) * width]
            for d in range(width):
                turned[d] = widened(x[d])
            if len(norms):
                squares = np.float32(0.0)
                for d in range(width):
                    squares += turned[d] * turned[d]
                scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + epsilon)
                weight = norms[0] if head < heads else norms[1]
                for d in range(width):
                    turned[d] *= scale * widened(weight[d])
            half = width // 2
            if head < heads:
                q = query[r, head]
                for d in range(half):
                    q[d] = turned[d] * c[d] - turned[d + half] * s[d]
                    q[d + half] = turned[d + half] * c[d] + turned[d] * s[d]
            else:
                k = keys[head - heads, slots[r]]
                for d in range(half):
                    k[d] = narrowed(turned[d] * c[d] - turned[d + half] * s[d], k[d])
                    k[d + half] = narrowed(turned[d + half] * c[d] + turned[d] * s[d], k[d])
        v = row[(heads + kv_heads) * width :]
        for kv_head in range(kv_heads):
            for d in range(width):
                values[kv_head, slots[r], d] = v[kv_head * width + d]


@openmp.shared(fastmath=REORDERED, error_model="numpy")
def gate(
    projected: Any,  # [t, 2 * inner]: gates, then ups
    out: Any,  # [t, inner]
    cuts: Any,  # [2] first row and end
) -> None:
    """Write silu(gate) * up to `out` (Shazeer 2020, "GLU variants improve transformer", eq. 6)."""
    inner = out.shape[1]
    for r in range(cuts[0], cuts[1]):
        gates, ups, y = projected[r, :inner], projected[r, inner:], out[r]
        for d in range(inner):
            g = widened(gates[d])
            e = exp(-abs(g))
            sigmoid = (np.float32(1.0) if g >= 0 else e) / (np.float32(1.0) + e)
            y[d] = narrowed(g * sigmoid * widened(ups[d]), y[d])
