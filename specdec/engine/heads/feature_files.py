"""Files of heads that read the target's features: the code that EAGLE-3 heads, block drafts and MTP layers share."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from specdec.engine.heads.files import HeadsFilesError, Reader, Stored, TargetShape
from specdec.engine.heads.layer_config import LayerConfig
from specdec.engine.memory import MIN_SLOTS
from specdec.engine.model_file import Fields, add_sample, read_fields
from specdec.engine.placement import BYTES, Dtype
from specdec.engine.preflight.memory_needed import MemoryNeeded

if TYPE_CHECKING:  # torch takes seconds to import, and headers are read without it
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from specdec.engine.heads.fusion import Fusion

MAX_CONTEXT_BYTES, MAX_FEATURE_LOGITS = 1 << 27, 1 << 24
"""Approximate limits on a pass, which has at least one text: bytes of keys and values gathered from memory, and number
of logits. Further texts need another pass, which reads all weights again. With 150,000 token ids, 13 texts fit."""

BUFFER = "rotary_emb.inv_freq"
"""Name suffix of an ignored tensor in older files. Its contents follow from config.json."""

COMMON: Mapping[str, str] = {
    "fusion": "fc.weight",
    "last_norm": "norm.weight",
    "output": "lm_head.weight",
    "embeddings": "embed_tokens.weight",
    "d2t": "d2t",
    "t2d": "t2d",
}
"""Part -> tensor name, for parts common to several kinds of heads."""


FUSION = frozenset({"context_norm", "feature_norm", "fusion", "fusion_norm"})
"""Kinds of parts that the fusion of features consists of."""


class FeatureConfig(Protocol):
    """The configuration of heads that read features."""

    @property
    def layer(self) -> LayerConfig: ...

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs they read as features."""

    @property
    def memory_heads(self) -> int:
        """KV heads of a row in the memory."""


Config = TypeVar("Config", bound=FeatureConfig, covariant=True)


