"""Files of EAGLE-3 heads: the two layouts in which they are published.

| Layout | config.json | Tensors |
|---|---|---|
| EAGLE, SpecForge, AngelSlim, NVIDIA | fields of a one-layer Llama model | `midlayer.*`, `fc.weight`, `d2t`, ... |
| speculators | `speculators_model_type`: eagle3 | the same with `layers.0.` instead of `midlayer.` |

Configuration (`eagle3_config.py`) and file headers are checked before weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.engine.heads.eagle3_config import Eagle3Config
from specdec.engine.heads.feature_files import COMMON, FeatureFiles, fields_beside, parts_in
from specdec.engine.heads.files import Reader, TargetShape, stored_tensors

if TYPE_CHECKING:  # torch takes seconds to import, and headers are read without it
    import torch
    from torch import Tensor

    from specdec.engine.heads.eagle3 import Eagle3Heads
    from specdec.engine.heads.fusion import Fusion


def _names(layer: str) -> Mapping[str, str]:
    """Return part -> tensor name for a decoder layer of this name; {} stands for a number."""
    return {
        **COMMON,
        **{part: f"{layer}.self_attn.{part}_proj.weight" for part in "qkvo"},
        **{part: f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
        "embedding_norm": f"{layer}.input_layernorm.weight",
        "hidden_norm": f"{layer}.hidden_norm.weight",
        "mlp_norm": f"{layer}.post_attention_layernorm.weight",
        "fusion_norm": "input_norm.weight",
        "feature_norm": "fc_norm.{}.weight",
    }


NAMES, OTHER_NAMES = _names("midlayer"), _names("layers.0")
"""Part -> tensor name, in EAGLE's layout and in speculators'."""


IDENTIFYING = frozenset({"fc.weight", "d2t"})
"""EAGLE-3 heads have at least one of these tensors, Medusa heads have none."""


@dataclass(frozen=True)
class Eagle3Files(FeatureFiles[Eagle3Config]):
    """EAGLE-3 heads in a directory."""

    architecture = "eagle3"

    @classmethod
    def of(cls, path: Path, target: TargetShape) -> Eagle3Files:
        """Find the heads in a directory, or in a file of weights beside its config.json; ModelDirectoryError, naming
        the field, or the tensor and the sizes, if there are none for this target."""
        config = Eagle3Config.of(fields_beside(path, "EAGLE-3 heads"), target)
        found = cls(
            path, config, parts_in(stored_tensors(path), [NAMES, OTHER_NAMES], "EAGLE-3 heads of one layer"), target
        )
        found._check(found._shapes(), NAMES)
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

        weights = Eagle3Weights(
            fusion=self.fusion(device, dtype),
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

    def fusion(self, device: str, dtype: torch.dtype) -> Fusion:
        import torch

        from specdec.engine.heads.fusion import Fusion

        read, parts, config = Reader(), self.parts, self.config
        of_each = None
        if config.norm_of_features:
            norms = [read(parts[f"feature_norm {number}"]) for number in range(config.shape.features)]
            of_each = torch.stack(norms).to(device, dtype)
        return Fusion(
            read(parts["fusion"]).to(device, dtype),
            config.variant.epsilon,
            norm_of_each=of_each,
            norm_of_all=read(parts["fusion_norm"]).to(device, dtype) if config.norm_before_fusion else None,
        )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parts that configuration and target require."""
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
