"""A widened model says what its source says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bench.tools.widen import LABEL, WidenError, parameter_count, widen
from tests import models


@pytest.mark.parametrize(
    "overrides", [{}, {"mlp_bias": True}, {"tie_word_embeddings": True, "num_hidden_layers": 3}], ids=str
)
@torch.inference_mode()
def test_same_logits(tmp_path: Path, overrides: dict[str, Any]) -> None:
    source = models.make("llama", tmp_path / "source", **overrides)
    wide = tmp_path / "wide"
    label = widen(source, wide, 500_000)
    assert label["parameters"] == pytest.approx(500_000, rel=0.05)
    ids = torch.randint(models.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    load = transformers.AutoModelForCausalLM.from_pretrained
    narrow, widened = (load(path, dtype=torch.float32).eval() for path in (source, wide))
    assert widened.num_parameters() == label["parameters"]
    torch.testing.assert_close(widened(ids).logits, narrow(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_copy_is_complete_and_labelled(tmp_path: Path) -> None:
    source = models.make("llama", tmp_path / "source")
    wide = tmp_path / "wide"
    label = widen(source, wide, 500_000)
    assert (wide / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert json.loads((wide / "config.json").read_text())[LABEL] == label
    assert "WIDENED" in (wide / "README.md").read_text()
    with pytest.raises(WidenError, match="already widened"):
        widen(wide, tmp_path / "wider", 1_000_000)


def test_it_never_narrows(tmp_path: Path) -> None:
    source = models.make("llama", tmp_path / "source")
    with pytest.raises(WidenError, match="parameters already"):
        widen(source, tmp_path / "wide", 1_000)


def test_sizes_as_people_write_them() -> None:
    assert [parameter_count(text) for text in ("60M", "1.5B", "1000")] == [60_000_000, 1_500_000_000, 1000]
