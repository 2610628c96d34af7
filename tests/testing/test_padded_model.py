"""A padded model's logits equal its source's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from testing.padded_model import LABEL, PaddingError, pad_model
from tests import models


@pytest.mark.parametrize(
    "overrides", [{}, {"mlp_bias": True}, {"tie_word_embeddings": True, "num_hidden_layers": 3}], ids=str
)
@torch.inference_mode()
def test_same_logits(tmp_path: Path, overrides: dict[str, Any]) -> None:
    source = models.make("llama", tmp_path / "source", **overrides)
    padded = tmp_path / "padded"
    label = pad_model(source, padded, 500_000)
    assert label["parameters"] == pytest.approx(500_000, rel=0.05)
    ids = torch.randint(models.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    load = transformers.AutoModelForCausalLM.from_pretrained
    plain, enlarged = (load(path, dtype=torch.float32).eval() for path in (source, padded))
    assert enlarged.num_parameters() == label["parameters"]
    torch.testing.assert_close(enlarged(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_copy_is_complete_and_labelled(tmp_path: Path) -> None:
    source = models.make("llama", tmp_path / "source")
    padded = tmp_path / "padded"
    label = pad_model(source, padded, 500_000)
    assert (padded / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert json.loads((padded / "config.json").read_text())[LABEL] == label
    assert "PADDED" in (padded / "README.md").read_text()
    with pytest.raises(PaddingError, match="already padded"):
        pad_model(padded, tmp_path / "more", 1_000_000)


def test_it_never_shrinks(tmp_path: Path) -> None:
    source = models.make("llama", tmp_path / "source")
    with pytest.raises(PaddingError, match="parameters already"):
        pad_model(source, tmp_path / "padded", 1_000)
