"""Fusion, the part of heads that a verifier runs for a draft service, and the ends of a target that the service
reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.heads.files import HeadsFilesError, TargetShape
from specdec.engine.heads.fusion import as_bytes, from_bytes
from specdec.engine.heads.kinds import feature_heads_in
from specdec.engine.heads.target_ends import ends_of
from specdec.engine.model_directory import ModelDirectory
from tests.heads import RandomBlock, RandomEagle3, make_block, make_eagle3, make_heads, written
from tests.models import VOCABULARY, make

TARGET = TargetShape(64, VOCABULARY, 64, 2)

HEADS: dict[str, RandomEagle3 | RandomBlock] = {
    "eagle3": RandomEagle3(),
    "norm over all": RandomEagle3(norm_before_fc=True),
    "norm of each": RandomEagle3(fc_norm=True),
    "dflash": RandomBlock(),
    "dspark": RandomBlock(from_anchor=True, rank=8, confidence=True),
}


def folder_of(path: Path, heads: RandomEagle3 | RandomBlock) -> Path:
    return make_eagle3(path, heads) if isinstance(heads, RandomEagle3) else make_block(path, heads)


@pytest.mark.parametrize("name", HEADS)
def test_it_is_what_the_heads_read(tmp_path: Path, name: str) -> None:
    files = feature_heads_in(folder_of(tmp_path / "heads", HEADS[name]), TARGET)
    embeddings, output = torch.randn(VOCABULARY, 64), torch.randn(VOCABULARY, 64)
    heads = files.load(embeddings, lambda states: states @ output.T, "cpu", torch.float32)
    features = torch.randn(7, len(files.config.layers), 64)
    fusion = files.fusion("cpu", torch.float32)
    assert torch.equal(fusion(features), heads.fused(features))
    assert fusion.width == files.config.layer.sizes.hidden


def changed(heads: RandomEagle3 | RandomBlock, path: Path, name: str) -> Path:
    """Write heads with one changed tensor."""
    tensors = heads.tensors()
    tensors[name] = tensors[name] + 1.0
    return written(path, tensors, heads.eagle() if isinstance(heads, RandomEagle3) else heads.z_lab())


@pytest.mark.parametrize(("heads", "own", "other"), [
    (RandomEagle3(), "fc.weight", "midlayer.mlp.up_proj.weight"),
    (RandomBlock(), "hidden_norm.weight", "norm.weight"),
])  # fmt: skip
def test_its_fingerprint_is_of_all_that_decides_it(tmp_path: Path, heads: Any, own: str, other: str) -> None:
    first = feature_heads_in(folder_of(tmp_path / "first", heads), TARGET)
    fed_alike = feature_heads_in(changed(heads, tmp_path / "other", other), TARGET)
    fed_otherwise = feature_heads_in(changed(heads, tmp_path / "own", own), TARGET)
    assert first.fusion_fingerprint() == fed_alike.fusion_fingerprint() != fed_otherwise.fusion_fingerprint()
    assert len({files.fingerprint() for files in (first, fed_alike, fed_otherwise)}) == 3


def test_other_layers_are_other_features(tmp_path: Path) -> None:
    found = set()
    for layers in ((0, 1, 1), (0, 0, 1)):
        path = make_eagle3(tmp_path / str(layers), replace(RandomEagle3(), layers=layers))
        found.add(feature_heads_in(path, TARGET).fusion_fingerprint())
    assert len(found) == 2


def test_medusa_heads_read_none(tmp_path: Path) -> None:
    with pytest.raises(HeadsFilesError, match="Medusa heads, which read no features"):
        feature_heads_in(make_heads(tmp_path / "heads"), TARGET)


@given(st.integers(1, 9), st.integers(1, 17), st.sampled_from([torch.float32, torch.bfloat16]))
def test_rows_are_sent_as_bfloat16(rows: int, width: int, dtype: torch.dtype) -> None:
    fused = torch.randn(rows, width).to(dtype)
    values = as_bytes(fused)
    assert len(values) == 2 * rows * width
    assert torch.equal(from_bytes(values, width), fused.to(torch.bfloat16))


@pytest.mark.parametrize("values", [b"", b"1", b"123456"])
def test_rows_that_are_not_whole_are_refused(values: bytes) -> None:
    with pytest.raises(ValueError, match="must have rows of 4 bytes"):
        from_bytes(values, 2)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2", "opt"])
def test_the_ends_of_a_target_are_those_that_its_engine_has(tmp_path: Path, family: str) -> None:
    directory = ModelDirectory(make(family, tmp_path / family))
    engine = CpuEngine(directory, capacity=256, exact=False)
    ends = ends_of(directory.path, TargetShape.of(directory), "cpu", torch.float32)
    assert torch.equal(ends.embeddings, engine.token_embeddings())
    states: Tensor = torch.randn(3, TargetShape.of(directory).hidden)
    assert torch.allclose(ends.logits(states), engine.output_head(states), atol=1e-5)


def test_embeddings_that_are_no_matrix_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", {"model.embed_tokens.weight": torch.zeros(12)})
    with pytest.raises(HeadsFilesError, match=r"model.embed_tokens.weight has the shape \[12\], must be a matrix"):
        ends_of(folder, TARGET, "cpu", torch.float32)


def test_an_end_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", {"other.weight": torch.zeros(3, 4)})
    with pytest.raises(HeadsFilesError, match=r"none as token embeddings, must have one tensor named \*\.embed_tokens"):
        ends_of(folder, TARGET, "cpu", torch.float32)
