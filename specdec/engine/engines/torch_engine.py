"""The torch engine: runs any causal language model of transformers over packed batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.cpu.arithmetic import NUMBA
from specdec.engine.cpu.attention import RaggedAttention, RaggedMemory
from specdec.engine.cpu.compiled import LEAST_ROWS as LEAST_COMPILED_ROWS
from specdec.engine.cpu.compiled import CompiledModel, frozen
from specdec.engine.cpu.decoder import Decoder
from specdec.engine.cpu.gemm_tiles import largest_tiles
from specdec.engine.cpu.layout import RaggedBatch, RaggedPacker
from specdec.engine.distributed.ranks import Ranks
from specdec.engine.engine import UnsupportedModelError, cpu_threads
from specdec.engine.hf import llama_like, shards
from specdec.engine.hf.attention_hook import PackedAttention
from specdec.engine.hf.batch_invariance import CANDIDATES, Linear, find, rows_are_independent, tile, untile
from specdec.engine.hf.fingerprint import device_kind
from specdec.engine.hf.hidden_states import with_hidden_states
from specdec.engine.hf.linear import Float32Head, PackedLinear, can_pack, lay_out
from specdec.engine.hf.pretrained import DTYPES, attention_of, is_quantised, load, window_of
from specdec.engine.hf.reference_check import ReferenceCheck
from specdec.engine.kv.slots import Slots
from specdec.engine.memory import keep_freed_memory, slots_for
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.padded.attention import Group, PaddedAttention
from specdec.engine.padded.layout import LEAST_ROWS, PaddedBatch, PaddedGroup, PaddedPacker
from specdec.engine.row_counts import InvariantRowCounts, ShapeRowCounts

Run = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""A forward pass: a function of tokens [t], positions [t], wanted rows [n] and the batch's attention, which returns
logits [n, vocabulary]."""


@dataclass
class EagerPools:
    """Keys and values of all layers that are written in place."""

    keys: Sequence[Tensor] | Tensor
    values: Sequence[Tensor] | Tensor

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)
        return self.keys[layer], self.values[layer]


