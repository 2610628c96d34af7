"""The engine for GPUs: split-KV attention, layers in few kernels, steps as CUDA graphs, sampling on the GPU.

`gpu/decoder.py` runs layers of the Llama kind, in CUDA graphs. Any other model runs its own layers, kernel by kernel,
around the same attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
import triton
from numpy.typing import NDArray
from torch import Tensor

from specdec.decoding.query import SamplingQuery
from specdec.decoding.step_logits import RowFeatures
from specdec.engine.batch import PackedBatch
from specdec.engine.gpu.attention import SplitKvAttention, SplitKvMemory
from specdec.engine.gpu.decoder import GpuDecoder
from specdec.engine.gpu.draft_logits import GpuDraftLogits
from specdec.engine.gpu.graphs import MAX_ROWS, Graphs
from specdec.engine.gpu.layout import SplitKvBatch, SplitKvPacker, tile_rows_for
from specdec.engine.gpu.linear import cuts, split_k
from specdec.engine.gpu.sampler import GpuLogits
from specdec.engine.gpu.staging import SplitKvTensors, upload
from specdec.engine.hf import llama_like
from specdec.engine.hf.batch_invariance import make_exact, tile, untile
from specdec.engine.hf.fingerprint import ARITHMETIC, device_kind
from specdec.engine.hf.gpu_head import GpuHead
from specdec.engine.hf.hidden_states import Features, decoder_layers, with_hidden_states
from specdec.engine.hf.linear import lay_out
from specdec.engine.hf.pretrained import DTYPES, attention_of, load
from specdec.engine.hf.reference_check import ReferenceCheck
from specdec.engine.kv.slots import Slots
from specdec.engine.memory import slots_for
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.partials import MAX_PARTIALS, numbers_of_a_partial, partials_for
from specdec.engine.placement import BYTES
from specdec.engine.row_counts import CANDIDATES, InvariantRowCounts, ShapeRowCounts
from specdec.engine.start_phases import phase


class _Result(NamedTuple):
    """The result of a forward pass on the GPU."""

    logits: Tensor  # [n, vocabulary] of the wanted rows
    hidden: Tensor | None = None  # [n, hidden_size] of the same rows
    features: Tensor | None = None  # [t, layers, hidden] of all rows


class GpuPass:
    """A forward pass on the GPU's stream, with its logits [n, vocabulary]. The logits are released when used, because
    the next pass needs as much memory."""

    def __init__(
        self,
        logits: Tensor,
        on_gpu: Callable[[], AbstractContextManager[None]],
        hidden: Tensor | None = None,
        features: RowFeatures | None = None,
    ) -> None:
        self._logits: Tensor | None = logits
        self._on_gpu = on_gpu
        self._hidden = hidden
        self._features = features

    def logits(self, asked: Callable[[], Mapping[int, SamplingQuery]]) -> GpuLogits:
        logits, self._logits = self._logits, None
        assert logits is not None
        with self._on_gpu():
            queries = asked()
            rows = GpuLogits(logits, queries, self._hidden, self._features)
            if (
                not queries and logits.device.type == "cuda"
            ):  # nothing was fetched, and the pass must be complete on return
                torch.cuda.synchronize()
        return rows


class GpuEngine:
    """A model and its KV cache on one GPU.

    `capacity` is in slots; None: sized by free memory. The parameter `exact` requests rows independent of their batch;
    the attribute `exact` is the outcome of the check at start. Without `cuda_graphs` every step launches its kernels
    one by one. `promised`, `promised_a_slot`: as in `load_engine`. On "cpu" the engine runs under Triton's interpreter,
    without graphs, for tests.
    """

    threads: tuple[int, ...] = ()
    queues_passes = True

    def __init__(
        self,
        directory: ModelDirectory,
        *,
        capacity: int | None,
        dtype: str = "bfloat16",
        device: str = "cuda",
        exact: bool = True,
        cuda_graphs: bool = True,
        promised: int = 0,
        promised_a_slot: int = 0,
    ) -> None:
        self._cuda_graphs = cuda_graphs and torch.device(device).type == "cuda"
        with phase("weights"):
            self.model = load(directory, DTYPES[dtype], device)
        own = ReferenceCheck.of(self.model, directory)
        self.hidden_size: int = self.model.get_output_embeddings().in_features
        self.model.set_output_embeddings(GpuHead(self.model.get_output_embeddings()))
        self._joined = llama_like.fits(self.model)
        if self._joined:
            llama_like.join_products(self.model)
        lay_out(self.model)
        self.vocabulary = directory.vocabulary
        self.device, self.dtype = device, dtype
        self._context = directory.context
        self._device = torch.device(device)
        self._layers = layers = attention_of(self.model)
        self._heads = max(layer.heads for layer in layers)
        self._tile_rows = tile_rows_for(max(layer.heads // layer.kv_heads for layer in layers))
        slot_bytes = DTYPES[dtype].itemsize * sum(
            layer.kv_heads * (layer.width + layer.value_width) for layer in layers
        )
        numbers = numbers_of_a_partial(self._heads, max(layer.value_width for layer in layers))
        working = MAX_PARTIALS * numbers * BYTES["float32"]
        self.capacity = capacity = capacity or slots_for(
            slot_bytes + promised_a_slot, directory.context, device, promised, working
        )
        self._partials = partials_for(min(directory.context, capacity))
        place: dict[str, Any] = {"dtype": DTYPES[dtype], "device": device}
        keys = [torch.zeros(capacity, layer.kv_heads, layer.width, **place) for layer in layers]
        values = [torch.zeros(capacity, layer.kv_heads, layer.value_width, **place) for layer in layers]
        self._memory = SplitKvMemory(keys, values, self._partials, self._heads)
        self.tile(None)
        with phase("compiled_loops"):
            own.check(self)
        with phase("exactness"), self._computing():  # no pass has set the current device
            self.exact = exact and make_exact(self, instead=split_k, split_context=self._context)
        self.numerics = "/".join(
            (
                ARITHMETIC,
                f"torch-{torch.__version__}",
                f"transformers-{transformers.__version__}",
                device_kind(device),
                dtype,
                "joined" if self._joined else "layers",
                f"split-kv-triton-{triton.__version__}",
                f"split-k-{cuts(self.model)}",
                f"exact-{self._classes or self._rows}" if self.exact else "fast",
            )
        )

    def packer(self) -> SplitKvPacker:
        return SplitKvPacker(rows=self._rows, tile_rows=self._tile_rows, most_partials=self._partials)

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        return _on_host(self._execute(batch).logits)

    def forward_hidden(self, batch: PackedBatch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        result = self._execute(batch, hidden=True)
        assert result.hidden is not None
        return _on_host(result.logits), _on_host(result.hidden)

    def forward_features(
        self, batch: PackedBatch, layers: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        result = self._execute(batch, layers=tuple(layers))
        assert result.features is not None
        return _on_host(result.logits), _on_host(result.features)

    def layer_count(self) -> int:
        return len(decoder_layers(self.model))

    def token_embeddings(self) -> Tensor:
        table: Tensor = self.model.get_input_embeddings().weight
        return table.detach()

    def output_head(self, hidden: Tensor) -> Tensor:
        count = len(hidden)
        with self._computing():
            padded = F.pad(hidden, (0, 0, 0, self._rows.padded(count) - count))
            logits: Tensor = self.model.get_output_embeddings()(padded)
            return logits[:count]

    def launch(self, batch: PackedBatch) -> GpuPass:
        return GpuPass(self._execute(batch).logits, self._computing)

    def launch_hidden(self, batch: PackedBatch) -> GpuPass:
        result = self._execute(batch, hidden=True)
        return GpuPass(result.logits, self._computing, result.hidden)

    def launch_features(self, batch: PackedBatch, layers: Sequence[int]) -> GpuPass:
        result = self._execute(batch, layers=tuple(layers))
        return GpuPass(result.logits, self._computing, features=RowFeatures(result.features, batch.wanted))

    def forward_shortlists(self, batch: PackedBatch) -> GpuDraftLogits:
        with self._computing():
            logits = self._execute(batch).logits
            rows = GpuDraftLogits(logits)
            if not len(logits) and self._device.type == "cuda":  # nothing was fetched, as in `GpuPass.logits`
                torch.cuda.synchronize()
        return rows

    def copy(self, source: Slots, target: Slots) -> None:
        with self._computing():
            source_rows, target_rows = (upload(slots, self._device) for slots in (source, target))
            for pool in (*self._memory.keys, *self._memory.values):
                pool.index_copy_(0, target_rows, pool.index_select(0, source_rows))

    def tile(self, classes: ShapeRowCounts | None) -> None:
        """Run products at their invariant row counts only; None allows all CANDIDATES."""
        self._classes = classes
        self._rows = InvariantRowCounts(CANDIDATES) if classes is None else classes.batch  # row counts of batches
        untile(self.model)
        if classes is not None:
            tile(self.model, classes)
        self._graphs: dict[tuple[int, ...], Graphs] | None = None
        self._decoder = GpuDecoder(self.model, self._layers, self._context) if self._joined else None
        if self._decoder is not None and self._cuda_graphs:
            self._graphs = {}

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Make this GPU the thread's current device. Triton and graph capture use the current device, not their
        tensors' device."""
        with torch.inference_mode(), torch.accelerator.device_index(self._device.index):
            yield

    def _execute(self, batch: PackedBatch, *, hidden: bool = False, layers: tuple[int, ...] = ()) -> _Result:
        """Run a forward pass, with the hidden states of the wanted rows if `hidden`, or with the features of all rows
        at `layers`."""
        assert isinstance(batch, SplitKvBatch)  # from our own packer
        batch.check(self.capacity, self._context)
        with self._computing():
            if self._decoder is None:
                tensors = SplitKvTensors.of(batch, self._device)
                if hidden:
                    return _Result(*with_hidden_states(self.model, lambda: self._logits(tensors)))
                if layers:
                    features = Features(layers)
                    with features.of(self.model):
                        logits = self._logits(tensors)
                    return _Result(logits, features=features.stacked())
                return _Result(self._logits(tensors))
            wanted, rows = len(batch.wanted), len(batch.tokens)
            if self._graphs is not None and wanted <= rows <= MAX_ROWS and len(batch.waves) == 1:
                room = np.concatenate([batch.wanted, np.zeros(rows - wanted, dtype=np.int64)])
                tensors, states = self._graphs_of(layers).forward(replace(batch, wanted=room))
            else:
                tensors = SplitKvTensors.of(batch, self._device)
                states = self._states(layers, tensors)
            # The head runs outside graphs: a prompt needs the logits of one row of many, and logits are large.
            chosen = states[:, 0].index_select(0, tensors.wanted[:wanted])
            # Copied, since the next pass of this size overwrites the graph's memory.
            kept = states[:, 1:].clone() if layers else None
            return _Result(self.model.get_output_embeddings()(chosen), chosen, kept)

    def _graphs_of(self, layers: tuple[int, ...]) -> Graphs:
        """Return the graphs of passes that keep these layers' features."""
        assert self._graphs is not None
        if layers not in self._graphs:
            self._graphs[layers] = Graphs(partial(self._states, layers), self._device)
        return self._graphs[layers]

    def _states(self, layers: tuple[int, ...], batch: SplitKvTensors) -> Tensor:
        """Run joined layers; return the hidden states of all rows, followed by their features: [t, 1 + len(layers),
        hidden]."""
        assert self._decoder is not None
        features = Features(layers) if layers else None
        hidden = self._decoder(batch.tokens, batch.positions, SplitKvAttention(self._memory, batch), features)
        return hidden[:, None] if features is None else torch.cat([hidden[:, None], features.stacked()], dim=1)

    def _logits(self, batch: SplitKvTensors) -> Tensor:
        """Run a model's own layers; return the logits of the wanted rows."""
        logits: Tensor = self.model(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            logits_to_keep=batch.wanted,
            use_cache=False,
            packed=SplitKvAttention(self._memory, batch),
        ).logits
        return logits[0]


def _on_host(values: Tensor) -> NDArray[np.float32]:
    return np.asarray(values.float().cpu().numpy())
