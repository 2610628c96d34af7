"""Training of DSpark block drafts beside a frozen target (DeepSeek 2026, arXiv:2607.05147).

The target reads windows of text once. In each window, some positions are anchors. The draft sees the target's features
at the positions before an anchor, the token at the anchor, and masks, as when it guesses. Guess k learns the target's
distribution p_k of the token k positions after the anchor, given the text's tokens before it. With the draft's
distribution q_k and its confidence c_k,

    loss = mean over anchors of sum_k w_k (0.1 H(p_k, q_k) + 0.9 |p_k - q_k|_1 + H(1 - TV(p_k, q_k), c_k))
    w_k = exp(-(k - 1) / 4) / sum_j exp(-(j - 1) / 4)

where TV is half of the L1 distance: a guess drawn from q_k is accepted with the probability 1 - TV. DeepSpec's first
term is the cross-entropy of the text's tokens instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.heads.block import BlockDraft, BlockLayer, BlockWeights, MarkovWeights
from specdec.engine.heads.block_config import LEFT, BlockShape, BlockVariant, Markov
from specdec.engine.heads.block_files import NAMES
from specdec.engine.heads.feature_files import tensor_name
from specdec.engine.heads.fusion import Fusion
from specdec.engine.heads.layer_config import USUAL_EPSILON
from specdec.engine.hf.hidden_states import decoder_layers
from specdec.training.heads import TOLD_RANKS, HeadTraining
from specdec.training.layers import (
    Untrained,
    check_features,
    layer_fields,
    layer_sizes,
    learned,
    output_head,
    read_features,
    rotary_of,
)
from specdec.training.plan import DSPARK, Origin, Plan
from specdec.training.texts import Windows
from specdec.training.training import activations

FEATURES = 5
"""Number of layers whose features are read, as in the published drafts, if the target has enough layers."""

GAMMA = 4.0
"""Decay of the guesses' weights, in positions, as in DFlash."""

CROSS_ENTROPY, DISTANCE = 0.1, 0.9
"""DSpark's weights for the two losses that compare distributions."""

MAX_NORM = 1.0
"""Limit on the norm of a step's gradient."""


@dataclass(frozen=True, kw_only=True)
class BlockPlan(Plan):
    """The parameters of a training of a block draft."""

    block: int = 7  # tokens guessed in one pass
    layers: int = 3
    markov_rank: int = 256  # 0: no Markov head
    anchors: int = 32  # per window and step
    rate: float = 6e-4  # DeepSpec's


