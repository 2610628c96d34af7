"""How a model is to be run: with which kind of engine, in which dtype, on which device, with how much KV memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["torch", "eager", "onnx", "vllm"]
"""The kinds of engine. On a GPU `torch` is the engine made for GPUs. `eager` runs the model's own layers, with
attention by tensor operations: slower everywhere, and a reference to compare with on any device. `vllm` has vLLM run
the model."""

DraftKind = Literal["torch", "eager", "onnx"]
"""The kinds of engine that a draft can have: it grows trees, which vLLM's attention cannot read."""

Dtype = Literal["float32", "bfloat16", "float16"]

WantedDtype = Literal["auto", "float32", "bfloat16", "float16"]
"""A dtype, or that which fits model and device (`preflight/dtype.py`)."""

BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number of each dtype."""


@dataclass(frozen=True)
class Placement:
    """How a model is to be run."""

    kind: Kind = "torch"
    dtype: WantedDtype = "auto"
    device: str = "cpu"
    kv_tokens: int | None = None
    """Slots of the KV cache; None: as memory allows."""
    share: float = 1.0
    """The part of the model that this device holds: less than 1 where the model is cut into parts."""
    compiled: bool = False
    """Whether torch compiles the model's own layers."""
    sessions: int | None = None
    """Sessions of a step; None: as a service has by default."""
    beside: bool = False
    """True if the model runs in another model's process."""
