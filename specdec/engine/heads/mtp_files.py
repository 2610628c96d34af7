"""Files of heads for multi-token prediction (MTP): a decoder layer stored in a checkpoint after the model's own layers.

| Layout | Tensors |
|---|---|
| DeepSeek's, GLM's | `model.layers.{N}.*`, for a model of N layers: `eh_proj.weight`, `enorm.weight`, ... |
| Mellum's | `mtp.*`: `mtp.fc.weight`, `mtp.pre_fc_norm_hidden.weight`, ..., `mtp.layers.0.*` |

The heads are in the model's own directory. Configuration and file headers are checked before weights are read; tensors
that depend on the architecture (those of experts) are checked when the layer is loaded (`mtp.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.engine.heads.feature_files import FeatureFiles, fields_beside
from specdec.engine.heads.files import MAX_SIZE, HeadsFilesError, Reader, Stored, TargetShape, stored_tensors
from specdec.engine.heads.layer_config import LayerConfig
from specdec.engine.model_file import Fields

if TYPE_CHECKING:  # torch takes seconds to import, and headers are read without it
    import torch
    from torch import Tensor

    from specdec.engine.heads.fusion import Fusion
    from specdec.engine.heads.mtp import MtpHeads

LAYER_COUNTS = "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"
"""Fields of config.json with the number of MTP layers."""

WINDOW = "sliding_window"
"""Field with the number of positions that a row sees in a layer with sliding attention."""

NAMES: Mapping[str, str] = {
    "fusion": "eh_proj.weight",
    "fusion_norm": "hnorm.weight",
    "embedding_norm": "enorm.weight",
    "last_norm": "shared_head.norm.weight",
    "layer": "{}",
}
"""Part -> tensor name without the prefix `model.layers.{N}.`; `layer`: the tensors of the decoder layer."""

OTHER_NAMES: Mapping[str, str] = {
    "fusion": "fc.weight",
    "fusion_norm": "pre_fc_norm_hidden.weight",
    "embedding_norm": "pre_fc_norm_embedding.weight",
    "last_norm": "norm.weight",
    "layer": "layers.0.{}",
}
"""Part -> tensor name without the prefix `mtp.`."""

LAYER = "layer "
"""Prefix of part names for the decoder layer's tensors; the tensor's name follows."""

PRODUCT = re.compile(r"((?:model\.)?layers\.(\d+)\.)eh_proj\.weight|(mtp\.)fc\.weight")
"""Name of the weight of eh_proj or mtp.fc, the projection that only MTP layers have. The first group, or else the
third, is the prefix of all the layer's tensors; the second group is the layer's number."""

SHARED = frozenset({"embed_tokens.weight", "shared_head.head.weight"})
"""Names of copies of the target's ends. The copies are not read."""


@dataclass(frozen=True)
class MtpConfig:
    """The configuration of an MTP layer, from its model's config.json."""

    layer: LayerConfig
    layers: tuple[int]  # features that it reads: the states after the target's last norm
    hidden_first: bool  # its product reads the target's state first, then the token

    @classmethod
    def of(cls, config: Fields, target: TargetShape) -> MtpConfig:
        """Read the configuration of an MTP layer for a target; ModelDirectoryError, naming the field, if it does not
        fit."""
        for name in LAYER_COUNTS:
            if config.integer(name, 0, MAX_SIZE, default=1) != 1:
                raise config.refusal(name, "1: other numbers of MTP layers are not supported")
        if config.has("quantization_config"):
            raise config.refusal("quantization_config", "left out: an MTP layer with quantised weights is not read")
        layer = LayerConfig.of(config, target)
        if layer.sizes.hidden != target.hidden:
            raise config.refusal("hidden_size", f"{target.hidden}, that of the target's output head")
        if _slides(config):
            layer = replace(layer, context=min(layer.context, config.integer(WINDOW, 1, MAX_SIZE)))
        return cls(layer, (target.layers,), config.flag("mtp_hidden_states_first", default=False))

    @property
    def memory_heads(self) -> int:
        """KV heads per row of the text memory."""
        return self.layer.sizes.kv_heads


def _slides(config: Fields) -> bool:
    """Return whether the MTP layer has a sliding window according to config.json."""
    if not config.has(WINDOW) or not config.flag("use_sliding_window", default=True):
        return False
    types = config.content.get("mtp_layer_types")
    return types is None or types == ["sliding_attention"]