class BlockTraining(HeadTraining[BlockPlan]):
    """A training of a block draft: layers of the target's sizes, the target's token embeddings and output head, a
    Markov head and a confidence head."""

    trains = DSPARK
    guess = "guess"
    remedy = "use fewer --rows or --layers, or a smaller --length"

    def __init__(self, model: PreTrainedModel, windows: Windows, plan: BlockPlan, origin: Origin) -> None:
        """UnsupportedModelError as in `check`, or if the device has no room. The plan's windows must be longer than a
        block."""
        self.check(model)
        self.layers = layers_read(len(decoder_layers(model)))
        output: Any = model.get_output_embeddings()
        vocabulary = output.weight.shape[0]
        self._sizes = layer_sizes(model)
        shape = BlockShape(
            **vars(self._sizes),
            stream=self._sizes.hidden,
            features=len(self.layers),
            layers=plan.layers,
            outputs=vocabulary,
            rows=plan.block,
            rank=plan.markov_rank,
        )
        table: Any = model.get_input_embeddings()
        markov = Markov.VANILLA if plan.markov_rank else None
        mask = rarest(windows.trained.flatten(), table.weight)
        variant = BlockVariant(USUAL_EPSILON, mask, True, markov, True, markov is not None)
        self._weights = _untrained(shape, model, plan.seed)
        rotary = rotary_of(shape.width, model.device)
        self.draft = BlockDraft(shape, variant, self._weights, rotary, vocabulary=vocabulary)
        trained = learned(self._weights, "embeddings", "output")
        kept = activations(min(plan.anchors, plan.length - plan.block) * plan.block, shape.hidden, plan.layers)
        super().__init__(model, windows, plan, origin, trained, kept, MAX_NORM)

    @classmethod
    def check(cls, model: PreTrainedModel) -> None:
        check_features(model, cls.trains)

    def _learn_part(self, windows: Tensor, share: float) -> float:
        anchors, first = self._anchors(windows.shape[1]), math.nan
        features, of_target = read_features(self._model, windows, self.layers)
        states = self._states(windows, features, anchors)
        # Compute the gradient guess by guess, so that only one guess's logits are in memory.
        leaf = states.detach().requires_grad_()
        for ahead, weight in enumerate(guess_weights(self.plan.block)):
            before = windows[:, anchors + ahead]
            likely = self._guess(before, leaf[:, :, ahead]).log_softmax(-1)
            wanted = of_target[:, anchors + ahead].softmax(-1)
            entropy = -(wanted * likely).sum(-1)
            distance = (wanted - likely.exp()).abs().sum(-1)
            accepted = (1.0 - distance.detach() / 2.0).clamp(0.0, 1.0)  # rounding may exceed the range
            confidence = self.draft.confidence(before, leaf[:, :, ahead])
            is_taken = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
            loss = (CROSS_ENTROPY * entropy + DISTANCE * distance + is_taken).mean()
            (share * weight * loss).backward()  # type: ignore[no-untyped-call]
            if ahead == 0:
                first = share * entropy.mean().item()
        assert leaf.grad is not None
        states.backward(leaf.grad)  # type: ignore[no-untyped-call]
        return first

    def _guessed(self, windows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield guesses as in HeadTraining, from consecutive blocks: every block-th position is an anchor."""
        length, block = windows.shape[1], self.plan.block
        anchors = torch.arange(1, length - block + 1, block, device=windows.device)
        features, of_target = read_features(self._model, windows, self.layers)
        states = self._states(windows, features, anchors)
        for ahead in range(block):
            logits = self._guess(windows[:, anchors + ahead], states[:, :, ahead])
            guesses = logits.topk(min(max(TOLD_RANKS), logits.shape[-1])).indices
            yield guesses.flatten(0, 1), of_target[:, anchors + ahead].argmax(-1).flatten()

    def _anchors(self, length: int) -> Tensor:
        """Return the positions of this step's anchors, the same in all of its windows. They depend only on seed and
        step."""
        places = np.random.default_rng([self.plan.seed, self.done]).permutation(length - self.plan.block)
        return torch.from_numpy(1 + np.sort(places[: self.plan.anchors])).to(self._model.device)

    def _guess(self, before: Tensor, states: Tensor) -> Tensor:
        """Return the logits [rows, anchors, V] of guesses from their states h [rows, anchors, d'] and the tokens before
        them [rows, anchors]."""
        logits = self.draft.logits(states)
        if self.draft.variant.markov is None:
            return logits
        return logits + self.draft.markov(before, states, None)[0]

    def _states(self, windows: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Return the states h [rows, anchors, block, d'] of blocks at these anchors [n] in windows [rows, length], from
        the target's features [rows * length, m, d]. A block sees the context before its anchor, and itself."""
        rows, length = windows.shape
        positions = torch.arange(length, device=windows.device)
        fused = self.draft.fused(features).view(rows, length, -1)
        keys, values = self.draft.context(fused, positions.expand(rows, -1))
        tokens, places = self.draft.blocks(windows[:, anchors], anchors.expand(rows, -1))
        of_block = torch.arange(len(anchors), device=windows.device).repeat_interleave(self.plan.block)
        seen = positions < anchors[of_block][:, None]
        visible = torch.cat([seen, of_block[:, None] == of_block], dim=1)[None, None]
        states = self.draft.passed(tokens.flatten(1), places.flatten(1), keys, values, visible)
        return states.view(*tokens.shape, -1)

    def _stored(self) -> tuple[Mapping[str, Tensor], Mapping[str, object]]:
        """Return the draft in DeepSpec's layout, without copies of the target's embeddings and output head."""
        weights, shape, variant = self._weights, self.draft.shape, self.draft.variant
        assert weights.fusion.norm_of_fused is not None
        parts = {
            "fusion": weights.fusion.product,
            "context_norm": weights.fusion.norm_of_fused,
            "last_norm": weights.last_norm,
        }
        of_layers = zip(
            weights.layers,
            weights.keys.chunk(shape.layers),
            weights.values.chunk(shape.layers),
            weights.key_norms,
            strict=True,
        )
        for number, (layer, keys, values, key_norm) in enumerate(of_layers):
            gate, up = layer.gate_and_up.chunk(2)
            own = {
                "norm": layer.norm,
                "q": layer.query,
                "q_norm": layer.query_norm,
                "k": keys,
                "k_norm": key_norm,
                "v": values,
                "o": layer.project_back,
                "mlp_norm": layer.mlp_norm,
                "gate": gate,
                "up": up,
                "down": layer.down,
            }
            parts |= {f"{part} {number}": tensor for part, tensor in own.items()}
        if weights.markov is not None:
            parts |= {"markov_w1": weights.markov.embeddings, "markov_w2": weights.markov.output}
        assert weights.confidence is not None
        parts |= dict(zip(("confidence weight", "confidence bias"), weights.confidence, strict=True))
        stored = {tensor_name(part, NAMES): tensor for part, tensor in parts.items()}
        return stored, {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            **layer_fields(
                self._sizes, layers=shape.layers, context=self.plan.length, vocabulary=self.draft.vocabulary
            ),
            "layer_types": ["full_attention"] * shape.layers,
            "attention_bias": False,
            "block_size": shape.rows,
            "mask_token_id": variant.mask,
            LEFT: [layer - 1 for layer in self.layers],
            "markov_rank": shape.rank,
            "markov_head_type": Markov.VANILLA.value,
            "enable_confidence_head": True,
            "confidence_head_with_markov": variant.confidence_reads_markov,
        }


def layers_read(count: int) -> tuple[int, ...]:
    """Return the layers whose features are read, for a target of `count` layers: five, evenly spread from the third
    layer to the penultimate one, as in the published drafts. In a shallow target they spread from the second layer to
    the last one, and may be fewer."""
    first, last = (2, count - 2) if count >= 2 * FEATURES else (min(1, count - 1), count - 1)
    return tuple(sorted({round(layer) for layer in np.linspace(first, last, FEATURES).tolist()}))


def guess_weights(count: int) -> list[float]:
    """Return the weights of a block's guesses, which sum to 1."""
    weights = np.exp(-np.arange(count) / GAMMA)
    found: list[float] = (weights / weights.sum()).tolist()
    return found


def rarest(tokens: Tensor, embeddings: Tensor) -> int:
    """Return a mask token for a target that has none: the rarest id among tokens [n], the highest if several are
    equally rare. Ids with a zero row in `embeddings` [ids, d] are excluded, since a row of such a mask would have a
    zero query."""
    counts = torch.bincount(tokens, minlength=len(embeddings))[: len(embeddings)].to(embeddings.device)
    counts = torch.where(embeddings.any(dim=1), counts, counts.max() + 1)
    return int((counts == counts.min()).nonzero()[-1])


def _untrained(shape: BlockShape, model: PreTrainedModel, seed: int) -> BlockWeights:
    """Return initial weights, float32. At first the fused features are nearly the last feature, the Markov head has no
    effect, and the confidence is one half."""
    begun = Untrained(seed, model.device)
    table: Any = model.get_input_embeddings()
    hidden, queries, keys = shape.hidden, shape.heads * shape.width, shape.kv_heads * shape.width

    def layer() -> BlockLayer:
        return BlockLayer(
            norm=begun.norm(hidden),
            query=begun.product(queries, hidden),
            query_norm=begun.norm(shape.width),
            project_back=begun.product(hidden, queries),
            mlp_norm=begun.norm(hidden),
            gate_and_up=begun.product(2 * shape.inner, hidden),
            down=begun.product(hidden, shape.inner),
        )

    markov = None
    if shape.rank:
        markov = MarkovWeights(
            begun.product(shape.outputs, shape.rank), torch.zeros(shape.outputs, shape.rank, device=model.device)
        )
    return BlockWeights(
        fusion=Fusion(begun.fusion(hidden, shape.features), USUAL_EPSILON, norm_of_fused=begun.norm(hidden)),
        keys=begun.product(shape.layers * keys, hidden),
        values=begun.product(shape.layers * keys, hidden),
        key_norms=begun.norm(shape.layers, shape.width),
        layers=[layer() for _ in range(shape.layers)],
        last_norm=begun.norm(hidden),
        embeddings=table.weight.detach(),
        output=output_head(model),
        markov=markov,
        confidence=(torch.zeros(1, hidden + shape.rank, device=model.device), torch.zeros(1, device=model.device)),
    )
