"""Training Medusa heads beside a frozen target ("Medusa-1", Cai et al. 2024, section 3.2.1).

The target reads windows of text once; its hidden states are the heads' inputs, and its own distributions their labels:
head i at position t learns the target's distribution of the token at t + 2 + i. Labels of that kind take fewer tokens
than single ones (Hinton et al. 2015). The loss is the sum of the heads' cross-entropies weighted by 0.8^(i + 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.heads.medusa import MedusaHeads
from specdec.engine.hf.hidden_states import with_hidden_states
from specdec.training.files import STATE, TEXTS, replace_json, replace_tensors
from specdec.training.plan import HEADS, MAX_TOKENS, Origin, Plan, ResumeError, check_texts, plan_begun
from specdec.training.texts import Windows
from specdec.training.training import Training

DECAY = 0.8
"""Weight of a head's loss, relative to the head before it."""

TOLD_RANKS = (1, 3, 10)


@dataclass(frozen=True, kw_only=True)
class HeadPlan(Plan):
    """The parameters of a training of heads."""

    heads: int = 5
    layers: int = 1
    own_outputs: bool = False


class HeadTraining(Training[HeadPlan]):
    """A training of Medusa heads."""

    def __init__(self, model: PreTrainedModel, windows: Windows, plan: HeadPlan, origin: Origin) -> None:
        self._model = model.requires_grad_(False).eval()
        self._windows = windows
        head = model.get_output_embeddings()
        self.heads = MedusaHeads.untrained(plan.heads, plan.layers, head, own_outputs=plan.own_outputs)
        parameters = (self.heads.weights, self.heads.biases, self.heads.outputs)
        super().__init__(plan, origin, windows, [parameter for parameter in parameters if parameter is not None])

    def describe(self, loss: float) -> str:
        return f"step {self.done} of {self.total}, {loss:.3f} nats a token at the first head"

    def _learn(self, windows: Tensor) -> float:
        """Return the loss of the first head, in nats a token."""
        hidden, targets = self._read(windows)
        first = math.nan
        for number in range(self.plan.heads):
            ahead = number + 1
            logits = self.heads.head(number, hidden[:, :-ahead].flatten(0, 1))
            loss = F.cross_entropy(logits, targets[:, ahead:].flatten(0, 1))
            (DECAY**ahead * loss).backward()  # type: ignore[no-untyped-call]
            first = loss.item() if number == 0 else first
        return first

    @torch.no_grad()
    def accuracies(self, most: int = 64) -> list[dict[int, float]]:
        """Return, for each head, the part of held-out positions at which the target's likeliest token is among the
        head's k likeliest, by k in TOLD_RANKS; over `most` windows, evenly spread."""
        hits = torch.zeros(self.plan.heads, max(TOLD_RANKS))
        count = torch.zeros(self.plan.heads, 1)
        for rows in torch.split(self._windows.spread(most), self.plan.rows):
            hidden, targets = self._read(rows)
            best = targets.argmax(-1)
            for number in range(self.plan.heads):
                ahead = number + 1
                logits = self.heads.head(number, hidden[:, :-ahead].flatten(0, 1))
                guesses = logits.topk(max(TOLD_RANKS)).indices
                hits[number] += (guesses == best[:, ahead:].flatten()[:, None]).sum(0).cpu()
                count[number] += len(guesses)
        within = (hits.cumsum(1) / count).tolist()
        return [{rank: row[rank - 1] for rank in TOLD_RANKS} for row in within]

    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's hidden states [rows, length, d] and its distributions [rows, length, V], float32."""
        tokens = tokens.to(self._model.device)
        with torch.no_grad():
            logits, hidden = with_hidden_states(self._model, lambda: self._model(tokens, use_cache=False).logits)
            return hidden.float().view(*tokens.shape, -1), logits.float().softmax(-1)

    def _write(self, out: Path) -> None:
        """Write the heads in vLLM's layout. Heads without an output head of their own use the target's."""
        shape = self.heads.shape
        stored = {name: tensor.to(torch.bfloat16) for name, tensor in _named(self.heads)}
        if self.plan.own_outputs:
            assert self.heads.outputs is not None
            outputs = self.heads.outputs.detach().to(torch.bfloat16)
            stored |= {f"lm_heads.{number}.weight": outputs[number].clone() for number in range(shape.heads)}
        replace_tensors(out / "model.safetensors", stored)
        (out / "model.safetensors").chmod(0o644)  # for services of other users; texts stay private
        replace_json(
            out / "config.json",
            {
                "model_type": "medusa",
                "architectures": ["MedusaModel"],
                "base_model_name_or_path": self.origin.target,
                "hidden_size": shape.hidden,
                "vocab_size": self.heads.vocabulary,
                "num_heads": shape.heads,
                "num_hidden_layers": shape.layers,
                "medusa_fc_bias": True,
                "original_lm_head": not self.plan.own_outputs,
            },
        )


def check_unfinished(
    out: Path, plan: HeadPlan, *, target: str, text: str | None = None, own_tokens: int | None = None
) -> Origin:
    """Return the origin of the unfinished training in a directory; ResumeError, naming the option, if there is none, or
    one of another plan, target or text. `text`, `own_tokens`: as in Origin; None: those of the beginning."""
    kept = plan_begun(out, HEADS, plan, STATE, TEXTS)
    origin = Origin(kept.text("target"), kept.text("text"), kept.integer("own_tokens", 0, MAX_TOKENS))
    if origin.target != target:
        raise ResumeError(f"{out}: was begun for {origin.target}, cannot go on for {target}")
    check_texts(out, origin, text=text, own_tokens=own_tokens)
    return origin


def _named(heads: MedusaHeads) -> Iterator[tuple[str, Tensor]]:
    for number in range(heads.shape.heads):
        for layer in range(heads.shape.layers):
            name = f"blocks.{number}.layers.{layer}"
            yield f"{name}.weight", heads.weights.detach()[number, layer].clone()
            if heads.biases is not None:
                yield f"{name}.bias", heads.biases.detach()[number, layer].clone()
