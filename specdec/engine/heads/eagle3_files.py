"""Files of EAGLE-3 heads: the two layouts in which they are published.

| Layout | config.json | Tensors |
|---|---|---|
| EAGLE, SpecForge, AngelSlim, NVIDIA | that of a Llama model of one layer | `midlayer.*`, `fc.weight`, `d2t`, ... |
| speculators | `speculators_model_type`: eagle3 | the same with `layers.0.` for `midlayer.` |

Everything is checked by the configuration (`eagle3_config.py`) and the headers of the files before weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.engine.heads.eagle3_config import Eagle3Config
from specdec.engine.heads.files import MAX_LOGITS, HeadsFilesError, Reader, Stored, TargetShape, stored_tensors
from specdec.engine.memory import MIN_SLOTS
from specdec.engine.model_file import in_one_line, read_fields
from specdec.engine.placement import BYTES, Dtype
from specdec.engine.preflight.memory_needed import MemoryNeeded

if TYPE_CHECKING:  # torch takes seconds to import, and headers are read without it
    import torch
    from torch import Tensor

    from specdec.engine.heads.eagle3 import Eagle3Heads, Rotary

MAX_CONTEXT_BYTES = 1 << 26
"""Approximate bytes of keys and values that heads gather from their memory at once: one text's at least."""

LAYER = r"(?:midlayer|layers\.0)\."
PATTERNS: Mapping[str, str] = {
    rf"{LAYER}self_attn\.([qkvo])_proj\.weight": r"\1",
    rf"{LAYER}mlp\.(gate|up|down)_proj\.weight": r"\1",
    rf"{LAYER}input_layernorm\.weight": "embedding_norm",
    rf"{LAYER}hidden_norm\.weight": "hidden_norm",
    rf"{LAYER}post_attention_layernorm\.weight": "mlp_norm",
    r"fc\.weight": "fusion",
    r"input_norm\.weight": "fusion_norm",
    r"fc_norm\.(\d+)\.weight": r"feature_norm \1",
    r"norm\.weight": "last_norm",
    r"lm_head\.weight": "output",
    r"embed_tokens\.weight": "embeddings",
    r"d2t": "d2t",
    r"t2d": "t2d",
}
"""Names of tensors in both layouts, to the parts of heads."""

BUFFER = "rotary_emb.inv_freq"
"""End of the name of a tensor that older files have, and config.json determines."""


def is_eagle3(path: Path) -> bool:
    """Return whether a directory, or a file of weights, has heads of this kind, or means to."""
    return any(tensor.name in ("fc.weight", "d2t") for tensor in stored_tensors(path))


