"""Placement of a model: the kind of engine, dtype, device, and KV memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["torch", "eager", "onnx", "vllm"]
"""The kinds of engine. On a GPU, `torch` is the engine made for GPUs. `eager` runs the model's own layers, with
attention by tensor operations: it is slower everywhere, and is the reference on any device. `onnx` runs a model
exported for ONNX Runtime. In `vllm`, vLLM runs the model."""

DraftKind = Literal["torch", "eager", "onnx"]
"""The kinds of engine for a draft. Drafts grow trees, which vLLM's attention does not support."""

Dtype = Literal["float32", "bfloat16", "float16"]

GraphDtype = Literal["float32", "float16"]
"""The dtypes of exported graphs: their KV caches are NumPy arrays, and NumPy has no bfloat16."""

WantedDtype = Literal["auto", "float32", "bfloat16", "float16"]
"""A dtype, or "auto" for the one that suits model and device (`preflight/dtype.py`)."""

Weights = Literal["stored", "int8", "int4"]
"""How an engine keeps a model's weights: as they are stored, or quantised at start."""

BITS: dict[Weights, int | None] = {"stored": None, "int8": 8, "int4": 4}

BLOCK = 32
"""Numbers of a quantised weight that share a scale and a zero point."""

HEAD_BITS, TABLE_BITS = 8, 8
"""Bits of the output head in the torch engine, and of the token embeddings in an export, if weights are quantised."""

BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number of each dtype."""


@dataclass(frozen=True)
class Placement:
    """How to run a model."""

    kind: Kind = "torch"
    dtype: WantedDtype = "auto"
    device: str = "cpu"
    kv_tokens: int | None = None
    """Slots of the KV cache; None: by free memory (`memory.py`); on GPUs, vLLM decides for itself."""
    compiled: bool = False
    """True if vLLM compiles the model's layers."""
    sessions: int | None = None
    """Limit on the sessions of a step; None: the services' default."""
    beside: bool = False
    """True if the model runs in another model's process."""
    weights: Weights = "stored"
    is_draft: bool = False
    """True if the model only proposes tokens. An export for a CPU may then quantise its weights (`onnx/export.py`)."""

    @property
    def may_quantise(self) -> bool:
        """True if an export on first use may quantise the weights."""
        return self.is_draft and self.kind == "onnx" and self.device == "cpu" and self.dtype in ("auto", "float32")
