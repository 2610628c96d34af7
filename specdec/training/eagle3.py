"""Training of EAGLE-3 heads beside a frozen target, with training-time test (Li et al. 2025, arXiv:2503.01840, section
3.2).

The target reads windows of text once. In step 0 of the test the heads read its features; in step i > 0 they read their
own states of step i - 1, as when they guess. Row t of step i holds the token at t + 1 + i and learns the target's
distribution p of the token at t + 2 + i. It attends to the rows of step 0 up to t, and to row t of the steps 1 ... i,
as a chain of guesses after the text up to t does. With the heads' distribution q and their vocabulary V_d,

    loss = sum_i 0.8^i mean_t [argmax p is in V_d] H(p restricted to V_d, q)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from specdec.engine.heads.eagle3 import Eagle3Heads, Eagle3Weights
from specdec.engine.heads.eagle3_config import LAYER_IDS, MIN_LAYERS, Eagle3Shape, Eagle3Variant
from specdec.engine.heads.eagle3_files import NAMES
from specdec.engine.heads.feature_files import tensor_name
from specdec.engine.heads.fusion import Fusion
from specdec.engine.heads.layer_config import USUAL_EPSILON, LayerSizes
from specdec.engine.hf.hidden_states import decoder_layers
from specdec.training.heads import DECAY, TOLD_RANKS, HeadTraining
from specdec.training.layers import (
    Untrained,
    check_features,
    layer_fields,
    layer_sizes,
    learned,
    read_features,
    rotary_of,
)
from specdec.training.plan import EAGLE3, Origin, Plan
from specdec.training.texts import Windows
from specdec.training.training import activations

MAX_NORM = 0.5
"""Limit on the norm of a step's gradient, as in EAGLE."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Plan(Plan):
    """The parameters of a training of EAGLE-3 heads."""

    ttt_steps: int = 7  # steps of training-time test: positions guessed ahead
    draft_vocabulary: int = 32_000  # token ids that the heads can guess, at most
    rate: float = 6e-4  # DeepSpec's


