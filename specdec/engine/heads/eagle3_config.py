"""The configuration of EAGLE-3 heads: config.json in EAGLE's layout or in speculators'. EAGLE's file has the fields of
a one-layer Llama model at the top level; speculators' has them in `transformer_layer_config`.

A feature is numbered by the layer that it *enters*, as in EAGLE, speculators and vLLM. SpecForge's files list the
preceding layer, whose output the feature is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specdec.engine.heads.files import MAX_SIZE, TargetShape
from specdec.engine.heads.layer_config import (
    MAX_FEATURES,
    SPECULATORS,
    LayerConfig,
    LayerSizes,
    layer_fields,
    outputs_of,
)
from specdec.engine.model_file import Fields

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""Field with the layers whose features heads read."""

MIN_LAYERS = 7
"""Minimum layers of a target for EAGLE's choice of feature layers; with fewer, the three are not all different."""


@dataclass(frozen=True)
class Eagle3Shape(LayerSizes):
    """The sizes of EAGLE-3 heads."""

    stream: int  # d, the width of the target's features
    features: int  # m, features of a position
    outputs: int  # token ids they can guess


class Eagle3Variant(NamedTuple):
    """The options of EAGLE-3 heads that are evident neither from their shape nor from the norms among their weights."""

    epsilon: float  # of all norms
    norm_before_residual: bool = False  # the attention's residual is RMS_hidden(g) instead of g
    norm_output: bool = False  # a child reads RMS(s) instead of s (EAGLE-3.1)


@dataclass(frozen=True)
class Eagle3Config:
    """The configuration of EAGLE-3 heads."""

    shape: Eagle3Shape
    variant: Eagle3Variant
    layer: LayerConfig
    layers: tuple[int, ...]  # the target's layers whose features they read
    norm_before_fusion: bool
    norm_of_features: bool

    @classmethod
    def of(cls, config: Fields, target: TargetShape) -> Eagle3Config:
        """Read the configuration of heads for a target; ModelDirectoryError, naming the field, if it does not fit."""
        fields = layer_fields(config, "eagle3")
        layer = LayerConfig.of(fields, target)
        if fields.integer("num_hidden_layers", 1, MAX_SIZE) != 1:
            raise fields.refusal("num_hidden_layers", "1: heads of several layers are not supported")
        outputs = outputs_of(config, target)
        before, of_features = config.flag("norm_before_fc", default=False), config.flag("fc_norm", default=False)
        if before and of_features:
            raise config.refusal("fc_norm", "false where norm_before_fc is true")
        layers = _layers(config, target)
        return cls(
            Eagle3Shape(**vars(layer.sizes), stream=target.stream, features=len(layers), outputs=outputs),
            Eagle3Variant(
                layer.epsilon,
                # Speculators' layout requires the field, because readers disagree on its default.
                config.flag("norm_before_residual", default=None if config.has(SPECULATORS) else False),
                config.flag("norm_output", default=False),
            ),
            layer,
            layers,
            before,
            of_features,
        )

    @property
    def memory_heads(self) -> int:
        """KV heads of a row in the memory."""
        return self.shape.kv_heads


def _layers(config: Fields, target: TargetShape) -> tuple[int, ...]:
    """Return the layers whose features heads read; by default EAGLE's: the third, the middle and the third-last one."""
    within = config
    if config.has("eagle_config"):
        own = config.fields("eagle_config")
        if not own.flag("use_aux_hidden_state", default=True):
            raise own.refusal("use_aux_hidden_state", "true for EAGLE-3")
        within = own if own.has(LAYER_IDS) else config
    if within.has(LAYER_IDS):
        layers = within.integers(LAYER_IDS, 0, target.layers - 1, count=MAX_FEATURES)
        if not layers:
            raise within.refusal(LAYER_IDS, "a non-empty list of layers")
        # EAGLE's first layer is 2, which SpecForge calls 1. In a shallow target `train-heads` chooses 1 itself.
        if layers[0] == 1 and target.layers >= MIN_LAYERS and not config.has(SPECULATORS):
            layers = [1 + layer for layer in within.integers(LAYER_IDS, 0, target.layers - 2, count=MAX_FEATURES)]
        return tuple(layers)
    usual = 2, target.layers // 2, target.layers - 3
    if not all(0 <= layer < target.layers for layer in usual):
        raise config.refusal(LAYER_IDS, f"given for a target of {target.layers} layers")
    return usual
