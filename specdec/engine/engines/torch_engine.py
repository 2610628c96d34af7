"""The torch engine: runs any causal language model of transformers over packed batches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.gpu.staging import upload
from specdec.engine.hf.attention_hook import PackedAttention
from specdec.engine.hf.batch_invariance import make_exact, tile, untile
from specdec.engine.hf.fingerprint import ARITHMETIC, device_kind
from specdec.engine.hf.hidden_states import Features, decoder_layers, with_hidden_states
from specdec.engine.hf.linear import Float32Head, Head, lay_out
from specdec.engine.hf.pretrained import DTYPES, LayerAttention, attention_of, load
from specdec.engine.hf.reference_check import ReferenceCheck
from specdec.engine.kv.slots import Slots
from specdec.engine.memory import keep_freed_memory, slots_for
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.padded.backend import PaddedBackend
from specdec.engine.row_counts import InvariantRowCounts, ShapeRowCounts
from specdec.engine.start_phases import phase
from specdec.engine.working_memory import logits_bytes, row_bytes


class AttentionBackend(Protocol):
    """Keys and values of all layers, in one layout."""

    name: str  # part of the numerics fingerprint

    def __init__(
        self, layers: Sequence[LayerAttention], capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None: ...

    def packer(self, rows: InvariantRowCounts | None) -> Packer:
        """Return an empty packer; it pads batches to these row counts, if any."""

    def attention(self, batch: PackedBatch) -> PackedAttention:
        """Return the attention of one forward pass over a batch from this backend's packer."""

    def copy(self, source: Slots, target: Slots) -> None:
        """Copy keys and values from slots to slots, in every layer."""


class TorchEngine:
    """A model and its KV cache on one device: the model's own layers, around the attention of a `backend`.

    `capacity` is in slots; None: sized by free memory. The parameter `exact` requests rows independent of their batch;
    the attribute `exact` is the outcome of the check at start. `promised`, `promised_a_slot`: as in `load_engine`. On a
    CPU, `engines/cpu_engine.py` is faster.
    """

    threads: tuple[int, ...] = ()
    float32_head: Head = Float32Head

    def __init__(
        self,
        directory: ModelDirectory,
        *,
        capacity: int | None,
        dtype: str = "float32",
        device: str = "cpu",
        exact: bool = True,
        backend: type[AttentionBackend] = PaddedBackend,
        promised: int = 0,
        promised_a_slot: int = 0,
    ) -> None:
        with phase("weights"):
            self.model = self._load(directory, dtype, device)
            self.hidden_size: int = self.model.get_output_embeddings().in_features
            self.model.set_output_embeddings(self.float32_head(self.model.get_output_embeddings()))
            self._quantise(DTYPES[dtype])
            reference = ReferenceCheck.of(self.model, directory)
            self._lay_out(DTYPES[dtype])
        self.vocabulary = directory.vocabulary
        self.device, self.dtype = device, dtype
        self._device = torch.device(device)
        self._layers = layers = attention_of(self.model)
        slot_bytes = DTYPES[dtype].itemsize * sum(
            layer.kv_heads * (layer.width + layer.value_width) for layer in layers
        )
        working = (logits_bytes(self.vocabulary), row_bytes(self.vocabulary)) if device == "cpu" else (0, 0)
        self.capacity = capacity or slots_for(
            slot_bytes + promised_a_slot, directory.context, device, promised, *working
        )
        self._kv_bytes = self.capacity * slot_bytes
        with phase("kv_cache"):
            self._backend = backend(layers, self.capacity, DTYPES[dtype], self._device)
        keep_freed_memory()  # called after allocating the pools, which is faster without this setting (huge pages)
        with phase("tile_sizes"):
            self.tile(None)
        with phase("compiled_loops"):  # the first pass compiles them, unless cached
            reference.check(self)
        with phase("exactness"):
            # Results are cached per attention backend, since the same layers may run with another one.
            self.exact = exact and make_exact(self, reference.contents + self._backend.name.encode())
        self.numerics = "/".join(
            (
                ARITHMETIC,
                f"torch-{torch.__version__}",
                f"transformers-{transformers.__version__}",
                device_kind(device),
                dtype,
                *self._execution(),
                self._backend.name,
                f"exact-{self._classes or self._rows or 'any'}" if self.exact else "fast",
            )
        )

    def _load(self, directory: ModelDirectory, dtype: str, device: str) -> PreTrainedModel:
        return load(directory, DTYPES[dtype], device)

    def _quantise(self, dtype: torch.dtype) -> None:
        """Quantise the weights, if requested. Called before the model's own logits are recorded for comparison."""

    def packer(self) -> Packer:
        return self._backend.packer(self._product_rows)

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        return np.asarray(self.logits(batch).cpu().numpy())

    def forward_hidden(self, batch: PackedBatch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        logits, hidden = with_hidden_states(self.model, lambda: self.logits(batch))
        return np.asarray(logits.cpu().numpy()), np.asarray(hidden.float().cpu().numpy())

    @torch.inference_mode()
    def forward_features(
        self, batch: PackedBatch, layers: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        features = Features(layers)
        logits = self.logits(batch, features)
        return np.asarray(logits.cpu().numpy()), np.asarray(features.stacked().float().cpu().numpy())

    def layer_count(self) -> int:
        return len(decoder_layers(self.model))

    def token_embeddings(self) -> Tensor:
        table: Tensor = self.model.get_input_embeddings().weight
        return table.detach()

    @torch.inference_mode()
    def output_head(self, hidden: Tensor) -> Tensor:
        count = len(hidden)
        rows = self._product_rows
        padded = hidden if rows is None else F.pad(hidden, (0, 0, 0, rows.padded(count) - count))
        logits: Tensor = self.model.get_output_embeddings()(padded)
        return logits[:count]

    @property
    def _product_rows(self) -> InvariantRowCounts | None:
        """The row counts at which products run; None: any."""
        return self._rows

    def logits(self, batch: PackedBatch, features: Features | None = None) -> Tensor:
        """Run a forward pass and return its logits [n, vocabulary], on the device; fill `features`, if given."""
        with torch.inference_mode():
            tokens, positions, wanted = (
                upload(array, self._device) for array in (batch.tokens, batch.positions, batch.wanted)
            )
            return self._run(tokens, positions, wanted, self._backend.attention(batch), features)

    @torch.inference_mode()
    def copy(self, source: Slots, target: Slots) -> None:
        self._backend.copy(source, target)

    def tile(self, classes: ShapeRowCounts | None) -> None:
        """Run products at their invariant row counts only; None allows any row count."""
        self._classes = classes
        self._rows: InvariantRowCounts | None = None if classes is None else classes.batch  # of batches; None: any
        untile(self.model)
        if classes is not None:
            tile(self.model, classes)

    def _lay_out(self, dtype: torch.dtype) -> None:
        """Prepare the model's linear layers, before the first packed batch."""
        lay_out(self.model)

    def _execution(self) -> tuple[str, ...]:
        """Return the parts of the numerics fingerprint about products and layers."""
        return "plain", "layers"

    def _run(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor, packed: PackedAttention, features: Features | None
    ) -> Tensor:
        """Return the logits of the wanted rows; fill `features`, if given."""
        with nullcontext() if features is None else features.of(self.model):
            logits: Tensor = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                logits_to_keep=wanted,
                use_cache=False,
                packed=packed,
            ).logits
        return logits[0]