class Eagle3Training(HeadTraining[Eagle3Plan]):
    """A training of EAGLE-3 heads: one layer of the target's sizes, the target's token embeddings, and their own output
    head for the most frequent tokens of the text."""

    trains = EAGLE3
    guess = "guess"
    remedy = "use a smaller --draft-vocabulary or --length"

    def __init__(self, model: PreTrainedModel, windows: Windows, plan: Eagle3Plan, origin: Origin) -> None:
        """UnsupportedModelError as in `check`, or if the device has no room."""
        self.check(model)
        self.layers = layers_read(len(decoder_layers(model)))
        output: Any = model.get_output_embeddings()
        vocabulary = output.weight.shape[0]
        self._ids = most_frequent(windows.trained.flatten(), min(plan.draft_vocabulary, vocabulary)).to(model.device)
        self._is_known = torch.zeros(vocabulary, dtype=torch.bool, device=model.device)
        self._is_known[self._ids] = True
        self._sizes = layer_sizes(model)
        shape = _shape_for(self._sizes, len(self.layers), len(self._ids))
        self._weights = _untrained(shape, model, output.weight.detach()[self._ids], plan.seed)
        self.heads = Eagle3Heads(
            shape,
            Eagle3Variant(USUAL_EPSILON),
            self._weights,
            rotary_of(shape.width, model.device),
            vocabulary=vocabulary,
            ids=None if shape.outputs == vocabulary else self._ids.cpu().numpy(),
        )
        trained, weights = learned(self._weights, "embeddings"), shape.heads * plan.length**2  # of one step at a time
        kept = activations(plan.length, shape.hidden, plan.ttt_steps, weights)
        super().__init__(model, windows, plan, origin, trained, kept, MAX_NORM)

    @classmethod
    def check(cls, model: PreTrainedModel) -> None:
        check_features(model, cls.trains)

    def _learn_part(self, windows: Tensor, share: float) -> float:
        features, logits = read_features(self._model, windows, self.layers)
        is_counted = self._is_known[logits.argmax(-1)]
        targets = logits[..., self._ids].softmax(-1)  # restricted to the known tokens
        first = math.nan
        passed, gradients = list[Tensor](), list[Tensor]()
        for step, states in enumerate(self._states(windows, features)):
            # Compute the gradient step by step, so that only one step's logits are in memory.
            leaf = states.detach().requires_grad_()
            guessed, _ = self.heads.outcome(leaf)
            loss = F.cross_entropy(guessed.flatten(0, 1), targets[:, 1 + step :].flatten(0, 1), reduction="none")
            counted = is_counted[:, 1 + step :].flatten()
            (share * DECAY**step * (loss * counted).mean()).backward()  # type: ignore[no-untyped-call]
            assert leaf.grad is not None
            passed.append(states)
            gradients.append(leaf.grad)
            if step == 0:
                first = share * float((loss.detach() * counted).sum() / counted.sum().clamp(min=1))
        torch.autograd.backward(passed, gradients)
        return first

    def _guessed(self, windows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        features, logits = read_features(self._model, windows, self.layers)
        best = logits.argmax(-1)
        for step, states in enumerate(self._states(windows, features)):
            guessed, _ = self.heads.outcome(states)
            places = guessed.topk(min(max(TOLD_RANKS), guessed.shape[-1])).indices
            yield self._ids[places].flatten(0, 1), best[:, 1 + step :].flatten()

    def _states(self, tokens: Tensor, features: Tensor) -> Iterator[Tensor]:
        """Yield the heads' states of each step of training-time test, [rows, length - 1 - step, d'], for tokens [rows,
        length] and the target's features [rows * length, m, d]."""
        rows, length = tokens.shape
        read = self.heads.fused(features).view(rows, length, -1)
        positions = torch.arange(length, device=tokens.device).expand(rows, -1)
        keys, values = list[Tensor](), list[Tensor]()
        for step in range(self.plan.ttt_steps):
            count = length - 1 - step  # a row needs the token after it
            u, residual = self.heads.inputs(tokens[:, 1 + step :], read[:, :count])
            query, key, value = self.heads.projected(u, positions[:, :count] + step)
            keys = [*(own[:, :count] for own in keys), key]
            values = [*(own[:, :count] for own in values), value]
            # Attention weights take length^2 numbers per head: keep only one step's, and recompute them for gradients.
            attended: Tensor = checkpoint(_attended, query, keys, values, use_reentrant=False)
            read = self.heads.state(residual, attended)  # without norm_output, guesses read the states themselves
            yield read

    def _stored(self) -> tuple[Mapping[str, Tensor], Mapping[str, object]]:
        """Return the heads in EAGLE's layout."""
        weights, shape, vocabulary = self._weights, self.heads.shape, self.heads.vocabulary
        assert isinstance(weights.output, Tensor)
        sizes = [count * shape.width for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
        query, key, value = torch.split(weights.project, sizes)
        gate, up = weights.gate_and_up.chunk(2)
        parts = {
            "fusion": weights.fusion.product,
            "embedding_norm": weights.embedding_norm,
            "hidden_norm": weights.hidden_norm,
            "q": query,
            "k": key,
            "v": value,
            "o": weights.project_back,
            "mlp_norm": weights.mlp_norm,
            "gate": gate,
            "up": up,
            "down": weights.down,
            "last_norm": weights.last_norm,
            "output": weights.output,
        }
        stored = {tensor_name(part, NAMES): tensor for part, tensor in parts.items()}
        if shape.outputs < vocabulary:
            ids = self._ids.cpu()
            stored |= {"d2t": ids - torch.arange(shape.outputs), "t2d": self._is_known.cpu()}
        return stored, {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **layer_fields(self._sizes, layers=1, context=self.plan.length, vocabulary=vocabulary),
            "target_hidden_size": shape.stream,
            "draft_vocab_size": shape.outputs,
            "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: list(self.layers)},
        }


def layers_read(count: int) -> tuple[int, int, int]:
    """Return the layers whose features the heads read, for a target of `count` layers: the third, the middle and the
    third to last, as in EAGLE. In a shallow target they are one near the beginning, the middle one and the last."""
    if count >= MIN_LAYERS:
        return 2, count // 2, count - 3
    return count // 6, count // 2, count - 1


def most_frequent(tokens: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` most frequent tokens among tokens [n], ascending, int64; fewer if fewer ids occur.
    Of equally frequent ids, the lower ones win."""
    counts = torch.bincount(tokens)
    by_frequency = counts.argsort(descending=True, stable=True)[: min(count, int((counts > 0).sum()))]
    return by_frequency.sort().values


def _attended(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return the attention output [rows, n, heads * width] of queries [rows, n, heads, width]. Row t attends to the
    rows up to t of the first keys [rows, n, kv_heads, width], and only to row t of each further tensor of keys."""
    shared = query.shape[2] // keys[0].shape[2]
    keys, values = ([own.repeat_interleave(shared, dim=2) for own in parts] for parts in (keys, values))
    text = torch.einsum("rqhw,rkhw->rhqk", query, keys[0])
    is_later = torch.ones(text.shape[2:], dtype=torch.bool, device=text.device).triu(1)
    text = text.masked_fill(is_later, -torch.inf)
    own = [(query * key).sum(-1).transpose(1, 2)[..., None] for key in keys[1:]]
    weights = (torch.cat([text, *own], dim=-1) * query.shape[-1] ** -0.5).softmax(-1)
    count = text.shape[-1]
    output = torch.einsum("rhqk,rkhw->rqhw", weights[..., :count], values[0])
    for place, value in enumerate(values[1:], count):
        output = output + weights[..., place].transpose(1, 2)[..., None] * value
    return output.flatten(2)


def _shape_for(sizes: LayerSizes, features: int, outputs: int) -> Eagle3Shape:
    """Return the shape of heads with the sizes of a target's layers."""
    return Eagle3Shape(**vars(sizes), stream=sizes.hidden, features=features, outputs=outputs)


def _untrained(shape: Eagle3Shape, model: PreTrainedModel, output: Tensor, seed: int) -> Eagle3Weights:
    """Return initial weights, float32, with a copy of the target's `output` rows. The fused features g start as the
    last feature, close to that output head's input: after 40 steps on the demo target, the loss was 0.18 nats lower
    than from random weights alone."""
    begun = Untrained(seed, model.device)
    table: Any = model.get_input_embeddings()
    hidden, queries = shape.hidden, shape.heads * shape.width
    return Eagle3Weights(
        fusion=Fusion(begun.fusion(hidden, shape.features), USUAL_EPSILON),
        embedding_norm=begun.norm(hidden),
        hidden_norm=begun.norm(hidden),
        project=begun.product(queries + 2 * shape.kv_heads * shape.width, 2 * hidden),
        project_back=begun.product(hidden, queries),
        mlp_norm=begun.norm(hidden),
        gate_and_up=begun.product(2 * shape.inner, hidden),
        down=begun.product(hidden, shape.inner),
        last_norm=begun.norm(hidden),
        embeddings=table.weight.detach(),
        output=output.to(torch.float32, copy=True),
    )
