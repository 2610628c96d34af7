"""Models on split-KV tiles against their own forward pass: Llama-like ones by kernels alone, others through
transformers' attention interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdec.engine.gpu.layout import SplitKvBatch, SplitKvPacker, tile_rows_for
from specdec.engine.gpu.staging import SplitKvTensors
from specdec.engine.hf import attention_hook, llama_like
from specdec.engine.hf.gpu_head import GpuHead
from specdec.engine.hf.linear import Float32Head
from specdec.engine.hf.pretrained import LayerAttention, attention_of, load
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.partials import MAX_PARTIALS
from tests.models import ARCHITECTURES, CONTEXT, VOCABULARY, WINDOW, make

pytest.importorskip("triton", reason="the extra `cuda` is not installed")
from specdec.engine.gpu.attention import SplitKvAttention, SplitKvMemory
from specdec.engine.gpu.decoder import GpuDecoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 64
DONE = WINDOW + 5
"""Tokens with keys and values in memory."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Error relative to the largest logit. bfloat16 values are rounded at other places than in transformers."""


class Step:
    """A text whose last two tokens are still to be computed, like a branch of one token."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        numbers = np.random.default_rng(0)
        self.text = numbers.integers(3, VOCABULARY, DONE + 2).tolist()
        self.branch = (self.text[-1] + 1) % VOCABULARY
        self.slots = numbers.permutation(np.arange(1, SLOTS))[: DONE + 3]

    @torch.inference_mode()
    def own(self) -> Tensor:
        """Return the three tokens' logits, by the model's own forward pass."""
        self.model.set_attn_implementation("eager")
        texts = torch.tensor([self.text, [*self.text[:-1], self.branch]], device=DEVICE)
        logits = self.model(input_ids=texts, use_cache=False).logits.float()
        self.model.set_attn_implementation(attention_hook.NAME)
        return torch.stack([logits[0, -2], logits[0, -1], logits[1, -1]])

    @torch.inference_mode()
    def memory(self, layers: list[LayerAttention]) -> SplitKvMemory:
        """Return the memory filled with the earlier tokens' keys and values from the model's own forward pass."""
        cache = DynamicCache()
        self.model.set_attn_implementation("eager")
        self.model(input_ids=torch.tensor([self.text[:DONE]], device=DEVICE), past_key_values=cache, use_cache=True)
        self.model.set_attn_implementation(attention_hook.NAME)
        place: dict[str, Any] = {"dtype": self.model.dtype, "device": DEVICE}
        memory = SplitKvMemory(
            [torch.zeros(SLOTS, each.kv_heads, each.width, **place) for each in layers],
            [torch.zeros(SLOTS, each.kv_heads, each.value_width, **place) for each in layers],
            MAX_PARTIALS,
            self.model.config.num_attention_heads,
        )
        for index, (keys, values) in enumerate(zip(memory.keys, memory.values, strict=True)):
            keys[self.slots[:DONE]] = cache.layers[index].keys[0].transpose(0, 1)
            values[self.slots[:DONE]] = cache.layers[index].values[0].transpose(0, 1)
        return memory

    def batch(self, tile_rows: int) -> SplitKvBatch:
        packer = SplitKvPacker(tile_rows=tile_rows)
        tip, leaf = packer.add_rows(self.text[-2:], DONE, self.slots[DONE : DONE + 2])
        side = packer.add_row(self.branch, DONE + 1, int(self.slots[-1]))
        packer.add_path(self.slots[: DONE + 2], [tip, leaf])
        packer.add_path(np.append(self.slots[: DONE + 1], self.slots[-1]), [side])
        for row in (tip, leaf, side):
            packer.want(row)
        return packer.pack()


def run(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return the step's logits and the expected ones."""
    layers = attention_of(model)
    step = Step(model)
    want, memory = step.own(), step.memory(layers)
    heads = model.config.num_attention_heads
    batch = step.batch(tile_rows_for(heads // layers[0].kv_heads))
    tensors = SplitKvTensors.of(batch, DEVICE)
    packed = SplitKvAttention(memory, tensors)
    with torch.inference_mode():
        if llama_like.fits(model):
            head = GpuHead(model.get_output_embeddings())
            llama_like.join_products(model)
            run = GpuDecoder(model, layers, CONTEXT)
            states = run(tensors.tokens, tensors.positions, packed)
            return head(states.index_select(0, tensors.wanted)), want
        logits = model(
            input_ids=tensors.tokens[None],
            position_ids=tensors.positions[None],
            logits_to_keep=tensors.wanted.long(),
            use_cache=False,
            packed=packed,
        ).logits[0]
    return logits, want


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in ARCHITECTURES), ("qwen3", torch.bfloat16), ("gpt2", torch.bfloat16)],
    ids=str,
)
def test_a_tree_behind_a_text(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    got, want = run(load(ModelDirectory(make(name, tmp_path / name)), dtype, DEVICE))
    torch.testing.assert_close(got.float(), want, rtol=0, atol=TOLERANCE[dtype] * float(want.abs().max()))
    assert (want[1] - want[2]).abs().max() > 0.5 * want.abs().max()  # a leaf's logits are its own


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "rope_theta": 10000.0}},
        {"num_key_value_heads": 1, "head_dim": 20},
    ],
    ids=str,
)
def test_variants_are_computed_as_transformers_does(tmp_path: Path, overrides: dict[str, Any]) -> None:
    got, want = run(load(ModelDirectory(make("llama", tmp_path / "m", **overrides)), torch.float32, DEVICE))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_heads_logits_are_float32(dtype: torch.dtype, bias: bool) -> None:
    head = torch.nn.Linear(24, 50, bias).to(DEVICE, dtype)
    hidden = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    with torch.inference_mode():
        want = Float32Head(head).to(DEVICE)(hidden)
        got = GpuHead(head)(hidden)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
