"""Variants of architectures, and other precisions, give the logits of the model's own forward pass.

The engines share all code for these variants, so testing the torch engine suffices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.engines.torch_engine import TorchEngine
from specdec.engine.model_directory import ModelDirectory
from tests.engine.own_forward import CAPACITY, TOLERANCE, Oracle, Step, Subject, Tree, last_logits, prefilled, words
from tests.models import VOCABULARY, WINDOW, make

pytestmark = pytest.mark.usefixtures("one_thread")


class TestVariants:
    """Variants that only the torch engine is tested with."""

    @pytest.mark.parametrize(
        ("name", "overrides"),
        [
            ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
            ("gemma3", {"attn_logit_softcapping": 4.0}),
            ("gpt2", {"tie_word_embeddings": True, "scale_attn_by_inverse_layer_idx": True}),
            ("llama", {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True}),
            ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
        ],
        ids=["some-layers-windowed", "windowed-and-capped", "scaled-by-layer", "one-key-head", "linear-rope"],
    )
    def test_own_forward(self, name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
        directory = make(name, tmp_path, **overrides)
        subject = Subject(CpuEngine(ModelDirectory(directory), capacity=CAPACITY), Oracle(directory))
        session = prefilled(subject, words(6, 61))
        step = Step(subject)
        tree = Tree(session, step)
        tree.as_paths(step)
        step.run()

    @pytest.mark.parametrize("engine", [CpuEngine, TorchEngine])
    def test_positions_beyond_the_original_context_are_scaled(self, engine: type[TorchEngine], tmp_path: Path) -> None:
        """YaRN as model cards advise it. Windows hide the first 40,000 tokens, which need not be computed."""
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768, "rope_theta": 1e6}
        windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
        directory = make("qwen2", tmp_path, max_position_embeddings=32_768, rope_parameters=yarn, **windows)
        model = ModelDirectory(directory)
        assert model.context == 131_072
        subject, text, first = engine(model, capacity=CAPACITY), words(1, 3 * WINDOW), 40_000
        slots = np.arange(1, len(text) + 1)
        packer = subject.packer()
        rows = packer.add_rows(text, first, slots)
        packer.add_path(np.concatenate([np.zeros(first, np.int64), slots]), rows)
        packer.want(rows[-1])
        got = subject.forward(packer.pack())[0]
        positions = torch.arange(first, first + len(text))[None]
        with torch.inference_mode():
            own = Oracle(directory).model(input_ids=torch.tensor([text]), position_ids=positions, use_cache=False)
        want = own.logits[0, -1].numpy()
        assert np.abs(got - want).max() < TOLERANCE * np.abs(want).max()

    def test_float16_stays_close(self, tmp_path: Path) -> None:
        """With padded batches, as on GPUs."""
        directory = make("gemma2", tmp_path)
        engine = TorchEngine(ModelDirectory(directory), capacity=CAPACITY, dtype="float16", exact=False)
        got, want = last_logits(engine, words(1, 40)), Oracle(directory).logits(words(1, 40))[-1]
        assert got.dtype == np.float32
        assert 1e-5 < np.abs(got - want).max() / np.abs(want).max() < 0.02

    def test_bfloat16_stays_close(self, tmp_path: Path) -> None:
        """Head and logits are float32 nevertheless."""
        directory = make("llama", tmp_path)
        engine = CpuEngine(ModelDirectory(directory), capacity=CAPACITY, dtype="bfloat16")
        got, want = last_logits(engine, words(1, 40)), Oracle(directory).logits(words(1, 40))[-1]
        assert got.dtype == np.float32
        assert len(np.unique(got)) == VOCABULARY  # some would be equal if rounded to bfloat16
        assert 1e-5 < np.abs(got - want).max() / np.abs(want).max() < 0.1
