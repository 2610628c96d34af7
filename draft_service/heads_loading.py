"""Loads heads for a draft service: their own files and, from their target, at most its token embeddings and output
head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from draft_service.drafter import FeatureFormat
from draft_service.heads import HeadsDrafter
from specdec.engine.heads.feature_files import FeatureFiles
from specdec.engine.heads.growth import reader_of
from specdec.engine.heads.target_ends import ends_of
from specdec.engine.heads.text_memory import TextMemory
from specdec.engine.hf.pretrained import DTYPES
from specdec.engine.memory import slots_for
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement
from specdec.engine.preflight.dtype import dtype_of
from specdec.engine.shortage import within_gpu_memory
from specdec.serving.identity import identity_for, pod_info
from specdec.v2 import model_pb2


class LoadedHeads(NamedTuple):
    """Heads ready to draft."""

    drafter: HeadsDrafter
    identity: model_pb2.ModelIdentity
    info: model_pb2.PodInfo


def load_heads(files: FeatureFiles[Any], target: ModelDirectory, placement: Placement, threads: int) -> LoadedHeads:
    """Load heads for this target; ModelDirectoryError or UnsupportedModelError, with a one-line reason, if they cannot
    be used."""
    path, shape = files.path, files.target
    config, device, dtype = files.config, placement.device, dtype_of(target, placement)
    torch.set_num_threads(threads)
    with within_gpu_memory(path):
        ends = ends_of(target.path, shape, device, DTYPES[dtype], files.shared_ends)
        heads = files.load(ends.embeddings, ends.logits, device, DTYPES[dtype])
        row = 2 * config.memory_heads * config.layer.sizes.width * DTYPES[dtype].itemsize
        tokens = placement.kv_tokens or slots_for(
            row, target.context, device, working=files.memory_needed(dtype, placement.kv_tokens).working
        )
        memory = TextMemory(tokens, config.memory_heads, config.layer.sizes.width, DTYPES[dtype], torch.device(device))
    features = FeatureFormat(files.fusion_fingerprint(), config.layer.sizes.hidden)
    identity = identity_for(target, tokens)
    identity.model, identity.model_fingerprint = path.resolve().name, files.fingerprint()
    identity.numerics_fingerprint = f"heads-{device.partition(':')[0]}-{dtype}"
    info = pod_info()
    info.device, info.dtype = device, dtype
    info.threads.append(threads)
    return LoadedHeads(HeadsDrafter(reader_of(heads, memory, config.layer.context), features), identity, info)
