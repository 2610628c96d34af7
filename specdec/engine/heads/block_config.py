"""The configuration of block drafts: config.json of DFlash and DSpark, in the layouts of their authors and of
speculators.

| Layout | Recognised by | Field with the features' layers |
|---|---|---|
| z-lab (DFlash) | `dflash_config` | `target_layer_ids`: features are outputs of these layers |
| DeepSpec (DFlash, DSpark) | DSpark in a name of `architectures` | the same; -1 stands for the token embeddings |
| speculators (dflash, dspark) | `speculators_model_type` | `aux_hidden_state_layer_ids`: features are their inputs |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
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
from specdec.engine.model_file import Fields, shown

MAX_LAYERS = 64
"""Maximum layers of a block draft. Published ones have three to six."""

MAX_BLOCK = 64
"""Maximum rows of a block. Published ones have 7 to 16."""

LEFT, ENTERED = "target_layer_ids", "aux_hidden_state_layer_ids"
"""Fields with the target's layers whose outputs, or whose inputs, are the features."""


class Markov(Enum):
    """Kinds of DSpark's Markov head."""

    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


@dataclass(frozen=True)
class BlockShape(LayerSizes):
    """The sizes of a block draft, whose layers are alike."""

    stream: int  # d, the width of the target's features
    features: int  # m, features of a position
    layers: int
    outputs: int  # token ids that it can guess
    rows: int  # of a block: the last token of the text, and masks
    rank: int  # r of the Markov head; 0: no such head


class BlockVariant(NamedTuple):
    """The options of a block draft that its shape does not show."""

    epsilon: float  # of all norms
    mask: int  # token id of the rows to fill
    from_anchor: bool  # True: each row guesses the token after it; False: each but the first guesses its own token
    markov: Markov | None = None
    confidence: bool = False  # True: the draft estimates each guess's probability of acceptance
    confidence_reads_markov: bool = False


@dataclass(frozen=True)
class BlockConfig:
    """The configuration of a block draft."""

    shape: BlockShape
    variant: BlockVariant
    layer: LayerConfig
    layers: tuple[int, ...]  # the target's layers whose features it reads

    @classmethod
    def of(cls, config: Fields, target: TargetShape) -> BlockConfig:
        """Read the configuration of a block draft for a target; ModelDirectoryError, naming the field, if it does not
        fit."""
        fields = layer_fields(config, "dflash", "dspark")
        own = config.fields("dflash_config") if config.has("dflash_config") else config
        layer, outputs = LayerConfig.of(fields, target), outputs_of(config, target)
        _check_attention(fields)
        for part in (own, config, fields):
            _check_neutral(part)
        markov, rank = _markov(config)
        confidence = config.flag("enable_confidence_head", default=False)
        reads_markov = confidence and config.flag("confidence_head_with_markov", default=False)
        if reads_markov and markov is None:
            raise config.refusal("confidence_head_with_markov", "false without a Markov head")
        rows = (own if own.has("block_size") else config).integer("block_size", 1, MAX_BLOCK)
        from_anchor = _from_anchor(own, config, rows)
        if rows == 1 and not from_anchor:
            raise own.refusal("block_size", "2 or more, or sample_from_anchor true")
        layers = _layers(own if own.has(LEFT) else config, target)
        count = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
        return cls(
            BlockShape(
                **vars(layer.sizes),
                stream=target.stream,
                features=len(layers),
                layers=count,
                outputs=outputs,
                rows=rows,
                rank=rank,
            ),
            BlockVariant(
                layer.epsilon,
                (own if own.has("mask_token_id") else config).integer("mask_token_id", 0, target.vocabulary - 1),
                from_anchor,
                markov,
                confidence,
                reads_markov,
            ),
            layer,
            layers,
        )

    @property
    def memory_heads(self) -> int:
        """KV heads of a row in the memory, over all layers."""
        return self.shape.layers * self.shape.kv_heads


def _from_anchor(own: Fields, config: Fields, rows: int) -> bool:
    """Return whether the first row of a block guesses, too. Without the field `sample_from_anchor`, it guesses in
    DeepSpec's layout, including its DFlash drafts, and in speculators' DSpark drafts with as many guesses as rows."""
    name = "sample_from_anchor"
    for fields in (own, config):
        if fields.has(name):
            return fields.flag(name)
    if not config.has(SPECULATORS):
        names = config.content.get("architectures")
        return isinstance(names, list) and any("DSpark" in name for name in names if isinstance(name, str))
    if config.text(SPECULATORS) != "dspark":
        return False
    guesses = _speculators_guesses(config)
    if guesses not in (rows - 1, rows):
        raise config.refusal(name, f"true or false if speculative_tokens is neither {rows - 1} nor {rows}")
    return guesses == rows


def _speculators_guesses(config: Fields) -> object:
    """Return `speculative_tokens`, the number of guesses per block in speculators' layout; None if it is missing."""
    if not config.has("speculators_config"):
        return None
    proposals = config.fields("speculators_config")
    methods = proposals.objects("proposal_methods") if proposals.has("proposal_methods") else []
    return methods[0].content.get("speculative_tokens") if methods else None


def _check_attention(fields: Fields) -> None:
    """Raise ModelDirectoryError unless the rows of a block see the whole text and one another in every layer, and
    attention has no biases."""
    kinds = fields.content.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise fields.refusal("layer_types", "full_attention in all layers: sliding windows are not supported")
    if kinds is None and fields.flag("use_sliding_window", default=False):
        raise fields.refusal("use_sliding_window", "false: sliding windows are not supported")
    if fields.flag("attention_bias", default=False):
        raise fields.refusal("attention_bias", "false")


NEUTRAL: Mapping[str, object] = {
    "projector_type": "dflash",
    "shift_label": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "causal": False,
    "causal_head": False,
    "is_causal": False,
    "use_swa": False,
    "rope_is_neox_style": True,
}
"""Fields that select unsupported variants, with their values in a supported draft."""


def _check_neutral(config: Fields) -> None:
    """Raise ModelDirectoryError if a field selects an unsupported variant."""
    for name, usual in NEUTRAL.items():
        if config.has(name) and config.content[name] != usual:
            raise config.refusal(name, f"{shown(usual)} or missing: other block drafts are not supported")


def _markov(config: Fields) -> tuple[Markov | None, int]:
    """Return the kind of the Markov head, and its rank."""
    rank = config.integer("markov_rank", 0, MAX_SIZE, default=0)
    if rank == 0:
        return None, 0
    kind = config.text("markov_head_type", default=Markov.VANILLA.value).lower()
    if kind not in {known.value for known in Markov}:
        raise config.refusal("markov_head_type", "vanilla, gated or rnn")
    return Markov(kind), rank


def _layers(config: Fields, target: TargetShape) -> tuple[int, ...]:
    """Return the layers whose inputs are the features."""
    if config.has(LEFT) or not config.has(ENTERED):
        found = [layer + 1 for layer in config.integers(LEFT, -1, target.layers - 2, count=MAX_FEATURES)]
    else:
        found = config.integers(ENTERED, 0, target.layers - 1, count=MAX_FEATURES)
    if not found:
        raise config.refusal(ENTERED if config.has(ENTERED) else LEFT, "a non-empty list of layers")
    return tuple(found)
