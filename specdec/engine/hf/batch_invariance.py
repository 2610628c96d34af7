"""Making a model's rows independent of their batch, and checking that they are."""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.batch import Packer
from specdec.engine.engine import Engine, cpu_threads
from specdec.engine.hf.gpu_head import GpuHead
from specdec.engine.hf.kept_exactness import KeptExactness
from specdec.engine.hf.linear import PackedLinear
from specdec.engine.hf.pretrained import is_quantised
from specdec.engine.kv.slots import PADDING_SLOT
from specdec.engine.row_counts import CANDIDATES, InvariantRowCounts, Shape, ShapeRowCounts

log = structlog.get_logger()

PROBED_ROWS = 128
"""Rows that are compared at each row count: even in the smallest layers they show a difference in one element of
10,000."""

CROWDS = (41, 200, 487, 680)
"""Numbers of other rows beside a text in the check of a whole engine: below, near and beyond the largest of
CANDIDATES."""

TEXT = 24
"""Tokens of the text in that check."""

Linear = torch.nn.Linear | PackedLinear | GpuHead


class TiledLinear(torch.nn.Module):
    """A linear layer that runs at its invariant row counts only. Batches must be padded to an invariant row count."""

    def __init__(self, linear: Linear, classes: ShapeRowCounts) -> None:
        super().__init__()
        self.linear = linear
        self._tiles = functools.cache(functools.partial(classes.tiles, _shape(linear)))

    def tiles(self, rows: int) -> list[int]:
        """Return the row counts at which a batch of `rows` is computed, one tile after the other."""
        return self._tiles(rows)

    def forward(self, x: Tensor) -> Tensor:
        tiles = self._tiles(x.shape[-2])
        if len(tiles) <= 1:
            return self.linear.forward(x)
        return torch.cat([self.linear.forward(tile) for tile in torch.split(x, tiles, dim=-2)], dim=-2)


def _shape(layer: Linear) -> Shape:
    return layer.in_features, layer.out_features


@torch.inference_mode()
def find(layers: Iterable[Linear], device: str, threads: Sequence[int] = ()) -> ShapeRowCounts | None:
    """Return the invariant row counts of each shape of layer, which hold with each of the thread counts `threads`, or
    with what torch has now; None if no number of rows can be made up of tiles in all shapes.

    Runs one layer of each shape with a bias and one without, as far as there are such. Leaves torch with threads[0]
    threads.
    """
    threads = threads or (torch.get_num_threads(),)
    shapes: dict[Shape, dict[bool, Linear]] = defaultdict(dict)
    for layer in layers:
        shapes[_shape(layer)][layer.bias is None] = layer
    products = {shape: _largest_class(alike.values(), device, threads) for shape, alike in shapes.items()}
    return ShapeRowCounts.made_up_of(products)


def _largest_class(layers: Iterable[Linear], device: str, threads: Sequence[int]) -> InvariantRowCounts:
    """Return the largest set of row counts that give equal bits in each of these layers. A row count whose bits depend
    on the number of threads equals no other."""
    bits: dict[int, list[bytes]] = defaultdict(list)
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        dtype = layer.dtype if isinstance(layer, PackedLinear) else layer.weight.dtype
        x = torch.randn(2 * CANDIDATES[-1], layer.in_features, generator=generator).to(device, dtype)
        for number in reversed(threads):
            torch.set_num_threads(number)
            for count in CANDIDATES:
                outputs = [layer(x[None, start : start + count]) for start in range(0, PROBED_ROWS, count)]
                rows = torch.cat(outputs, dim=1)[0, :PROBED_ROWS].cpu().contiguous()
                bits[count].append(hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).digest())
    classes: dict[object, list[int]] = defaultdict(list)
    for count, found in bits.items():
        of_layers = [found[first : first + len(threads)] for first in range(0, len(found), len(threads))]
        agree = all(len(set(each)) == 1 for each in of_layers)
        classes[tuple(each[0] for each in of_layers) if agree else count].append(count)
    return InvariantRowCounts(max(map(tuple, classes.values()), key=len))  # the first of equally large ones


def tile(model: torch.nn.Module, classes: ShapeRowCounts, *, packed_only: bool = False) -> None:
    """Make every linear layer of a model, or only the prepacked ones, run at its invariant row counts only."""
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
    """An engine whose products can run at invariant row counts only."""

    model: PreTrainedModel

    def tile(self, classes: ShapeRowCounts | None) -> None:
        """Run products at these row counts only; with None at the usual ones."""


