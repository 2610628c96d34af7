"""In how large tiles a model's products are the quickest, as measured when it is loaded.

oneDNN runs some shapes of many rows in one thread alone: on AMX 512 rows of 7936 inputs and 384 outputs take four times
as long as 256 of them (`docs/decisions/2026-11-23-quickest-tiles.md`).
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
def largest_tiles(layers: Iterable[PackedLinear]) -> dict[Shape, int]:
    """Rows of them, for each shape; with the threads that torch has now."""
    shapes: dict[Shape, list[PackedLinear]] = defaultdict(list)
    for layer in layers:
        shapes[layer.in_features, layer.out_features].append(layer)
    largest = {shape: cheapest(_timing(alike), SIZES[-1]) for shape, alike in shapes.items()}
    log.info("largest_tiles", rows={f"{inputs}x{outputs}": most for (inputs, outputs), most in largest.items()})
    return largest


def _timing(layers: list[PackedLinear]) -> Callable[[int], float]:
    """Seconds of a product over so many rows, their copying to where the others are included; of a layer after the
    other, as in a step."""
    x = torch.zeros(SIZES[-1], layers[0].in_features, dtype=layers[0].dtype)
    together = np.empty((SIZES[-1], layers[0].out_features), array_of(x).dtype)
    turns = itertools.cycle(layers)

    def seconds(rows: int) -> float:
        layer, tiles = next(turns), torch.split(x, rows)
        start = time.perf_counter()
        done = 0
        for tile in tiles:
            result = array_of(layer(tile))
            if len(tiles) > 1:  # by one thread, as in `packed_products.product`
                together[done : done + len(result)] = result
                done += len(result)
        return (time.perf_counter() - start) / len(tiles)

    return seconds
