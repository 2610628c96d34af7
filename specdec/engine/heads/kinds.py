"""Finds the heads in a directory; tensor names determine their kind."""

from __future__ import annotations

from pathlib import Path

from specdec.engine.heads.block_files import BlockFiles, is_block_draft
from specdec.engine.heads.eagle3_files import Eagle3Files, is_eagle3
from specdec.engine.heads.feature_files import FeatureConfig, FeatureFiles
from specdec.engine.heads.files import HeadsFilesError, TargetShape
from specdec.engine.heads.medusa_files import MedusaFiles
from specdec.engine.heads.mtp_files import MtpFiles, is_mtp
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Dtype
from specdec.engine.preflight.memory_needed import MemoryNeeded

HeadsFiles = MedusaFiles | Eagle3Files | BlockFiles | MtpFiles
"""The files of heads, of any kind."""


def kind_in(path: Path) -> type[HeadsFiles]:
    """Return the kind of the heads in a directory or file of weights."""
    if is_mtp(path):
        return MtpFiles
    if is_block_draft(path):
        return BlockFiles
    return Eagle3Files if is_eagle3(path) else MedusaFiles


def heads_in(path: Path, target: TargetShape) -> HeadsFiles:
    """Return the heads in a directory; ModelDirectoryError if they do not fit the target."""
    return kind_in(path).of(path, target)


def feature_heads_in(path: Path, target: TargetShape) -> FeatureFiles[FeatureConfig]:
    """Return the heads in a directory; ModelDirectoryError if they read no features, or do not fit the target."""
    files = heads_in(path, target)
    if isinstance(files, MedusaFiles):
        raise HeadsFilesError(
            f"{path}: has Medusa heads, which read no features: give EAGLE-3 heads, a block draft or an MTP layer"
        )
    return files


def memory_of_features(path: Path, directory: ModelDirectory, dtype: Dtype) -> MemoryNeeded:
    """Return the memory for the fusion in a verifier whose draft services have these heads; ModelDirectoryError if they
    do not fit the target."""
    return feature_heads_in(path, TargetShape.of(directory)).fusion_memory(dtype)


def memory_of_heads(path: Path, kv_tokens: int | None, directory: ModelDirectory, dtype: Dtype) -> MemoryNeeded:
    """Return the memory that heads need beside a target with a KV cache of `kv_tokens` (None: by free memory);
    ModelDirectoryError if they do not fit the target."""
    files = heads_in(path, TargetShape.of(directory))
    return files.memory_needed(dtype) if isinstance(files, MedusaFiles) else files.memory_needed(dtype, kv_tokens)