def make_exact(engine: Tileable, contents: bytes | None = None) -> bool:
    """Have an engine run at invariant row counts only, if a check finds that rows then do not depend on their batch;
    return whether they do not.

    `contents` is a digest that differs where the model's weights do: by it what is found is kept for the next start
    (`kept_exactness.py`). Without it nothing is kept.
    """
    if is_quantised(engine.model):  # these layers cannot be tiled: exact as they are, or not at all
        return rows_are_independent(engine)
    linears = [module for module in engine.model.modules() if isinstance(module, Linear)]
    threaded = cpu_threads(engine)
    threads = () if threaded is None else threaded.threads
    kept = None
    if contents is not None and engine.model.device.type == "cpu":
        kept = KeptExactness(contents, engine.model, linears, threads)
    if kept is not None and (known := kept.read()) is not None:
        engine.tile(known.classes)
        if _bits_of_prompt(engine) == known.bits:
            return True
        log.warning("kept_exactness_refused", why="the same text has other bits now")
        engine.tile(None)
    classes = find(linears, str(engine.model.device), threads)
    if classes is None:
        return False
    engine.tile(classes)
    if rows_are_independent(engine):
        if kept is not None:
            kept.write(classes, _bits_of_prompt(engine))
        return True
    engine.tile(None)
    return False


def rows_are_independent(engine: Engine) -> bool:
    """Return whether a text gives the same logits, bit for bit, in all kinds of batch and with every number of threads.

    The text is computed as one prompt, token by token beside other texts, with its end as candidates in other slots,
    and beside many other rows; attention and all layers are included. Uses the first slots of the KV cache.
    """
    found = set()
    for _ in _thread_counts(engine):
        logits = _logits_in_any_batch(engine)
        if logits is None:
            return False
        found.add(logits.tobytes())
    return len(found) == 1


def _bits_of_prompt(engine: Engine) -> str:
    """Return a digest of the logits of the check's text as one prompt, with every number of threads."""
    digest = hashlib.sha256()
    for _ in _thread_counts(engine):
        text, own = _text(engine), np.arange(1, 1 + TEXT)
        packer = engine.packer()
        rows = packer.add_rows(text, 0, own)
        packer.add_path(own, rows)
        for row in rows:
            packer.want(row)
        digest.update(engine.forward(packer.pack())[:TEXT].tobytes())
    return digest.hexdigest()


def _text(engine: Engine) -> list[int]:
    """Return the check's text, of TEXT tokens."""
    return list(np.random.default_rng(1).integers(0, engine.vocabulary, TEXT).tolist())


def _thread_counts(engine: Engine) -> Iterator[None]:
    """Have an engine compute with each of its thread counts in turn, the largest last; any other as it does."""
    threaded = cpu_threads(engine)
    if threaded is None:
        yield
        return
    for count in reversed(threaded.threads):
        threaded.use_threads(count)
        yield


def _logits_in_any_batch(engine: Engine) -> NDArray[np.float32] | None:
    """Return the logits of a text; None unless they are the same in all batches that are tried."""
    length, at_once = TEXT, 5
    text = _text(engine)
    strangers = np.random.default_rng(2).integers(0, engine.vocabulary, 3 * length).tolist()
    own, theirs, elsewhere = np.split(np.arange(1, 1 + 4 * length + at_once), (length, 4 * length))

    def logits(packer: Packer, wanted: int) -> NDArray[np.float32]:
        return engine.forward(packer.pack())[:wanted].copy()

    packer = engine.packer()
    rows = packer.add_rows(text, 0, own)
    packer.add_path(own, rows)
    for row in rows:
        packer.want(row)
    whole = logits(packer, length)

    for position, token in enumerate(text[:-at_once]):
        packer = engine.packer()
        others = position % 4
        if others:
            rows = packer.add_rows(strangers[: 5 * others], 0, theirs[: 5 * others])
            packer.add_path(theirs[: 5 * others], rows)
        row = packer.add_row(token, position, int(own[position]))
        packer.add_path(own[: position + 1], [row])
        packer.want(row)
        if not np.array_equal(logits(packer, 1)[0], whole[position]):
            return None

    packer = engine.packer()
    start = length - at_once
    rows = packer.add_rows(text[start:], start, elsewhere)
    packer.add_path(np.concatenate([own[:start], elsewhere]), rows)
    for row in rows:
        packer.want(row)
    if not np.array_equal(logits(packer, at_once), whole[start:]):
        return None

    for others in CROWDS:  # so many rows that torch shares the work on a tensor among threads, cut at various places
        packer = engine.packer()
        for _ in range(others):
            packer.add_path(np.asarray([PADDING_SLOT]), [packer.add_row(strangers[0], 0, PADDING_SLOT)])
        rows = packer.add_rows(text, 0, own)
        packer.add_path(own, rows)
        for row in rows:
            packer.want(row)
        if not np.array_equal(logits(packer, length), whole):
            return None
    return whole
