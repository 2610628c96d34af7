"""Batch invariance: making a model's rows independent of their batch, and checking it."""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.batch_independence import bits_of_prompt, long_rows_are_independent, rows_are_independent
from specdec.engine.engine import Engine, cpu_threads
from specdec.engine.hf.block_linear import BlockLinear
from specdec.engine.hf.gpu_head import GpuHead
from specdec.engine.hf.kept_exactness import KeptExactness
from specdec.engine.hf.linear import PackedLinear
from specdec.engine.hf.pretrained import is_quantised
from specdec.engine.row_counts import CANDIDATES, InvariantRowCounts, Shape, ShapeRowCounts

log = structlog.get_logger()

PROBED_ROWS = 128
"""Rows compared at each row count: enough, even in the smallest layers, to reveal a difference in one element in
10,000."""

PROBED_OUTPUTS = 1 << 15
"""Approximate limit on the compared outputs of a row, which are evenly spaced. A head on a GPU has up to 262,144
outputs: comparing all would copy and hash several gigabytes at each start."""

Linear = torch.nn.Linear | PackedLinear | GpuHead | BlockLinear


class TiledLinear(torch.nn.Module):
    """A linear layer that runs only at its invariant row counts. Batches must be padded to sums of these."""

    def __init__(self, linear: Linear, classes: ShapeRowCounts) -> None:
        super().__init__()
        self.linear = linear
        self._tiles = functools.cache(functools.partial(classes.tiles, _shape(linear)))

    def tiles(self, rows: int) -> list[int]:
        """Return the row counts of the tiles, computed in sequence, for a batch of `rows`."""
        return self._tiles(rows)

    def forward(self, x: Tensor) -> Tensor:
        tiles = self._tiles(x.shape[-2])
        if len(tiles) <= 1:
            return self.linear.forward(x)
        return torch.cat([self.linear.forward(tile) for tile in torch.split(x, tiles, dim=-2)], dim=-2)


def _shape(layer: Linear) -> Shape:
    return layer.in_features, layer.out_features


@torch.inference_mode()
def find(layers: Iterable[Linear], device: str, threads: Sequence[int] = ()) -> dict[Shape, InvariantRowCounts]:
    """Return the invariant row counts of each shape of layer, valid for each thread count in `threads`, by default
    torch's current one.

    Runs one layer of each shape with a bias and one without, if both exist. Leaves torch with threads[0] threads.
    """
    threads = threads or (torch.get_num_threads(),)
    shapes: dict[Shape, dict[bool, Linear]] = defaultdict(dict)
    for layer in layers:
        shapes[_shape(layer)][layer.bias is None] = layer
    return {shape: _largest_class(alike.values(), device, threads) for shape, alike in shapes.items()}


def _largest_class(layers: Iterable[Linear], device: str, threads: Sequence[int]) -> InvariantRowCounts:
    """Return the largest set of row counts with equal bits in each of these layers. A row count whose bits depend on
    the thread count is a set of its own."""
    bits: dict[int, list[bytes]] = defaultdict(list)
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        dtype = layer.dtype if isinstance(layer, PackedLinear | BlockLinear) else layer.weight.dtype
        x = torch.randn(2 * CANDIDATES[-1], layer.in_features, generator=generator).to(device, dtype)
        for number in reversed(threads):
            torch.set_num_threads(number)
            for count in CANDIDATES:
                outputs = [layer(x[None, start : start + count]) for start in range(0, PROBED_ROWS, count)]
                rows = torch.cat(outputs, dim=1)[0, :PROBED_ROWS, :: _stride(layer.out_features)].contiguous().cpu()
                bits[count].append(hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).digest())
    classes: dict[object, list[int]] = defaultdict(list)
    for count, found in bits.items():
        of_layers = [found[first : first + len(threads)] for first in range(0, len(found), len(threads))]
        agree = all(len(set(hashes)) == 1 for hashes in of_layers)
        classes[tuple(hashes[0] for hashes in of_layers) if agree else count].append(count)
    return InvariantRowCounts(max(map(tuple, classes.values()), key=len))  # the first of several equally large sets


def _stride(outputs: int) -> int:
    """Return the distance between compared outputs. It is odd, so that all places of a kernel's tile are compared."""
    return outputs // PROBED_OUTPUTS | 1


