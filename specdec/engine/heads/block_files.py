"""Files of block drafts, DFlash and DSpark: the layouts in which z-lab, DeepSpec and speculators publish them.

The tensors have the same names in all layouts. Configuration (`block_config.py`) and file headers are checked before
weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.engine.heads.block_config import BlockConfig, Markov
from specdec.engine.heads.feature_files import COMMON, FeatureFiles, fields_beside, parts_in
from specdec.engine.heads.files import Reader, TargetShape, stored_tensors

if TYPE_CHECKING:  # torch takes seconds to import, and headers are read without it
    import torch
    from torch import Tensor

    from specdec.engine.heads.block import BlockDraft, MarkovWeights
    from specdec.engine.heads.fusion import Fusion

CONTEXT_NORM = "hidden_norm.weight"
"""Tensor name that identifies block drafts: in EAGLE-3 heads, this tensor's name begins with the layer's prefix."""

NAMES: Mapping[str, str] = {
    **COMMON,
    "context_norm": CONTEXT_NORM,
    "norm": "layers.{}.input_layernorm.weight",
    "mlp_norm": "layers.{}.post_attention_layernorm.weight",
    **{part: f"layers.{{}}.self_attn.{part}.weight" for part in ("q_norm", "k_norm")},
    **{part: f"layers.{{}}.self_attn.{part}_proj.weight" for part in "qkvo"},
    **{part: f"layers.{{}}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    "markov_w1": "markov_head.markov_w1.weight",
    "markov_w2": "markov_head.markov_w2.weight",
    "markov_gate": "markov_head.gate_proj.{}",
    "markov_joint": "markov_head.joint_proj.{}",
    "confidence": "confidence_head.proj.{}",
}
"""Part -> name of its tensor; {} stands for the layer's number, or for weight or bias."""


@dataclass(frozen=True)
class BlockFiles(FeatureFiles[BlockConfig]):
    """A block draft in a directory."""

    architecture = "block"

    @classmethod
    def of(cls, path: Path, target: TargetShape) -> BlockFiles:
        """Find the draft in a directory, or in a file of weights beside its config.json; ModelDirectoryError, naming
        the field, or the tensor and the sizes, if there is none for this target."""
        config = BlockConfig.of(fields_beside(path, "block drafts"), target)
        found = cls(path, config, parts_in(stored_tensors(path), [NAMES], "a DFlash or DSpark block draft"), target)
        found._check(found._shapes(), NAMES)
        return found

    def load(
        self, embeddings: Tensor, output: Callable[[Tensor], Tensor], device: str, dtype: torch.dtype
    ) -> BlockDraft:
        import torch

        from specdec.engine.heads.block import BlockDraft, BlockLayer, BlockWeights
        from specdec.engine.heads.decoder_layer import Rotary

        reader, config = Reader(), self.config

        def read(*names: str) -> Tensor:
            return torch.cat([reader(self.parts[name]) for name in names]).to(device, dtype)

        numbers = range(config.shape.layers)
        weights = BlockWeights(
            fusion=self.fusion(device, dtype),
            keys=read(*(f"k {number}" for number in numbers)),
            values=read(*(f"v {number}" for number in numbers)),
            key_norms=torch.stack([read(f"k_norm {number}") for number in numbers]),
            layers=[
                BlockLayer(
                    norm=read(f"norm {number}"),
                    query=read(f"q {number}"),
                    query_norm=read(f"q_norm {number}"),
                    project_back=read(f"o {number}"),
                    mlp_norm=read(f"mlp_norm {number}"),
                    gate_and_up=read(f"gate {number}", f"up {number}"),
                    down=read(f"down {number}"),
                )
                for number in numbers
            ],
            last_norm=read("last_norm"),
            embeddings=self._table(reader, embeddings, device, dtype),
            output=read("output") if "output" in self.parts else output,
            markov=self._markov(read),
            confidence=(read("confidence weight"), read("confidence bias")) if config.variant.confidence else None,
        )
        return BlockDraft(
            config.shape,
            config.variant,
            weights,
            Rotary.of(config.layer.rotary, config.shape.width, self.path, device),
            vocabulary=self.target.vocabulary,
            ids=self._ids(reader),
        )

    def fusion(self, device: str, dtype: torch.dtype) -> Fusion:
        from specdec.engine.heads.fusion import Fusion

        read = Reader()
        product, norm = (read(self.parts[part]).to(device, dtype) for part in ("fusion", "context_norm"))
        return Fusion(product, self.config.variant.epsilon, norm_of_fused=norm)

    def _markov(self, read: Callable[[str], Tensor]) -> MarkovWeights | None:
        from specdec.engine.heads.block import MarkovWeights

        if (kind := self.config.variant.markov) is None:
            return None
        tables = read("markov_w1"), read("markov_w2")
        if kind is Markov.VANILLA:
            return MarkovWeights(*tables)
        joint = "markov_gate" if kind is Markov.GATED else "markov_joint"
        return MarkovWeights(*tables, read(f"{joint} weight"), read(f"{joint} bias"))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parts that configuration and target require."""
        shape, variant = self.config.shape, self.config.variant
        hidden, queries, keys, rank = shape.hidden, shape.heads * shape.width, shape.kv_heads * shape.width, shape.rank
        wanted: dict[str, tuple[int, ...]] = {
            "fusion": (hidden, shape.features * shape.stream),
            "context_norm": (hidden,),
            "last_norm": (hidden,),
        }
        for number in range(shape.layers):
            wanted |= {
                f"norm {number}": (hidden,),
                f"q {number}": (queries, hidden),
                f"k {number}": (keys, hidden),
                f"v {number}": (keys, hidden),
                f"o {number}": (hidden, queries),
                f"q_norm {number}": (shape.width,),
                f"k_norm {number}": (shape.width,),
                f"mlp_norm {number}": (hidden,),
                f"gate {number}": (shape.inner, hidden),
                f"up {number}": (shape.inner, hidden),
                f"down {number}": (hidden, shape.inner),
            }
        if variant.markov is not None:
            wanted |= {"markov_w1": (self.target.vocabulary, rank), "markov_w2": (shape.outputs, rank)}
        if variant.markov is Markov.GATED:
            wanted |= {"markov_gate weight": (rank, hidden + rank), "markov_gate bias": (rank,)}
        if variant.markov is Markov.RNN:
            wanted |= {"markov_joint weight": (3 * rank, 2 * rank + hidden), "markov_joint bias": (3 * rank,)}
        if variant.confidence:
            inputs = hidden + rank if variant.confidence_reads_markov else hidden
            wanted |= {"confidence weight": (1, inputs), "confidence bias": (1,)}
        return wanted | self._shared_shapes(shape.outputs)