class TorchEngine:
    """A model and its KV cache on one device.

    `capacity` is in slots; None takes as many as memory has room for. `exact` asks for rows that depend neither on
    their batch nor on how many CPU threads compute them; the attribute of this name says whether the check at start
    found this to hold. Attention reads ragged batches on a CPU, and padded batches elsewhere or if `padded`. On a CPU
    layers of the Llama kind run in `cpu/decoder.py`; all others are the model's own code, which torch fuses if
    `compiled` (`cpu/compiled.py`). With `ranks` the model is cut into parts, and this engine is one of them
    (`parallel_engine.py`). It computes with the threads that torch has; `cpu/engine.py` can change their number.
    """

    def __init__(
        self,
        directory: ModelDirectory,
        *,
        capacity: int | None,
        dtype: str = "float32",
        device: str = "cpu",
        exact: bool = True,
        compiled: bool = False,
        padded: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self._ragged = device == "cpu" and not padded
        if self._ragged and dtype == "float16":
            raise UnsupportedModelError("float16 is for GPUs: on the CPU the torch engine takes float32 or bfloat16")
        self.model = load(directory, DTYPES[dtype], device, ranks)
        self.hidden_size: int = self.model.get_output_embeddings().in_features
        if ranks is None:
            self.model.set_output_embeddings(Float32Head(self.model.get_output_embeddings()))
        own = ReferenceCheck.of(self.model, directory.vocabulary)
        if ranks is not None:
            shards.settle(self.model, ranks)
        self._joined = self._ragged and not compiled and llama_like.fits(self.model)
        if self._joined:
            llama_like.join_products(self.model)
        packed = device == "cpu" and not compiled and can_pack(DTYPES[dtype])
        lay_out(self.model, packed=packed)
        self.vocabulary = directory.vocabulary
        self.window = window_of(self.model)
        self._device = torch.device(device)
        self._layers = layers = attention_of(self.model)
        slot_bytes = DTYPES[dtype].itemsize * sum(each.kv_heads * (each.width + each.value_width) for each in layers)
        self.capacity = capacity = capacity or self._room(slot_bytes, directory.context, device, ranks)
        place: dict[str, Any] = {"dtype": DTYPES[dtype], "device": device}
        order = -1 if self._ragged else 1  # slots after heads, or before them
        sizes = [(capacity, each.kv_heads)[::order] for each in layers]
        keys = _pool([(*size, each.width) for size, each in zip(sizes, layers, strict=True)], **place)
        values = _pool([(*size, each.value_width) for size, each in zip(sizes, layers, strict=True)], **place)
        keep_freed_memory()  # only now: the pools themselves are allocated faster from the system, in huge pages
        self._pools = EagerPools(keys, values)
        self._memory = RaggedMemory(keys, values, torch.get_num_threads()) if self._ragged else None
        self._rows: InvariantRowCounts | None = None  # row counts of batches; None: any
        self._classes: ShapeRowCounts | None = None
        self._compiled = False
        head = set(self.model.get_output_embeddings().modules())  # left out: it has fewer rows
        products = [each for each in self.model.modules() if isinstance(each, PackedLinear) and each not in head]
        self._largest_tiles = largest = largest_tiles(products)
        # oneDNN compiles a product for each row count, which takes milliseconds, and keeps it: a quarter of a megabyte.
        self._usual = ShapeRowCounts.alike(CANDIDATES, largest).cut(largest) if packed and self._ragged else None
        self.tile(None)
        self.exact = False
        self._settle(own, exact=exact, compiled=compiled)
        self.numerics = "/".join(
            (
                f"torch-{torch.__version__}",
                f"transformers-{transformers.__version__}",
                device_kind(device),
                dtype,
                *([f"threads-{'-'.join(map(str, self._thread_counts()))}"] if device == "cpu" else []),
                "compiled" if compiled else "packed" if packed else "plain",
                "joined" if self._joined else "layers",
                f"vectors-numba-{NUMBA}" if self._ragged else "padded",
                f"exact-{self._classes or self._rows or 'any'}" if self.exact else "fast",
                *([] if ranks is None else [f"parallel-{ranks.degree}"]),
            )
        )

    def packer(self) -> Packer:
        if self._ragged:
            usual = None if self._usual is None else self._usual.batch
            return RaggedPacker(rows=self._rows or usual)
        return PaddedPacker(rows=self._rows, window=self.window, least_rows=LEAST_ROWS if self._rows else 1)

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        return np.asarray(self.logits(batch).cpu().numpy())

    def forward_hidden(self, batch: PackedBatch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Like `forward`, with hidden states; UnsupportedModelError if the model is compiled: its head is fused."""
        if self._compiled:
            raise UnsupportedModelError("a compiled model gives no hidden states: leave out --compile")
        logits, hidden = with_hidden_states(self.model, lambda: self.logits(batch))
        return np.asarray(logits.cpu().numpy()), np.asarray(hidden.float().cpu().numpy())

    def logits(self, batch: PackedBatch) -> Tensor:
        """Run a forward pass and return its logits [n, vocabulary], which stay on the device."""
        # In inference mode torch's compiler does not freeze the weights, and is then slower than no compiler.
        with torch.no_grad() if self._compiled else torch.inference_mode():
            tensors = (self._tensor(batch.tokens), self._tensor(batch.positions), self._tensor(batch.wanted))
            return self._run(*tensors, self._attention(batch))

    @torch.inference_mode()
    def copy(self, source: Slots, target: Slots) -> None:
        source_rows, target_rows = self._tensor(source), self._tensor(target)
        slots = 1 if self._ragged else 0  # the dimension of slots
        for pool in (*self._pools.keys, *self._pools.values):
            pool.index_copy_(slots, target_rows, pool.index_select(slots, source_rows))

    def tile(self, classes: ShapeRowCounts | None) -> None:
        """Run products at their invariant row counts only; with None at any number of rows, or prepacked ones at the
        usual counts. Prepacked products use no tiles larger than those measured to be the quickest."""
        self._classes = classes
        self._rows = None if classes is None else classes.batch
        untile(self.model)
        if classes is not None:
            tile(self.model, classes.cut(self._largest_tiles))
        elif self._usual is not None:
            tile(self.model, self._usual, packed_only=True)
        self._run = self._assembled()

    @staticmethod
    def _room(slot_bytes: int, context: int, device: str, ranks: Ranks | None) -> int:
        """Return the number of slots that memory has room for, on every rank."""
        if ranks is None:
            return slots_for(slot_bytes, context, device)
        sharers = ranks.local_degree if device == "cpu" else 1
        return min(ranks.all(ranks.together(lambda: slots_for(slot_bytes, context, device, sharers))))

    def _settle(self, own: ReferenceCheck, *, exact: bool, compiled: bool) -> None:
        """Run the reference check, then compile the model or make rows exact if so asked."""
        own.check(self)
        if compiled:
            self._compile()
        if exact:
            self._make_exact()

    def _assembled(self) -> Run:
        """Return the forward pass over the layers as they are now."""
        return Decoder(self.model, self._layers) if self._joined else self._own_layers

    def _own_layers(self, tokens: Tensor, positions: Tensor, wanted: Tensor, packed: PackedAttention) -> Tensor:
        logits: Tensor = self.model(
            input_ids=tokens[None], position_ids=positions[None], logits_to_keep=wanted, use_cache=False, packed=packed
        ).logits
        return logits[0]

    def _compile(self) -> None:
        self._rows = InvariantRowCounts(tuple(count for count in CANDIDATES if count >= LEAST_COMPILED_ROWS))
        self._run, self._compiled = CompiledModel(self.model), True
        packer = self.packer()
        rows = packer.add_rows([0, 0, 0], 0, [1, 2, 3])
        packer.add_path(np.arange(1, 4), rows)
        packer.want(rows[-1])
        try:
            with frozen():
                self.forward(packer.pack())
        except Exception as error:  # the compiler's errors have no common base
            reason = str(error).strip().partition("\n")[0]
            name = type(self.model).__name__
            raise UnsupportedModelError(f"{name} cannot be compiled: {type(error).__name__}: {reason}") from error

    def _make_exact(self) -> None:
        """Run at invariant row counts only, if a check finds that rows then do not depend on their batch."""
        if self._compiled or is_quantised(self.model):  # these layers cannot be tiled: exact as they are, or not at all
            self.exact = rows_are_independent(self)
            return
        linears = [module for module in self.model.modules() if isinstance(module, Linear)]
        classes = find(linears, str(self._device), self._thread_counts())
        if classes is None:
            return
        self.tile(classes)
        self.exact = rows_are_independent(self)
        if not self.exact:
            self.tile(None)

    def _thread_counts(self) -> tuple[int, ...]:
        """Return the numbers of threads that compute: those that the engine may be told to use, or what torch has."""
        threaded = cpu_threads(self)
        return (torch.get_num_threads(),) if threaded is None else threaded.threads

    def _attention(self, batch: PackedBatch) -> PackedAttention:
        if isinstance(batch, RaggedBatch):
            assert self._memory is not None
            return RaggedAttention(self._memory, batch)
        assert isinstance(batch, PaddedBatch)  # from our own packer
        in_order = bool((batch.place == np.arange(len(batch.place))).all())
        groups = [self._group(group) for group in batch.groups]
        once = in_order and sum(group.rows.numel() for group in groups) == len(batch.tokens)
        place = None if once else self._tensor(batch.place)
        return PaddedAttention(self._pools, self._tensor(batch.slots), groups, place, fused=True)

    def _group(self, group: PaddedGroup) -> Group:
        first, length = int(group.keys[0, 0]), group.keys.shape[1]
        keys: Tensor | slice
        if group.contiguous and first + length <= self.capacity:
            keys = slice(first, first + length)
        else:
            keys = self._tensor(group.keys)
        return Group(
            keys,
            self._tensor(group.rows),
            self._tensor(group.visible),
            None if group.windowed is None else self._tensor(group.windowed),
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def _pool(shapes: Sequence[tuple[int, ...]], **place: Any) -> Sequence[Tensor] | Tensor:
    """Return memory of these shapes: one tensor if all are the same, else a list."""
    if len(set(shapes)) == 1:
        return torch.zeros(len(shapes), *shapes[0], **place)
    return [torch.zeros(*shape, **place) for shape in shapes]