@dataclass(frozen=True)
class MtpFiles(FeatureFiles[MtpConfig]):
    """An MTP layer in a model's directory."""

    architecture = "mtp"

    @classmethod
    def of(cls, path: Path, target: TargetShape) -> MtpFiles:
        """Find the layer in the directory of a target; ModelDirectoryError, naming the field, or the tensor and the
        sizes, if there is none for this target."""
        config = MtpConfig.of(fields_beside(path, "MTP layers"), target)
        parts, names = _parts(path, target)
        found = cls(path, config, parts, target)
        found._check(found._shapes(), names)
        return found

    def load(self, embeddings: Tensor, output: Callable[[Tensor], Tensor], device: str, dtype: torch.dtype) -> MtpHeads:
        from specdec.engine.heads.mtp import MtpHeads, MtpWeights, loaded_layer

        read, epsilon = Reader(), self.config.layer.epsilon
        of_layer = {
            part.removeprefix(LAYER): read(stored) for part, stored in self.parts.items() if part.startswith(LAYER)
        }
        fields = fields_beside(self.path, "MTP layers")
        layer = loaded_layer(self.path, fields, of_layer, epsilon, device=device, dtype=dtype)
        weights = MtpWeights(
            token_half=self._halves(read)[0].to(device, dtype),
            embedding_norm=read(self.parts["embedding_norm"]).to(device, dtype),
            last_norm=read(self.parts["last_norm"]).to(device, dtype),
            embeddings=self._table(read, embeddings, device, dtype),
            output=output,
        )
        return MtpHeads(layer, self.fusion(device, dtype), weights, vocabulary=self.target.vocabulary)

    def fusion(self, device: str, dtype: torch.dtype) -> Fusion:
        from specdec.engine.heads.fusion import Fusion

        read = Reader()
        return Fusion(
            self._halves(read)[1].to(device, dtype),
            self.config.layer.epsilon,
            norm_of_all=read(self.parts["fusion_norm"]).to(device, dtype),
        )

    def _halves(self, read: Reader) -> tuple[Tensor, Tensor]:
        """Return the halves [d, d] of the product that read the token and the target's state, in this order."""
        first, second = read(self.parts["fusion"]).chunk(2, dim=1)
        return (second, first) if self.config.hidden_first else (first, second)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parts, as required by configuration and target. Of the decoder layer's tensors, only
        those of attention and its norm are checked here, since all architectures share their names."""
        layer = self.config.layer.sizes
        hidden, queries, keys = layer.hidden, layer.heads * layer.width, layer.kv_heads * layer.width
        wanted = {part: stored.shape for part, stored in self.parts.items() if part.startswith(LAYER)}
        return wanted | {
            "fusion": (hidden, 2 * hidden),
            "fusion_norm": (hidden,),
            "embedding_norm": (hidden,),
            "last_norm": (hidden,),
            "layer input_layernorm.weight": (hidden,),
            "layer self_attn.q_proj.weight": (queries, hidden),
            "layer self_attn.k_proj.weight": (keys, hidden),
            "layer self_attn.v_proj.weight": (keys, hidden),
            "layer self_attn.o_proj.weight": (hidden, queries),
        }


def _parts(path: Path, target: TargetShape) -> tuple[dict[str, Stored], Mapping[str, str]]:
    """Return part -> tensor for the MTP layer, and part -> tensor name; HeadsFilesError unless there is one MTP layer,
    whose number, if any, follows the target's last."""
    stored = stored_tensors(path)
    products = [match for tensor in stored if (match := PRODUCT.fullmatch(tensor.name))]
    if len(products) != 1:
        listed = " and ".join(match[0] for match in products) or "neither eh_proj.weight nor mtp.fc.weight"
        raise HeadsFilesError(f"{path}: has {listed}, must have one MTP layer")
    (product,) = products
    begin, kinds = (product[1], NAMES) if product[1] else (product[3], OTHER_NAMES)
    if product[2] is not None and int(product[2]) != target.layers:
        raise HeadsFilesError(
            f"{path}: {product[0]} must belong to layer {target.layers}, the one after the target's last"
        )
    names = {part: begin + name for part, name in kinds.items()}
    of_layer = begin + kinds["layer"].removesuffix("{}")
    alone = {name: part for part, name in names.items() if part != "layer"}
    found: dict[str, Stored] = {}
    for tensor in stored:
        if tensor.name in alone:
            found[alone[tensor.name]] = tensor
        elif tensor.name.removeprefix(begin) in SHARED or not tensor.name.startswith(begin):
            continue
        elif tensor.name.startswith(of_layer):
            found[f"{LAYER}{tensor.name.removeprefix(of_layer)}"] = tensor
        else:
            raise HeadsFilesError(f"{tensor.file}: {tensor.name} is no part of an MTP layer")
    return found, names
