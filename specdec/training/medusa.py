"""Training of Medusa heads beside a frozen target ("Medusa-1", Cai et al. 2024, section 3.2.1).

The target reads windows of text once. Its hidden states are the heads' inputs, and its own distributions their labels:
head i at position t learns the target's distribution of the token at t + 2 + i. Such soft labels need less text than
hard ones (Hinton et al. 2015). The loss is the sum of the heads' cross-entropies weighted by 0.8^(i + 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.heads.medusa import MedusaHeads
from specdec.engine.hf.hidden_states import with_hidden_states
from specdec.training.heads import DECAY, TOLD_RANKS, HeadTraining
from specdec.training.plan import MEDUSA, Origin, Plan
from specdec.training.texts import Windows
from specdec.training.training import activations


@dataclass(frozen=True, kw_only=True)
class MedusaPlan(Plan):
    """The parameters of a training of Medusa heads."""

    heads: int = 5
    layers: int = 1
    own_outputs: bool = False


class MedusaTraining(HeadTraining[MedusaPlan]):
    """A training of Medusa heads."""

    trains = MEDUSA
    guess = "head"
    remedy = "use fewer --heads, no --own-outputs, or a smaller --length"

    def __init__(self, model: PreTrainedModel, windows: Windows, plan: MedusaPlan, origin: Origin) -> None:
        head = model.get_output_embeddings()
        self.heads = MedusaHeads.untrained(plan.heads, plan.layers, head, own_outputs=plan.own_outputs)
        parameters = (self.heads.weights, self.heads.biases, self.heads.outputs)
        trained = [parameter for parameter in parameters if parameter is not None]
        kept = activations(plan.length, self.heads.shape.hidden, plan.layers)  # of one head at a time
        super().__init__(model, windows, plan, origin, trained, kept)

    def _learn_part(self, windows: Tensor, share: float) -> float:
        hidden, targets = self._read(windows)
        first = math.nan
        for number in range(self.plan.heads):
            ahead = number + 1
            logits = self.heads.head(number, hidden[:, :-ahead].flatten(0, 1))
            loss = share * F.cross_entropy(logits, targets[:, ahead:].flatten(0, 1))
            (DECAY**ahead * loss).backward()  # type: ignore[no-untyped-call]
            first = loss.item() if number == 0 else first
        return first

    def _guessed(self, windows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        hidden, targets = self._read(windows)
        best = targets.argmax(-1)
        for number in range(self.plan.heads):
            ahead = number + 1
            logits = self.heads.head(number, hidden[:, :-ahead].flatten(0, 1))
            yield logits.topk(min(max(TOLD_RANKS), logits.shape[1])).indices, best[:, ahead:].flatten()

    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's hidden states [rows, length, d] and its distributions [rows, length, V], float32."""
        with torch.no_grad():
            logits, hidden = with_hidden_states(self._model, lambda: self._model(tokens, use_cache=False).logits)
            return hidden.float().view(*tokens.shape, -1), logits.float().softmax(-1)

    def _stored(self) -> tuple[Mapping[str, Tensor], Mapping[str, object]]:
        """Return the heads in vLLM's layout. Heads without their own output head use the target's."""
        shape = self.heads.shape
        stored = dict(_named(self.heads))
        if self.plan.own_outputs:
            assert self.heads.outputs is not None
            stored |= {f"lm_heads.{number}.weight": self.heads.outputs[number] for number in range(shape.heads)}
        return stored, {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": shape.hidden,
            "vocab_size": self.heads.vocabulary,
            "num_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "medusa_fc_bias": True,
            "original_lm_head": not self.plan.own_outputs,
        }


def _named(heads: MedusaHeads) -> Iterator[tuple[str, Tensor]]:
    for number in range(heads.shape.heads):
        for layer in range(heads.shape.layers):
            name = f"blocks.{number}.layers.{layer}"
            yield f"{name}.weight", heads.weights[number, layer]
            if heads.biases is not None:
                yield f"{name}.bias", heads.biases[number, layer]
