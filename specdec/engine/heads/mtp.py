"""Heads for multi-token prediction (MTP): one decoder layer of the target's own architecture, trained with the target.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv:2412.19437), section 2.2. With h_t the target's state at
position t, after its last norm, and e the embedding of a token:

    x_t = W [RMS_e(e(x_(t+1))); RMS_h(h_t)]       the layer's input
    s_t = Layer(x)_t                              its output, with attention to the text's rows so far
    logits of x_(t+2) = W_head RMS_last(s_t)      W_head is the target's

For a guess, the layer's own state replaces the target's: h of a child is RMS_last(s) of its parent. W = [W_e, W_h] has
a half for each of its inputs. The *fusion* of these heads is W_h RMS_h(h).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specdec.engine.heads.decoder_layer import rms_norm
from specdec.engine.heads.files import HeadsFilesError
from specdec.engine.heads.fusion import Fusion
from specdec.engine.heads.text_memory import TextMemory, TreeContext
from specdec.engine.hf.checkpoint import without_code
from specdec.engine.kv.slots import Slots
from specdec.engine.model_file import Fields, in_one_line

PER_LAYER = "layer_types", "mlp_layer_types"
"""Configuration fields with one entry per layer. Those for MTP layers have the same names with the prefix `mtp_`."""


class MtpWeights(NamedTuple):
    """The weights of an MTP layer outside its decoder layer, of one dtype on one device."""

    token_half: Tensor  # [d, d] the half of W that reads the token
    embedding_norm: Tensor  # [d]
    last_norm: Tensor  # [d]
    embeddings: Tensor  # [ids, d], the target's
    output: Callable[[Tensor], Tensor]  # the target's function from states [n, d] to logits [n, ids]


class DecoderLayer:
    """A decoder layer of transformers, with keys and values kept elsewhere."""

    def __init__(self, layer: torch.nn.Module, rotary: torch.nn.Module, kind: str | None) -> None:
        """`kind`: the layer's entry in `layer_types`, if it has one."""
        self._layer: Any = layer
        self._rotary = rotary
        by_kind = kind is not None and "layer_type" in inspect.signature(rotary.forward).parameters
        self._rotary_options = {"layer_type": kind} if by_kind else {}

    def keys_and_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [n, kv_heads, width] of n rows: x [n, d] at positions [n]."""
        read, places, kept = x[:, None], positions[:, None], KeptLevel()
        self._layer.self_attn(
            hidden_states=self._layer.input_layernorm(read),
            attention_mask=None,
            position_ids=places,
            position_embeddings=self._rotary(read, places, **self._rotary_options),
            past_key_values=kept,
        )
        keys, values = kept.level
        return keys[:, 0], values[:, 0]

    def __call__(self, x: Tensor, positions: Tensor, trees: TreeContext, origins: Tensor) -> Tensor:
        """Return the outputs [n, f, d] for a level of n trees: x [n, f, d] at positions [n, f], with parents at
        `origins` [n, f] in the previous level."""
        output = self._layer(
            x,
            attention_mask=trees.visible(origins)[:, None],
            position_ids=positions,
            position_embeddings=self._rotary(x, positions, **self._rotary_options),
            past_key_values=KeptLevel(trees),
        )
        states: Tensor = output[0] if isinstance(output, tuple) else output
        return states


class KeptLevel:
    """Stands in for the KV cache of a layer of transformers during one pass. It keeps the pass's rows, and adds them to
    `trees`, if given."""

    def __init__(self, trees: TreeContext | None = None) -> None:
        self.level: tuple[Tensor, Tensor] = torch.empty(0), torch.empty(0)  # [n, f, kv_heads, width] each
        self._trees = trees

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take a pass's keys and values [n, kv_heads, f, width]; return all keys and values that its rows may see."""
        self.level = keys.transpose(1, 2), values.transpose(1, 2)
        if self._trees is None:
            return keys, values
        all_keys, all_values = self._trees.add(*self.level)
        return all_keys.transpose(1, 2), all_values.transpose(1, 2)


