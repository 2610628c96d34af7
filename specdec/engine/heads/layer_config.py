"""The fields of config.json that all heads with decoder layers share. The names are as in Llama's config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.engine.heads.files import MAX_SIZE, TargetShape
from specdec.engine.model_directory import MAX_CONTEXT, MAX_VOCABULARY
from specdec.engine.model_file import Fields, shown

MAX_FEATURES = 16
"""Maximum number of features per position. Most published heads read three, some read five."""

ROTARY = frozenset({"default", "linear", "llama3", "yarn"})
"""Supported kinds of rotary embeddings. Other kinds depend on the longest text in the batch."""

USUAL_CONTEXT, USUAL_THETA, USUAL_EPSILON = 2048, 10_000.0, 1e-6
"""Llama's defaults for fields that may be missing: context, base of rotary embeddings, epsilon of norms."""

ROTATED = "partial_rotary_factor"
"""Field with the share of an attention head that rotary embeddings rotate."""

SPECULATORS = "speculators_model_type"
"""Field with the kind of heads; only a config.json in speculators' layout has it."""


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of a decoder layer."""

    hidden: int  # d', the width of the layer
    heads: int
    kv_heads: int
    width: int  # of an attention head
    inner: int  # of the MLP


@dataclass(frozen=True)
class LayerConfig:
    """The configuration of a decoder layer."""

    sizes: LayerSizes
    epsilon: float  # of all norms
    context: int  # positions that the heads are trained for
    rotary: dict[str, Any]  # fields of the rotary embeddings for transformers

    @classmethod
    def of(cls, layer: Fields, target: TargetShape) -> LayerConfig:
        """Read the configuration of a layer for a target; ModelDirectoryError, naming the field, if it does not fit."""
        hidden = layer.integer("hidden_size", 1, MAX_SIZE)
        heads = layer.integer("num_attention_heads", 1, MAX_SIZE)
        kv_heads = layer.integer("num_key_value_heads", 1, heads, default=heads)
        if heads % kv_heads:
            raise layer.refusal("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
        width = layer.integer("head_dim", 2, MAX_SIZE, default=hidden // heads)
        if width % 2 or not width:
            if layer.has("head_dim"):
                raise layer.refusal("head_dim", "even")
            raise layer.refusal("num_attention_heads", f"a divisor of hidden_size, {hidden}, for heads of even width")
        if layer.text("hidden_act", default="silu") not in ("silu", "swish"):
            raise layer.refusal("hidden_act", "silu")
        if layer.integer("vocab_size", 1, MAX_VOCABULARY, default=target.vocabulary) != target.vocabulary:
            raise layer.refusal("vocab_size", f"{target.vocabulary}, that of the target")
        epsilon = layer.number("rms_norm_eps", default=USUAL_EPSILON)
        if not epsilon > 0:
            raise layer.refusal("rms_norm_eps", "above 0")
        context = layer.integer("max_position_embeddings", 1, MAX_CONTEXT, default=USUAL_CONTEXT)
        inner = layer.integer("intermediate_size", 1, MAX_SIZE)
        rotary = _rotary(layer, hidden=heads * width, heads=heads, width=width, context=context)
        return cls(LayerSizes(hidden, heads, kv_heads, width, inner), epsilon, context, rotary)


def layer_fields(config: Fields, *kinds: str) -> Fields:
    """Return the fields of the layers: the top level, or `transformer_layer_config` in speculators' layout.
    ModelDirectoryError if speculators' layout has another kind than `kinds`, or if rotary embeddings rotate only a part
    of an attention head."""
    layer = config
    if config.has(SPECULATORS):
        if config.text(SPECULATORS) not in kinds:
            raise config.refusal(SPECULATORS, " or ".join(kinds))
        layer = config.fields("transformer_layer_config")
    if layer.number(ROTATED, default=1) != 1:
        raise layer.refusal(ROTATED, "1: rotary embeddings of a part of each attention head are not supported")
    return layer


def outputs_of(config: Fields, target: TargetShape) -> int:
    """Return the number of token ids that the heads can guess; ModelDirectoryError if the file is for a target of
    another width."""
    if config.integer("target_hidden_size", 1, MAX_SIZE, default=target.stream) != target.stream:
        raise config.refusal("target_hidden_size", f"{target.stream}, the hidden size of the target")
    return config.integer("draft_vocab_size", 1, target.vocabulary, default=target.vocabulary)


def _rotary(layer: Fields, *, hidden: int, heads: int, width: int, context: int) -> dict[str, Any]:
    """Return the fields of rotary embeddings as transformers 5 reads them, with `rope_parameters`."""
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