@dataclass(frozen=True)
class Eagle3Files:
    """EAGLE-3 heads in a directory, judged by headers and configuration; their weights are not read yet."""

    path: Path
    config: Eagle3Config
    parts: Mapping[str, Stored]
    target: TargetShape

    @classmethod
    def of(cls, path: Path, target: TargetShape) -> Eagle3Files:
        """Find the heads in a directory, or in a file of weights beside its config.json; ModelDirectoryError, naming
        the field, or the tensor and the sizes, if there are none for this target."""
        folder = path if path.is_dir() else path.parent
        fields = read_fields(folder / "config.json")
        if fields is None:
            raise HeadsFilesError(f"{folder}: has no config.json, which EAGLE-3 heads need")
        found = cls(path, Eagle3Config.of(fields, target), _parts(path), target)
        found._check()
        return found

    def memory_needed(self, dtype: Dtype, kv_tokens: int | None) -> MemoryNeeded:
        """Return the memory of the weights, of the keys and values of `kv_tokens` positions (None: of the fewest), and
        of what is computed at once, beside the target's."""
        shape, width = self.config.shape, BYTES[dtype]
        numbers = sum(stored.numbers for part, stored in self.parts.items() if part not in ("d2t", "t2d"))
        tokens = kv_tokens or MIN_SLOTS
        kv = tokens * 2 * shape.kv_heads * shape.width * width
        working = 2 * MAX_LOGITS * BYTES["float32"] + 2 * min(kv, MAX_CONTEXT_BYTES)
        return MemoryNeeded(f"heads {self.path.name}", dtype, 0, numbers * width, working, tokens, kv)

    def load(
        self, embeddings: Tensor, output: Callable[[Tensor], Tensor], device: str, dtype: torch.dtype
    ) -> Eagle3Heads:
        """Read the weights. `embeddings` [ids, width] and `output`, from states [n, hidden] to logits, are the
        target's, for heads without their own."""
        import torch

        from specdec.engine.heads.eagle3 import Eagle3Heads, Eagle3Weights

        read, parts, shape = Reader(), self.parts, self.config.shape

        def joined(*names: str) -> Tensor:
            return torch.cat([read(parts[name]) for name in names]).to(device, dtype)

        table = joined("embeddings") if "embeddings" in parts else embeddings
        if table.shape[1] != shape.hidden:
            raise HeadsFilesError(
                f"{self.path}: has no embed_tokens.weight, and the target's has {table.shape[1]} columns, must have "
                f"{shape.hidden}"
            )
        feature_norms = None
        if self.config.norm_of_features:
            norms = [joined(f"feature_norm {number}") for number in range(shape.features)]
            feature_norms = torch.stack(norms)
        ids = None
        if "d2t" in parts:
            ids = torch.arange(shape.outputs) + read(parts["d2t"]).to(torch.int64)
            if not 0 <= int(ids.min()) <= int(ids.max()) < self.target.vocabulary:
                raise HeadsFilesError(
                    f"{self.path}: d2t leads to ids from {int(ids.min())} to {int(ids.max())}, must lead to ids from 0 "
                    f"to {self.target.vocabulary - 1}"
                )
        weights = Eagle3Weights(
            fusion=joined("fusion"),
            fusion_norm=joined("fusion_norm") if self.config.norm_before_fusion else None,
            feature_norms=feature_norms,
            embedding_norm=joined("embedding_norm"),
            hidden_norm=joined("hidden_norm"),
            project=joined("q", "k", "v"),
            project_back=joined("o"),
            mlp_norm=joined("mlp_norm"),
            gate_and_up=joined("gate", "up"),
            down=joined("down"),
            last_norm=joined("last_norm"),
            embeddings=table,
            output=joined("output") if "output" in parts else output,
        )
        return Eagle3Heads(
            shape,
            self.config.variant,
            weights,
            self._rotary(device),
            vocabulary=self.target.vocabulary,
            ids=None if ids is None else ids.numpy(),
        )

    def _rotary(self, device: str) -> Rotary:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        from specdec.engine.heads.eagle3 import Rotary

        try:
            made = LlamaRotaryEmbedding(LlamaConfig(**self.config.rotary))
        except Exception as error:  # transformers' errors have no common base
            raise HeadsFilesError(f"{self.path}: config.json: rotary embeddings: {in_one_line(error)}") from error
        if 2 * len(made.inv_freq) != self.config.shape.width:
            raise HeadsFilesError(
                f"{self.path}: config.json: rotary embeddings turn {2 * len(made.inv_freq)} numbers of a head, must "
                f"turn all {self.config.shape.width}"
            )
        return Rotary(made.inv_freq.to(device), float(made.attention_scaling))

    def _check(self) -> None:
        """Raise HeadsFilesError unless all tensors are there, in shapes that fit configuration and target."""
        shape, target, parts = self.config.shape, self.target, self.parts
        hidden, queries, keys = shape.hidden, shape.heads * shape.width, shape.kv_heads * shape.width
        wanted: dict[str, tuple[int, ...]] = {
            "fusion": (hidden, shape.features * shape.stream),
            "embedding_norm": (hidden,),
            "hidden_norm": (hidden,),
            "q": (queries, 2 * hidden),
            "k": (keys, 2 * hidden),
            "v": (keys, 2 * hidden),
            "o": (hidden, queries),
            "mlp_norm": (hidden,),
            "gate": (shape.inner, hidden),
            "up": (shape.inner, hidden),
            "down": (hidden, shape.inner),
            "last_norm": (hidden,),
        }
        if self.config.norm_before_fusion:
            wanted["fusion_norm"] = (shape.features * shape.stream,)
        if self.config.norm_of_features:
            wanted |= {f"feature_norm {number}": (shape.stream,) for number in range(shape.features)}
        if "embeddings" in parts or hidden != target.stream:  # else the target's are used
            wanted["embeddings"] = (target.vocabulary, hidden)
        if "output" in parts or (hidden, shape.outputs) != (target.hidden, target.vocabulary):
            wanted["output"] = (shape.outputs, hidden)
        if "d2t" in parts or shape.outputs != target.vocabulary:
            wanted["d2t"] = (shape.outputs,)
        if "t2d" in parts:
            wanted["t2d"] = (target.vocabulary,)
        for part, size in wanted.items():
            if part not in parts:
                raise HeadsFilesError(f"{self.path}: lacks {tensor_name(part)}, of the shape {list(size)}")
            parts[part].check(
                size,
                f"heads of hidden size {hidden} that read {shape.features} features of a target of hidden size "
                f"{shape.stream} with {target.vocabulary} token ids",
            )
        for part, stored in parts.items():
            if part not in wanted:
                raise HeadsFilesError(f"{stored.file}: {stored.name} is not used by what config.json describes")


def _parts(path: Path) -> dict[str, Stored]:
    """Return the tensors of heads in a directory or file, by what they are; HeadsFilesError, naming it, if one is
    unknown."""
    found: dict[str, Stored] = {}
    for tensor in stored_tensors(path):
        if tensor.name.endswith(BUFFER):
            continue
        for pattern, part in PATTERNS.items():
            if match := re.fullmatch(pattern, tensor.name):
                name = match.expand(part)
                if name in found:
                    raise HeadsFilesError(f"{path}: {found[name].name} and {tensor.name} are the same part")
                found[name] = tensor
                break
        else:
            raise HeadsFilesError(f"{tensor.file}: {tensor.name} is no part of EAGLE-3 heads of one layer")
    return found


def tensor_name(part: str) -> str:
    """Return the name of a part's tensor in EAGLE's layout."""
    kind, _, number = part.partition(" ")
    names = {
        "fusion": "fc.weight",
        "fusion_norm": "input_norm.weight",
        "feature_norm": f"fc_norm.{number}.weight",
        "embedding_norm": "midlayer.input_layernorm.weight",
        "hidden_norm": "midlayer.hidden_norm.weight",
        "mlp_norm": "midlayer.post_attention_layernorm.weight",
        "last_norm": "norm.weight",
        "output": "lm_head.weight",
        "embeddings": "embed_tokens.weight",
    }
    if kind in "qkvo":
        return f"midlayer.self_attn.{kind}_proj.weight"
    if kind in ("gate", "up", "down"):
        return f"midlayer.mlp.{kind}_proj.weight"
    return names.get(kind, kind)
