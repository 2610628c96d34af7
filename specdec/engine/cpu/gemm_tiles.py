"""The fastest tile sizes for a model's products, measured at load.

oneDNN runs products of some shapes over many rows in a single thread: on AMX, 512 rows of 7936 inputs and 384 outputs
take four times as long as 256 rows (`docs/decisions/2026-11-23-quickest-tiles.md`).
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import structlog
import torch

from specdec.engine.cpu.arithmetic import array_of
from specdec.engine.hf.linear import PackedLinear
from specdec.engine.row_counts import Shape
from specdec.engine.tile_size import SIZES, cheapest

log = structlog.get_logger()


@torch.inference_mode()
def largest_tiles(layers: Iterable[PackedLinear], clock: Callable[[], float] = time.perf_counter) -> dict[Shape, int]:
    """Measure the number of rows of the fastest tile for each shape of layer, with torch's current thread count. The
    clock returns seconds."""
    shapes: dict[Shape, list[PackedLinear]] = defaultdict(list)
    for layer in layers:
        shapes[layer.in_features, layer.out_features].append(layer)
    largest = {shape: cheapest(_timing(alike, clock), SIZES[-1]) for shape, alike in shapes.items()}
    log.info("largest_tiles", rows={f"{inputs}x{outputs}": most for (inputs, outputs), most in largest.items()})
    return largest


def _timing(layers: list[PackedLinear], clock: Callable[[], float]) -> Callable[[int], float]:
    """Return a function that measures the seconds per tile of `rows`, including the copy into the joint result. It
    cycles through the layers, as a step does."""
    x = torch.zeros(SIZES[-1], layers[0].in_features, dtype=layers[0].dtype)
    together = np.empty((SIZES[-1], layers[0].out_features), array_of(x).dtype)
    turns = itertools.cycle(layers)

    def seconds(rows: int) -> float:
        layer, tiles = next(turns), torch.split(x, rows)
        start = clock()
        done = 0
        for tile in tiles:
            result = array_of(layer(tile))
            if len(tiles) > 1:  # copied in one thread, as in `cpu/packed_gemm.py`
                together[done : done + len(result)] = result
                done += len(result)
        return (clock() - start) / len(tiles)

    return seconds
