"""Files of EAGLE-3 heads: the two layouts in which they are published.

| Layout | config.json | Tensors |
|---|---|---|
| EAGLE, SpecForge, AngelSlim, NVIDIA | that of a Llama model of one layer | `midlayer.*`, `fc.weight`, `d2t`, ... |
| speculators | `speculators_model_type`: eagle3 | the same with `layers.0.` for `midlayer.` |

Everything is checked by the configuration (`eagle3_config.py`) and the headers of the files before weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.engine.heads.eagle3_config import Eagle3Config
from specdec.engine.heads.feature_files import COMMON, FeatureFiles, parts_in
from specdec.engine.heads.files import HeadsFilesError, Reader, TargetShape, stored_tensors
from specdec.engine.model_file import read_fields

if TYPE_CHECKING:  # torch takes seconds to import, and headers are read without it
    import torch
    from torch import Tensor

    from specdec.engine.heads.eagle3 import Eagle3Heads

LAYER = r"(?:midlayer|layers\.0)\."
PATTERNS: Mapping[str, str] = {
    rf"{LAYER}self_attn\.([qkvo])_proj\.weight": r"\1",
    rf"{LAYER}mlp\.(gate|up|down)_proj\.weight": r"\1",
    rf"{LAYER}input_layernorm\.weight": "embedding_norm",
    rf"{LAYER}hidden_norm\.weight": "hidden_norm",
    rf"{LAYER}post_attention_layernorm\.weight": "mlp_norm",
    r"input_norm\.weight": "fusion_norm",
    r"fc_norm\.(\d+)\.weight": r"feature_norm \1",
    **COMMON,
}
"""Names of tensors in both layouts, to the parts of heads."""


def is_eagle3(path: Path) -> bool:
    """Return whether a directory, or a file of weights, has heads of this kind, or means to."""
    return any(tensor.name in ("fc.weight", "d2t") for tensor in stored_tensors(path))


@dataclass(frozen=True)
class Eagle3Files(FeatureFiles[Eagle3Config]):
    """EAGLE-3 heads in a directory."""

    architecture = "eagle3"

    @classmethod
    def of(cls, path: Path, target: TargetShape) -> Eagle3Files:
        """Find the heads in a directory, or in a file of weights beside its config.json; ModelDirectoryError, naming
        the field, or the tensor and the sizes, if there are none for this target."""
        folder = path if path.is_dir() else path.parent
        fields = read_fields(folder / "config.json")
        if fields is None:
            raise HeadsFilesError(f"{folder}: has no config.json, which EAGLE-3 heads need")
        config = Eagle3Config.of(fields, target)
        found = cls(path, config, parts_in(path, PATTERNS, "EAGLE-3 heads of one layer"), target)
        found._check(found._shapes(), tensor_name)
        return found

    def load(
        self, embeddings: Tensor, output: Callable[[Tensor], Tensor], device: str, dtype: torch.dtype
    ) -> Eagle3Heads:
        import torch

        from specdec.engine.heads.decoder_layer import Rotary
        from specdec.engine.heads.eagle3 import Eagle3Heads, Eagle3Weights

        read, parts, config = Reader(), self.parts, self.config

        def joined(*names: str) -> Tensor:
            return torch.cat([read(parts[name]) for name in names]).to(device, dtype)

        feature_norms = None
        if config.norm_of_features:
            feature_norms = torch.stack([joined(f"feature_norm {number}") for number in range(config.shape.features)])
        weights = Eagle3Weights(
            fusion=joined("fusion"),
            fusion_norm=joined("fusion_norm") if config.norm_before_fusion else None,
            feature_norms=feature_norms,
            embedding_norm=joined("embedding_norm"),
            hidden_norm=joined("hidden_norm"),
            project=joined("q", "k", "v"),
            project_back=joined("o"),
            mlp_norm=joined("mlp_norm"),
            gate_and_up=joined("gate", "up"),
            down=joined("down"),
            last_norm=joined("last_norm"),
            embeddings=self._table(read, embeddings, device, dtype),
            output=joined("output") if "output" in parts else output,
        )
        return Eagle3Heads(
            config.shape,
            config.variant,
            weights,
            Rotary.of(config.layer.rotary, config.shape.width, self.path, device),
            vocabulary=self.target.vocabulary,
            ids=self._ids(read),
        )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the parts that configuration and target want, and their shapes."""
        shape = self.config.shape
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
        return wanted | self._shared_shapes(shape.outputs)


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
