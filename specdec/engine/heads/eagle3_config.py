"""The configuration of EAGLE-3 heads: config.json in EAGLE's layout, which is that of a Llama model of one layer with
more fields, and in speculators', where that is `transformer_layer_config`.

The layers whose features heads read are those that the features *enter*, as EAGLE, speculators and vLLM count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from specdec.engine.heads.files import MAX_SIZE, TargetShape
from specdec.engine.model_directory import MAX_CONTEXT, MAX_VOCABULARY
from specdec.engine.model_file import Fields, shown

MAX_FEATURES = 16
"""Maximum features of a position. Published heads read three, some five."""

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""Field with the layers whose features heads read."""

ROTARY = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embeddings. Others depend on the longest text of a batch."""

USUAL_CONTEXT, USUAL_THETA, USUAL_EPSILON = 2048, 10_000.0, 1e-6
"""Llama's own values of fields that may be missing: context, base of rotary embeddings, epsilon of norms."""


class Eagle3Shape(NamedTuple):
    """The sizes of EAGLE-3 heads."""

    stream: int  # d, the width of the target's features
    features: int  # m, features of a position
    hidden: int  # d', the width of the layer
    heads: int
    kv_heads: int
    width: int  # of an attention head
    inner: int  # of the MLP
    outputs: int  # token ids they can guess


class Eagle3Variant(NamedTuple):
    """The options of EAGLE-3 heads that neither their shape nor the norms among their weights show."""

    epsilon: float  # of all norms
    norm_before_residual: bool = False  # the attention's residual is RMS_hidden(g) instead of g
    norm_output: bool = False  # a child reads RMS(s) instead of s (EAGLE-3.1)


@dataclass(frozen=True)
class Eagle3Config:
    """The configuration of EAGLE-3 heads."""

    shape: Eagle3Shape
    variant: Eagle3Variant
    layers: tuple[int, ...]  # whose features they read
    context: int  # positions that they are trained for
    norm_before_fusion: bool
    norm_of_features: bool
    rotary: dict[str, Any]  # its fields for transformers

    @classmethod
    def of(cls, config: Fields, target: TargetShape) -> Eagle3Config:
        """Read the configuration of heads for a target; ModelDirectoryError, naming the field, if it does not fit."""
        layer = _layer_config(config)
        hidden = layer.integer("hidden_size", 1, MAX_SIZE)
        heads = layer.integer("num_attention_heads", 1, MAX_SIZE)
        kv_heads = layer.integer("num_key_value_heads", 1, heads) if layer.has("num_key_value_heads") else heads
        if heads % kv_heads:
            raise layer.refusal("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
        width = layer.integer("head_dim", 2, MAX_SIZE) if layer.has("head_dim") else hidden // heads
        if width % 2 or not width:
            field = "head_dim" if layer.has("head_dim") else "num_attention_heads"
            raise layer.refusal(field, "such that the width of a head is even")
        if layer.integer("num_hidden_layers", 1, MAX_SIZE) != 1:
            raise layer.refusal("num_hidden_layers", "1: heads of several layers are not supported")
        if layer.has("hidden_act") and layer.text("hidden_act") not in ("silu", "swish"):
            raise layer.refusal("hidden_act", "silu")
        if layer.has("vocab_size") and layer.integer("vocab_size", 1, MAX_VOCABULARY) != target.vocabulary:
            raise layer.refusal("vocab_size", f"{target.vocabulary}, that of the target")
        if config.has("target_hidden_size") and config.integer("target_hidden_size", 1, MAX_SIZE) != target.stream:
            raise config.refusal("target_hidden_size", f"{target.stream}, the hidden size of the target")
        outputs = target.vocabulary
        if config.has("draft_vocab_size"):
            outputs = config.integer("draft_vocab_size", 1, target.vocabulary)
        before, of_features = _flag(config, "norm_before_fc"), _flag(config, "fc_norm")
        if before and of_features:
            raise config.refusal("fc_norm", "false where norm_before_fc is true")
        epsilon = layer.number("rms_norm_eps") if layer.has("rms_norm_eps") else USUAL_EPSILON
        if not epsilon > 0:
            raise layer.refusal("rms_norm_eps", "above 0")
        layers = _layers(config, target)
        inner = layer.integer("intermediate_size", 1, MAX_SIZE)
        has_context = layer.has("max_position_embeddings")
        context = layer.integer("max_position_embeddings", 1, MAX_CONTEXT) if has_context else USUAL_CONTEXT
        return cls(
            Eagle3Shape(target.stream, len(layers), hidden, heads, kv_heads, width, inner, outputs),
            Eagle3Variant(epsilon, _norm_before_residual(config), _flag(config, "norm_output")),
            layers,
            context,
            before,
            of_features,
            _rotary(layer, hidden=heads * width, heads=heads, width=width, context=context),
        )


def _layer_config(config: Fields) -> Fields:
    """Return the configuration of the layer: the file's own, or the part of it in speculators' layout."""
    if not config.has("speculators_model_type"):
        return config
    if config.text("speculators_model_type") != "eagle3":
        raise config.refusal("speculators_model_type", "eagle3")
    return config.fields("transformer_layer_config")


def _norm_before_residual(config: Fields) -> bool:
    """Return whether the residual of attention is normalised. In speculators' layout readers disagree about a missing
    field, so it must be there; EAGLE's has no such norm by default."""
    name = "norm_before_residual"
    if not config.has(name) and config.has("speculators_model_type"):
        raise config.refusal(name, "true or false")
    return _flag(config, name)


def _layers(config: Fields, target: TargetShape) -> tuple[int, ...]:
    """Return the layers whose features heads read; by default EAGLE's: the third, the middle one, the third last."""
    within = config
    if config.has("eagle_config"):
        own = config.fields("eagle_config")
        if own.has("use_aux_hidden_state") and not own.flag("use_aux_hidden_state"):
            raise own.refusal("use_aux_hidden_state", "true for EAGLE-3")
        within = own if own.has(LAYER_IDS) else config
    if within.has(LAYER_IDS):
        layers = within.integers(LAYER_IDS, 0, target.layers - 1, count=MAX_FEATURES)
        if not layers:
            raise within.refusal(LAYER_IDS, "a list of layers, one at least")
        return tuple(layers)
    usual = 2, target.layers // 2, target.layers - 3
    if not all(0 <= layer < target.layers for layer in usual):
        raise config.refusal(LAYER_IDS, f"given for a target of {target.layers} layers")
    return usual


def _flag(config: Fields, name: str) -> bool:
    return config.has(name) and config.flag(name)


def _rotary(layer: Fields, *, hidden: int, heads: int, width: int, context: int) -> dict[str, Any]:
    """Return the fields of rotary embeddings for transformers, in its newer form."""
    name = next((name for name in ("rope_parameters", "rope_scaling") if layer.has(name)), None)
    parameters = {} if name is None else dict(layer.fields(name).content)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if name is not None and not (isinstance(kind, str) and kind in ROTARY):
        raise layer.refusal(name, f"of one of the types {', '.join(sorted(ROTARY))}, not {shown(kind)}")
    if layer.has("rope_theta"):
        parameters.setdefault("rope_theta", layer.number("rope_theta"))
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "head_dim": width,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_theta": USUAL_THETA, **parameters, "rope_type": kind},
    }