@dataclass(frozen=True)
class FeatureFiles(ABC, Generic[Config]):
    """Heads in a directory, known from headers and configuration; their weights are not read yet. `parts`: part ->
    tensor."""

    architecture: ClassVar[str]

    path: Path
    config: Config
    parts: Mapping[str, Stored]
    target: TargetShape

    @abstractmethod
    def load(self, embeddings: Tensor, output: Callable[[Tensor], Tensor], device: str, dtype: torch.dtype) -> Any:
        """Read the weights. Heads without their own embeddings or output head use the target's `embeddings` [ids,
        width] and `output`, a function from states [n, hidden] to logits."""

    @abstractmethod
    def fusion(self, device: str, dtype: torch.dtype) -> Fusion:
        """Read the weights of the fusion alone."""

    @property
    def shared_ends(self) -> frozenset[str]:
        """Parts of the target that replace missing parts of the heads: "embeddings", "output"."""
        return frozenset({"embeddings", "output"} - self.parts.keys())

    def fusion_fingerprint(self) -> str:
        """Return the SHA-256, in hex, of everything that affects the fusion of a target's features."""
        import torch

        fusion = self.fusion("cpu", torch.float32)
        digest = _digest_of([self.architecture, self.config.layers, fusion.epsilon])
        for name in ("product", "norm_of_each", "norm_of_all", "norm_of_fused"):
            if (weight := getattr(fusion, name)) is not None:
                digest.update(name.encode())
                digest.update(weight.contiguous().numpy().data)
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Return the SHA-256, in hex, of configuration and weights (see `add_sample`)."""
        digest = _digest_of(fields_beside(self.path, "heads").content)
        for file in sorted({stored.file for stored in self.parts.values()}):
            add_sample(digest, file)
        return digest.hexdigest()

    def memory_needed(self, dtype: Dtype, kv_tokens: int | None) -> MemoryNeeded:
        """Return the memory needed beside the target's: weights, keys and values of `kv_tokens` positions (None: the
        minimum), and a pass's working memory."""
        numbers = sum(stored.numbers for part, stored in self.parts.items() if part not in ("d2t", "t2d"))
        tokens = kv_tokens or MIN_SLOTS
        kv = tokens * 2 * self.config.memory_heads * self.config.layer.sizes.width * BYTES[dtype]
        working = 2 * MAX_FEATURE_LOGITS * BYTES["float32"] + 2 * min(kv, MAX_CONTEXT_BYTES)
        return MemoryNeeded(f"heads {self.path.name}", dtype, 0, numbers * BYTES[dtype], working, tokens, kv)

    def fusion_memory(self, dtype: Dtype) -> MemoryNeeded:
        """Return the memory that the fusion alone needs beside the target's."""
        numbers = sum(stored.numbers for part, stored in self.parts.items() if part.split()[0] in FUSION)
        return MemoryNeeded(f"features for {self.path.name}", dtype, 0, numbers * BYTES[dtype], 0, 0, 0)

    def _table(self, reader: Reader, embeddings: Tensor, device: str, dtype: torch.dtype) -> Tensor:
        """Return the heads' token embeddings, else the target's; HeadsFilesError if these have another width."""
        if "embeddings" in self.parts:
            return reader(self.parts["embeddings"]).to(device, dtype)
        if embeddings.shape[1] != self.config.layer.sizes.hidden:
            raise HeadsFilesError(
                f"{self.path}: has no embed_tokens.weight, and the target's has {embeddings.shape[1]} columns, must "
                f"have {self.config.layer.sizes.hidden}"
            )
        return embeddings

    def _ids(self, reader: Reader) -> NDArray[Any] | None:
        """Return the token id of each output: its number plus its difference in `d2t`; None without this tensor.
        HeadsFilesError if an id is outside the target's vocabulary."""
        import torch

        if "d2t" not in self.parts:
            return None
        differences = reader(self.parts["d2t"]).to(torch.int64)
        ids = torch.arange(len(differences)) + differences
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.target.vocabulary:
            raise HeadsFilesError(
                f"{self.path}: d2t gives ids from {int(ids.min())} to {int(ids.max())}, must give ids from 0 to "
                f"{self.target.vocabulary - 1}"
            )
        return ids.numpy()

    def _shared_shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of embeddings, output head and id maps, except absent ones that the target provides."""
        hidden, target, parts = self.config.layer.sizes.hidden, self.target, self.parts
        wanted: dict[str, tuple[int, ...]] = {}
        if "embeddings" in parts or hidden != target.stream:
            wanted["embeddings"] = (target.vocabulary, hidden)
        if "output" in parts or (hidden, outputs) != (target.hidden, target.vocabulary):
            wanted["output"] = (outputs, hidden)
        if "d2t" in parts or outputs != target.vocabulary:
            wanted["d2t"] = (outputs,)
        if "t2d" in parts:
            wanted["t2d"] = (target.vocabulary,)
        return wanted

    def _check(self, wanted: Mapping[str, tuple[int, ...]], names: Mapping[str, str]) -> None:
        """Raise HeadsFilesError unless exactly the wanted parts are present, with these shapes. `names`: as in
        `tensor_name`."""
        target, config = self.target, self.config
        for part, size in wanted.items():
            if part not in self.parts:
                raise HeadsFilesError(f"{self.path}: lacks {tensor_name(part, names)}, of the shape {list(size)}")
            self.parts[part].check(
                size,
                f"heads of hidden size {config.layer.sizes.hidden} that read {len(config.layers)} features of a target "
                f"of hidden size {target.stream} with {target.vocabulary} token ids",
            )
        for part, stored in self.parts.items():
            if part not in wanted:
                raise HeadsFilesError(
                    f"{stored.file}: {stored.name} is unexpected: heads of this config.json have no such tensor"
                )


def _digest_of(fields: object) -> hashlib._Hash:
    """Return a SHA-256 that begins with these fields."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode())


def fields_beside(path: Path, kind: str) -> Fields:
    """Return the configuration of heads in a directory, or beside their file of weights; HeadsFilesError if there is
    none. `kind`: kind of heads, for the message."""
    folder = path if path.is_dir() else path.parent
    fields = read_fields(folder / "config.json")
    if fields is None:
        raise HeadsFilesError(f"{folder}: has no config.json, which {kind} need")
    return fields


def tensor_name(part: str, names: Mapping[str, str]) -> str:
    """Return the name of a part's tensor. `names`: kind of part -> tensor name, where {} stands for the rest of the
    part's name: `q 3` is the tensor `q` of layer 3."""
    kind, _, place = part.partition(" ")
    return names[kind].format(place)


def parts_in(tensors: Sequence[Stored], layouts: Sequence[Mapping[str, str]], kind: str) -> dict[str, Stored]:
    """Return part -> tensor for the tensors of heads; HeadsFilesError, naming the tensor, if one is unknown. `layouts`:
    names as in `tensor_name`; `kind`: kind of heads, for the message."""
    patterns = {
        re.escape(name).replace(r"\{\}", r"(\d+|weight|bias)"): part
        for names in layouts
        for part, name in names.items()
    }
    found: dict[str, Stored] = {}
    for tensor in tensors:
        if tensor.name.endswith(BUFFER):
            continue
        for pattern, part in patterns.items():
            if match := re.fullmatch(pattern, tensor.name):
                name = " ".join([part, *match.groups()])
                if name in found:
                    raise HeadsFilesError(f"{tensor.file}: {found[name].name} and {tensor.name} are the same part")
                found[name] = tensor
                break
        else:
            raise HeadsFilesError(f"{tensor.file}: {tensor.name} is no part of {kind}")
    return found