class MtpHeads:
    """An MTP layer, which also reads its own guesses, for a target of `vocabulary` tokens."""

    ids: NDArray[Any] | None = None  # its outputs are the target's token ids

    def __init__(self, layer: DecoderLayer, fusion: Fusion, weights: MtpWeights, *, vocabulary: int) -> None:
        self.vocabulary = self.outputs = vocabulary
        self._layer = layer
        self._fusion = fusion
        self._weights = weights

    @property
    def dtype(self) -> torch.dtype:
        return self._fusion.product.dtype

    @property
    def device(self) -> torch.device:
        return self._fusion.product.device

    def fused(self, features: Tensor) -> Tensor:
        """Return the summand W_h RMS_h(h) [n, d] of x for the target's states [n, 1, d], of any float dtype."""
        return self._fusion(features)

    def read(self, tokens: Tensor, fused: Tensor, positions: Tensor, slots: Slots, memory: TextMemory) -> None:
        """See `AutoregressiveHeads`."""
        memory.write(slots, *self._layer.keys_and_values(self._inputs(tokens, fused), positions))

    def grow(self, tokens: Tensor, fused: Tensor, positions: Tensor, trees: TreeContext, origins: Tensor) -> Tensor:
        """See `AutoregressiveHeads`."""
        return self._layer(self._inputs(tokens, fused), positions, trees, origins)

    def outcome(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """See `AutoregressiveHeads`."""
        weights, shape = self._weights, states.shape
        normal = rms_norm(states, weights.last_norm, self._fusion.epsilon).flatten(0, -2)
        logits = weights.output(normal).float()
        return logits.reshape(*shape[:-1], -1), self.fused(normal[:, None]).reshape(shape)

    def _inputs(self, tokens: Tensor, fused: Tensor) -> Tensor:
        """Return x [..., d] for tokens [...] and fused states [..., d]."""
        weights = self._weights
        embedded = F.embedding(tokens, weights.embeddings).to(self.dtype)
        return F.linear(rms_norm(embedded, weights.embedding_norm, self._fusion.epsilon), weights.token_half) + fused


def loaded_layer(
    path: Path,
    fields: Fields,
    tensors: Mapping[str, Tensor],
    epsilon: float,
    *,
    device: str,
    dtype: torch.dtype,
) -> DecoderLayer:
    """Return a decoder layer of a model's architecture with these weights, named without the prefix `layers.0.`.
    `fields`: of config.json. HeadsFilesError, naming the layer's directory and the tensor, if the weights do not
    fit."""
    try:
        config = _of_one_layer(CONFIG_MAPPING[fields.text("model_type")].from_dict(without_code(fields.content, set())))
        model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None,
            config=config,
            state_dict={f"model.layers.0.{name}": tensor for name, tensor in tensors.items()},
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below: transformers' error does not name them
        )
    except Exception as error:  # transformers' errors have no common base
        raise HeadsFilesError(f"{path}: its MTP layer cannot be loaded: {in_one_line(error)}") from error
    of_layer = [name for name in sorted(report["missing_keys"]) if ".layers.0." in name]
    if of_layer:
        raise HeadsFilesError(f"{path}: its MTP layer lacks {len(of_layer)} tensors, such as {of_layer[0]}")
    for name, stored, expected in sorted(report["mismatched_keys"]):
        if ".layers.0." in name:
            raise HeadsFilesError(
                f"{path}: {name} of its MTP layer has the shape {list(stored)}, must have {list(expected)}"
            )
    if report["unexpected_keys"]:
        raise HeadsFilesError(f"{path}: its MTP layer has {min(report['unexpected_keys'])}, which is not used")
    inside: Any = model.eval().to(device).base_model
    layer = inside.layers[0]
    _check_norm(path, layer.input_layernorm, epsilon)
    kinds = getattr(config, "layer_types", None)
    return DecoderLayer(layer, inside.rotary_emb, kinds[0] if kinds else None)


def _of_one_layer(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a one-layer model for the MTP layer. The layer is like the model's last one, unless
    the configuration has fields for MTP layers. The vocabulary has one token: this model's embeddings and output head
    are unused."""
    for name in PER_LAYER:
        types = getattr(config, f"mtp_{name}", None) or getattr(config, name, None)
        if types:
            setattr(config, name, [types[-1]])
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    config.num_hidden_layers = config.vocab_size = 1
    config.pad_token_id = None
    return config


def _check_norm(path: Path, norm: torch.nn.Module, epsilon: float) -> None:
    """Raise HeadsFilesError unless the architecture's norms are RMS norms with a plain weight: some architectures add 1
    to the weight."""
    weight: Any = norm.weight
    probe = torch.linspace(-1.0, 2.0, len(weight), device=weight.device, dtype=weight.dtype)
    with torch.inference_mode():
        if not torch.allclose(norm(probe), rms_norm(probe, weight, epsilon), rtol=0.02):
            raise HeadsFilesError(
                f"{path}: {type(norm).__name__} is not supported in MTP layers: it is not a plain RMS norm"
            )
