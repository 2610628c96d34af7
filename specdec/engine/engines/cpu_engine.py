"""The torch engine on a CPU: ragged batches, prepacked products in the fastest tiles, adjustable thread count."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.cpu.attention import RaggedAttention
from specdec.engine.cpu.backend import RaggedBackend
from specdec.engine.cpu.decoder import Decoder
from specdec.engine.cpu.gemm_tiles import largest_tiles
from specdec.engine.cpu_count import threads_left
from specdec.engine.engines.torch_engine import AttentionBackend, TorchEngine
from specdec.engine.hf import llama_like
from specdec.engine.hf.attention_hook import PackedAttention
from specdec.engine.hf.batch_invariance import tile
from specdec.engine.hf.block_linear import check_threads, quantise
from specdec.engine.hf.hidden_states import Features
from specdec.engine.hf.linear import Head, PackedLinear, SlicedHead, can_pack, lay_out
from specdec.engine.hf.pretrained import DTYPES, load
from specdec.engine.memory import drop_file_pages
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import HEAD_BITS
from specdec.engine.preflight.weights import kept_format
from specdec.engine.row_counts import CANDIDATES, InvariantRowCounts, Shape, ShapeRowCounts
from specdec.engine.unsupported import UnsupportedModelError

FORMATS = {"F16": torch.float16, "BF16": torch.bfloat16}
"""Storage format, as returned by `kept_format` -> dtype."""


class CpuEngine(TorchEngine):
    """A torch engine on the CPU. `threads`: possible thread counts, the largest first; by default only torch's current
    one. If rows are exact, their bits do not depend on the thread count. `bits`: quantise weights to this number of
    bits, and the output head to HEAD_BITS; quantised products always use all threads.

    In ragged batches, layers of the Llama kind run in `cpu/decoder.py`; all others run the model's own code.
    """

    float32_head: Head = SlicedHead

    def __init__(
        self,
        directory: ModelDirectory,
        *,
        dtype: str = "float32",
        threads: Sequence[int] = (),
        backend: type[AttentionBackend] = RaggedBackend,
        bits: int | None = None,
        **options: Any,
    ) -> None:
        self._ragged = backend is RaggedBackend
        self._bits = bits
        if self._ragged and dtype == "float16":
            raise UnsupportedModelError(
                "float16 is for GPUs: on the CPU the torch engine supports float32 and bfloat16"
            )
        self.threads = tuple(dict.fromkeys(threads)) or (torch.get_num_threads(),)
        torch.set_num_threads(self.threads[0])
        super().__init__(directory, dtype=dtype, backend=backend, **options)

    @property
    def _product_rows(self) -> InvariantRowCounts | None:
        return self._usual.batch if self._rows is None and self._usual is not None else self._rows

    def use_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    @property
    def lazy_bytes(self) -> int:
        return self._kv_bytes if isinstance(self._backend, RaggedBackend) else 0

    def touch_memory(self) -> None:
        if isinstance(self._backend, RaggedBackend):
            self._backend.touch_memory()

    def tile(self, classes: ShapeRowCounts | None) -> None:
        """Run products at their invariant row counts only. None: any row count, but only the usual ones for prepacked
        products. Prepacked products avoid tiles larger than the fastest one."""
        super().tile(None if classes is None else classes.cut(self._largest_tiles))
        self._classes = classes  # the numerics fingerprint uses the uncut counts: tiles change no bit
        if classes is None and self._usual is not None:
            tile(self.model, self._usual, packed_only=True)
        self._decoder = Decoder(self.model, self._layers) if self._joined else None

    def _load(self, directory: ModelDirectory, dtype: str, device: str) -> PreTrainedModel:
        kept = None if self._bits is None else kept_format(directory, dtype)
        return load(directory, DTYPES[dtype], device, None if kept is None else FORMATS[kept])

    def _quantise(self, dtype: torch.dtype) -> None:
        if self._bits is None:
            return
        joined = list(self.model.model.layers) if self._ragged and llama_like.fits(self.model) else []
        check_threads(self.model, llama_like.MERGED * len(joined), self.threads[0], threads_left())
        for layer in joined:
            llama_like.join_layer(layer)
            quantise(layer, self._bits, self.threads[0], dtype)
        quantise(self.model.get_output_embeddings(), HEAD_BITS, self.threads[0], torch.float32)
        quantise(self.model, self._bits, self.threads[0], dtype)
        self.model.to(dtype)  # embeddings and norms
        drop_file_pages(".safetensors")

    def _lay_out(self, dtype: torch.dtype) -> None:
        self._joined = self._ragged and llama_like.fits(self.model)
        if self._joined and self._bits is None:
            llama_like.join_products(self.model)
        self._packed = can_pack(dtype) and self._bits is None
        lay_out(self.model, PackedLinear if self._packed else None)
        if self._packed:  # the originals of prepacked weights are not read again
            drop_file_pages(".safetensors")

    @cached_property
    def _largest_tiles(self) -> dict[Shape, int]:
        """Rows of the fastest tile for each shape of prepacked product, measured after the KV cache is allocated."""
        head = set(self.model.get_output_embeddings().modules())  # left out, because it computes fewer rows
        products = [
            module for module in self.model.modules() if isinstance(module, PackedLinear) and module not in head
        ]
        return largest_tiles(products)

    @cached_property
    def _usual(self) -> ShapeRowCounts | None:
        """Row counts of prepacked products if rows need not be exact; None: any. The counts are limited because oneDNN
        compiles and keeps a product for each count, which takes milliseconds and a quarter of a megabyte."""
        largest = self._largest_tiles
        return ShapeRowCounts.alike(CANDIDATES, largest).cut(largest) if self._packed and self._ragged else None

    def _execution(self) -> tuple[str, ...]:
        threads = "-".join(map(str, self.threads))
        layout = "packed" if self._packed else "plain"
        if self._bits is not None:  # ONNX Runtime computes these products
            layout = f"int{self._bits}-onnxruntime-{version('onnxruntime')}"
        return f"threads-{threads}", layout, "joined" if self._joined else "layers"

    def _run(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor, packed: PackedAttention, features: Features | None
    ) -> Tensor:
        if self._decoder is None:
            return super()._run(tokens, positions, wanted, packed, features)
        assert isinstance(packed, RaggedAttention)  # from the ragged backend
        return self._decoder(tokens, positions, wanted, packed, features)