def tile(model: torch.nn.Module, classes: ShapeRowCounts, *, packed_only: bool = False) -> None:
    """Make all linear layers of a model, or only the prepacked ones, run at their invariant row counts only."""
    for module in list(model.modules()):
        if isinstance(module, TiledLinear):
            continue
        for name, child in list(module.named_children()):
            if isinstance(child, Linear) and (isinstance(child, PackedLinear) or not packed_only):
                setattr(module, name, TiledLinear(child, classes))


def untile(model: torch.nn.Module) -> None:
    """Undo `tile`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, TiledLinear):
                setattr(module, name, child.linear)


class Tileable(Engine, Protocol):
    """An engine whose products can be restricted to invariant row counts."""

    model: PreTrainedModel

    def tile(self, classes: ShapeRowCounts | None) -> None:
        """Run products at these row counts only; None allows any row count."""


Counterpart = Callable[[torch.nn.Module], torch.nn.Linear | None]
"""Returns a layer with the same function as another, but bits that depend less on the number of rows; None if there is
none."""


def _counterparts(
    layers: Sequence[Linear], products: dict[Shape, InvariantRowCounts], instead: Counterpart, device: str
) -> dict[torch.nn.Module, torch.nn.Linear]:
    """Return layer -> counterpart, for shapes whose counterparts are invariant at more row counts than their layers;
    write these counts to `products`."""
    better: dict[torch.nn.Module, torch.nn.Linear] = {}
    for shape in [shape for shape, rows in products.items() if rows.counts != CANDIDATES]:
        alike = [layer for layer in layers if _shape(layer) == shape]
        others = [other for layer in alike if (other := instead(layer)) is not None]
        if len(others) < len(alike):
            continue  # counterparts and originals would have to agree on row counts
        try:
            (rows,) = find(others, device).values()
        except Exception as error:  # a compiler may raise anything: keep the original layers
            log.warning("counterpart_failed", shape=shape, error=f"{type(error).__name__}: {error}")
            continue
        if len(rows.counts) > len(products[shape].counts):
            products[shape] = rows
            better |= zip(alike, others, strict=True)
    return better


def _swap(model: PreTrainedModel, layers: Mapping[torch.nn.Module, torch.nn.Module]) -> None:
    """Replace layers of a model, given as old -> new."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child in layers:
                setattr(module, name, layers[child])


def make_exact(
    engine: Tileable,
    contents: bytes | None = None,
    instead: Counterpart | None = None,
    split_context: int | None = None,
) -> bool:
    """Restrict an engine to invariant row counts; return whether a check finds its rows independent of their batch. If
    not, the restriction is undone.

    `instead` provides counterparts for layers that are invariant at few row counts. `contents` is a digest of the
    model's weights, part of the key under which a CPU's result is cached for the next start (`kept_exactness.py`).
    Without it, no result is stored. `split_context`: length of the longest text, if attention splits long texts; these
    are checked too.
    """

    def is_independent() -> bool:
        return rows_are_independent(engine) and (
            split_context is None or long_rows_are_independent(engine, split_context)
        )

    if is_quantised(engine.model):  # these layers cannot be tiled: they are exact as they are, or not at all
        return is_independent()
    linears = [module for module in engine.model.modules() if isinstance(module, Linear)]
    threaded = cpu_threads(engine)
    threads = () if threaded is None else threaded.threads
    kept = None
    if contents is not None and engine.model.device.type == "cpu":
        kept = KeptExactness(contents, engine.model, linears, threads)
    if kept is not None and (known := kept.read()) is not None:
        engine.tile(known.classes)
        if bits_of_prompt(engine) == known.bits:
            return True
        log.warning("kept_exactness_refused", why="the same text has other bits now")
        engine.tile(None)
    device = str(engine.model.device)
    products = find(linears, device, threads)
    swapped = {} if instead is None else _counterparts(linears, products, instead, device)
    classes = ShapeRowCounts.made_up_of(products)
    if classes is None:
        return False
    _swap(engine.model, swapped)
    engine.tile(classes)
    if is_independent():
        if kept is not None:
            kept.write(classes, bits_of_prompt(engine))
        return True
    _swap(engine.model, {other: layer for layer, other in swapped.items()})
    engine.tile(None)
    return False
