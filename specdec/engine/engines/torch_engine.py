"""The torch engine: runs any causal language model of transformers over packed batches."""

from __future__ import annotations

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.distributed.ranks import Ranks
from specdec.engine.gpu.upload import upload
from specdec.engine.hf import shards
from specdec.engine.hf.attention_backend import AttentionBackend
from specdec.engine.hf.attention_hook import PackedAttention
from specdec.engine.hf.batch_invariance import make_exact, tile, untile
from specdec.engine.hf.fingerprint import device_kind
from specdec.engine.hf.hidden_states import with_hidden_states
from specdec.engine.hf.linear import Float32Head, Head, lay_out
from specdec.engine.hf.pretrained import DTYPES, attention_of, load
from specdec.engine.hf.reference_check import ReferenceCheck
from specdec.engine.kv.slots import Slots
from specdec.engine.memory import keep_freed_memory, slots_for
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.padded.backend import PaddedBackend
from specdec.engine.row_counts import InvariantRowCounts, ShapeRowCounts
from specdec.engine.start_phases import phase
from specdec.engine.working_memory import logits_bytes, row_bytes


class TorchEngine:
    """A model and its KV cache on one device: the model's own layers, around the attention of a `backend`.

    `capacity` is in slots; None: sized by free memory. The parameter `exact` requests rows independent of their batch;
    the attribute `exact` is the outcome of the check at start. With `ranks` the model is split, and this engine is one
    part (`parallel_engine.py`). `promised`: as in `slots_for`. On a CPU `engines/cpu_engine.py` is faster.
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
        ranks: Ranks | None = None,
        promised: int = 0,
    ) -> None:
        with phase("weights"):
            self.model = load(directory, DTYPES[dtype], device, ranks)
            self.hidden_size: int = self.model.get_output_embeddings().in_features
            if ranks is None:
                self.model.set_output_embeddings(self.float32_head(self.model.get_output_embeddings()))
            reference = ReferenceCheck.of(self.model, directory.vocabulary)
            if ranks is not None:
                shards.settle(self.model, ranks, self.float32_head)
            self._lay_out(DTYPES[dtype])
        self.vocabulary = directory.vocabulary
        self.device, self.dtype = device, dtype
        self._device = torch.device(device)
        self._layers = layers = attention_of(self.model)
        slot_bytes = DTYPES[dtype].itemsize * sum(
            layer.kv_heads * (layer.width + layer.value_width) for layer in layers
        )
        self.capacity = capacity or self._room(slot_bytes, directory, device, ranks, promised)
        self._kv_bytes = self.capacity * slot_bytes
        with phase("kv_cache"):
            self._backend = backend(layers, self.capacity, DTYPES[dtype], self._device)
        keep_freed_memory()  # only now: the pools themselves are allocated faster from the system, in huge pages
        with phase("tile_sizes"):
            self.tile(None)
        self.exact = False
        self._settle(reference, exact=exact)
        self.numerics = "/".join(
            (
                f"torch-{torch.__version__}",
                f"transformers-{transformers.__version__}",
                device_kind(device),
                dtype,
                *self._execution(),
                self._backend.name,
                f"exact-{self._classes or self._rows or 'any'}" if self.exact else "fast",
                *([] if ranks is None else [f"parallel-{ranks.degree}"]),
            )
        )

    def packer(self) -> Packer:
        return self._backend.packer(self._rows)

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        return np.asarray(self.logits(batch).cpu().numpy())

    def forward_hidden(self, batch: PackedBatch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        logits, hidden = with_hidden_states(self.model, lambda: self.logits(batch))
        return np.asarray(logits.cpu().numpy()), np.asarray(hidden.float().cpu().numpy())

    def logits(self, batch: PackedBatch) -> Tensor:
        """Run a forward pass and return its logits [n, vocabulary], on the device."""
        with torch.inference_mode():
            return self._pass(batch)

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

    @staticmethod
    def _room(slot_bytes: int, directory: ModelDirectory, device: str, ranks: Ranks | None, promised: int) -> int:
        """Return the number of slots with room in memory on every rank."""
        sharers = ranks.local_degree if ranks is not None and device == "cpu" else 1
        beside = (
            {}
            if device != "cpu"
            else {"working": logits_bytes(directory.vocabulary), "row_bytes": row_bytes(directory.vocabulary)}
        )

        def slots() -> int:
            return slots_for(slot_bytes, directory.context, device, sharers, promised, **beside)

        return slots() if ranks is None else min(ranks.all(ranks.together(slots)))

    def _lay_out(self, dtype: torch.dtype) -> None:
        """Prepare the model's linear layers, before the first packed batch."""
        lay_out(self.model, packed=False)

    def _settle(self, reference: ReferenceCheck, *, exact: bool) -> None:
        """Run the reference check, then make rows exact if requested."""
        with phase("compiled_loops"):  # the first pass compiles them, unless cached
            reference.check(self)
        with phase("exactness"):
            # Results are cached per attention backend: the same layers may run with another one.
            self.exact = exact and make_exact(self, reference.contents + self._backend.name.encode())

    def _execution(self) -> tuple[str, ...]:
        """Return the parts of the numerics fingerprint about products and layers."""
        return "plain", "layers"

    def _pass(self, batch: PackedBatch) -> Tensor:
        tokens, positions, wanted = (
            upload(array, self._device) for array in (batch.tokens, batch.positions, batch.wanted)
        )
        return self._run(tokens, positions, wanted, self._backend.attention(batch))

    def _run(self, tokens: Tensor, positions: Tensor, wanted: Tensor, packed: PackedAttention) -> Tensor:
        """Return the logits [n, vocabulary] of the wanted rows."""
        logits: Tensor = self.model(
            input_ids=tokens[None], position_ids=positions[None], logits_to_keep=wanted, use_cache=False, packed=packed
        ).logits
        return logits[0]
