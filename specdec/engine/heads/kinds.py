"""Finds the heads in a directory; tensor names determine their kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specdec.engine.heads.block_files import CONTEXT_NORM, BlockFiles
from specdec.engine.heads.eagle3_files import IDENTIFYING, Eagle3Files
from specdec.engine.heads.feature_files import FeatureConfig, FeatureFiles
from specdec.engine.heads.files import HeadsFilesError, TargetShape, stored_tensors
from specdec.engine.heads.medusa_files import MedusaFiles
from specdec.engine.heads.mtp_files import PRODUCT, MtpFiles
from specdec.engine.heads.target_ends import StoredEnds
from specdec.engine.memory import MIN_SLOTS, slots_wanted, slots_within
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import BYTES, Dtype, Placement
from specdec.engine.preflight.dtype import dtype_of
from specdec.engine.preflight.memory_needed import TORCH_PROCESS, MemoryNeeded

HeadsFiles = MedusaFiles | Eagle3Files | BlockFiles | MtpFiles
"""The files of heads, of any kind."""


def kind_in(path: Path) -> type[HeadsFiles]:
    """Return the kind of the heads, complete or not, in a directory or file of weights."""
    names = {tensor.name for tensor in stored_tensors(path)}
    if any(map(PRODUCT.fullmatch, names)):
        return MtpFiles
    if CONTEXT_NORM in names:
        return BlockFiles
    return MedusaFiles if names.isdisjoint(IDENTIFYING) else Eagle3Files


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


def memory_of_features(path: Path, directory: ModelDirectory, dtype: Dtype, kv_tokens: int | None) -> MemoryNeeded:
    """Return the memory that a verifier needs for the fusion of these heads, which run in draft services;
    ModelDirectoryError if they do not fit the target. `kv_tokens` has no effect; `Beside` (`preflight/check.py`)
    requires it."""
    return feature_heads_in(path, TargetShape.of(directory)).fusion_memory(dtype)


def memory_of_heads(path: Path, directory: ModelDirectory, dtype: Dtype, kv_tokens: int | None) -> MemoryNeeded:
    """Return the memory that heads need beside a target with a KV cache of `kv_tokens` (None: the minimum);
    ModelDirectoryError if they do not fit the target."""
    return heads_in(path, TargetShape.of(directory)).memory_needed(dtype, kv_tokens)


def memory_of_draft_heads(
    path: Path, target: ModelDirectory, placement: Placement, free: int | None = None
) -> MemoryNeeded:
    """Return the memory that a draft service with these heads needs, including the target's embeddings and output head
    if the heads lack their own; ModelDirectoryError if they do not fit the target. `free`: as in `memory_needed`."""
    shape = TargetShape.of(target)
    files, dtype, device = feature_heads_in(path, shape), dtype_of(target, placement), placement.device
    ends = BYTES[dtype] * StoredEnds.of(target.path, shape, files.shared_ends).numbers
    process = TORCH_PROCESS if device == "cpu" else 0
    needed = files.memory_needed(dtype, placement.kv_tokens)
    if free is not None and placement.kv_tokens is None:
        rest, slot = free - process - needed.weights - ends, needed.kv // needed.tokens
        tokens = slots_within(rest, slot, slots_wanted(target.context, device), needed.working, 0)
        needed = files.memory_needed(dtype, max(MIN_SLOTS, tokens))
    return replace(needed, process=process, weights=needed.weights + ends)
