"""Results of exactness checks, kept in the cache folder for the next start.

The cache key contains everything that decides which kernels run: the model's configuration and weights, its layers as
laid out, the thread counts, the machine (`fingerprint.py`), our sources and the versions of packages. An entry contains
the invariant row counts of products, and a digest of a text's logits computed with them. The next start computes these
logits again, and uses the entry only if the digests are equal. Only success is stored: an inexact model is checked
again at each start.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import structlog
from transformers import PreTrainedModel

from specdec.engine import cache_folder
from specdec.engine.hf.block_linear import BlockLinear
from specdec.engine.hf.fingerprint import machine
from specdec.engine.row_counts import CANDIDATES, InvariantRowCounts, Shape, ShapeRowCounts

log = structlog.get_logger()


class Known(NamedTuple):
    """The result of an earlier start."""

    classes: ShapeRowCounts
    bits: str  # digest of the logits of the check's text with these row counts


class KeptExactness:
    """The cache entry of a model with these `linears`, already laid out, at these thread counts (`threads`). `contents`
    is a digest of the weights."""

    def __init__(
        self, contents: bytes, model: PreTrainedModel, linears: Collection[Any], threads: Sequence[int]
    ) -> None:
        self._shapes: set[Shape] = {(linear.in_features, linear.out_features) for linear in linears}
        kinds = sorted({f"{type(linear).__name__} {_shape(linear)} {linear.bias is None}" for linear in linears})
        here = machine()
        if any(kind.startswith(BlockLinear.__name__) for kind in kinds):
            kinds.append(f"onnxruntime {version('onnxruntime')}")  # it computes these products
        self._key = (
            None
            if here is None
            else (contents, model.config.to_json_string(), str(model.dtype), kinds, tuple(threads), here)
        )

    def read(self) -> Known | None:
        """Return the earlier result; None if there is no entry, or only an invalid one."""
        data = None if self._key is None else cache_folder.read("exactness", *self._key)
        if data is None:
            return None
        known = self._parsed(data)
        if known is None:
            log.warning("kept_exactness_refused", why="its content is invalid")
        return known

    def write(self, classes: ShapeRowCounts, bits: str) -> None:
        if self._key is not None:
            products = [[*shape, *rows.counts] for shape, rows in classes.products.items()]
            cache_folder.write(json.dumps({"bits": bits, "products": products}).encode(), "exactness", *self._key)

    def _parsed(self, data: bytes) -> Known | None:
        try:
            found = json.loads(data)
            products = {(row[0], row[1]): tuple(row[2:]) for row in found["products"]}
            bits = found["bits"]
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            return None
        if set(products) != self._shapes or not isinstance(bits, str):
            return None
        for counts in products.values():  # a subset of CANDIDATES, in order
            if not counts or counts != tuple(count for count in CANDIDATES if count in counts):
                return None
        classes = ShapeRowCounts.made_up_of({shape: InvariantRowCounts(counts) for shape, counts in products.items()})
        return None if classes is None else Known(classes, bits)


def _shape(layer: Any) -> str:
    return f"{layer.in_features}x{layer.out_features}"
