"""Medusa heads with random weights, in vLLM's layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.models import VOCABULARY

HIDDEN = 64
"""Hidden size of all models of `tests.models`."""


def make_heads(folder: Path, *, heads: int = 3, hidden: int = HIDDEN, vocabulary: int = VOCABULARY) -> Path:
    """Write `heads` heads of one block with output heads of their own; return the folder."""
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for number in range(heads):
        tensors[f"blocks.{number}.layers.0.weight"] = torch.randn(hidden, hidden, generator=random) / hidden
        tensors[f"lm_heads.{number}.weight"] = torch.randn(vocabulary, hidden, generator=random)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa", "num_heads": heads}))
    return folder
