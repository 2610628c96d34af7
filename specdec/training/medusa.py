"""Training Medusa heads beside a frozen target ("Medusa-1", Cai et al. 2024, section 3.2.1).

The target reads windows of text once; its hidden states are the heads' inputs, and its own distributions their labels:
head i at position t learns the target's distribution of the token at t + 2 + i. Labels of that kind take fewer tokens
than single ones (Hinton et al. 2015). The loss is the sum of the heads' cross-entropies weighted by 0.8^(i + 1).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.heads.medusa import MedusaHeads
from specdec.engine.hf.hidden_states import with_hidden_states
from specdec.engine.model_file import ModelDirectoryError, read_fields
from specdec.training.texts import Windows

STATE, PLAN, TEXTS = "training.safetensors", "training.json", "texts.safetensors"
"""Files of a training that is not over: heads and moments in float32 with the steps done, its plan, and its tokens."""

DONE = "done"
"""Name of the number of steps among the tensors of STATE."""

DECAY = 0.8
"""Weight of a head's loss, relative to the head before it."""

WARM_UP = 0.1
"""Part of the steps in which the learning rate rises."""

MOMENTS = "exp_avg", "exp_avg_sq"
BETAS, EPSILON = (0.9, 0.95), 1e-8
TOLD_RANKS = (1, 3, 10)


class ResumeError(ModelDirectoryError):
    """Raised, with a one-line message, if a training cannot go on."""


@dataclass(frozen=True)
class TrainingPlan:
    """The parameters of a training. On one machine, the same plan and texts give the same heads."""

    heads: int = 5
    layers: int = 1
    own_outputs: bool = False
    steps: int = 2000
    rows: int = 8  # windows of a step
    length: int = 256  # tokens of a window
    rate: float = 1e-3
    seed: int = 0


@dataclass(frozen=True)
class Origin:
    """The target and the text that a training was begun with."""

    target: str  # its name
    text: str  # digest of the files of text
    own_tokens: int  # written by the target, besides


class HeadTraining:
    """A training of Medusa heads: call `step` until `over`, and `save` at any time."""

    def __init__(self, model: PreTrainedModel, windows: Windows, plan: TrainingPlan, origin: Origin) -> None:
        self.plan = plan
        self.origin = origin
        self.done = 0  # steps
        self._model = model.requires_grad_(False).eval()
        self._windows = windows
        head = model.get_output_embeddings()
        self.heads = MedusaHeads.untrained(plan.heads, plan.layers, head, own_outputs=plan.own_outputs)
        parameters = (self.heads.weights, self.heads.biases, self.heads.outputs)
        self._trained = [parameter.requires_grad_() for parameter in parameters if parameter is not None]
        self._optimizer = torch.optim.AdamW(self._trained, lr=plan.rate, betas=BETAS, eps=EPSILON, weight_decay=0.0)

    @property
    def over(self) -> bool:
        return self.done >= self.plan.steps

    def step(self) -> float:
        """Train on one batch of windows; return the loss of the first head, in nats a token."""
        plan = self.plan
        for group in self._optimizer.param_groups:
            group["lr"] = plan.rate * _schedule(self.done / plan.steps)
        hidden, targets = self._read(self._windows.batch(plan.rows, plan.seed, self.done))
        first = math.nan
        for number in range(plan.heads):
            ahead = number + 1
            logits = self.heads.head(number, hidden[:, :-ahead].flatten(0, 1))
            loss = F.cross_entropy(logits, targets[:, ahead:].flatten(0, 1))
            (DECAY**ahead * loss).backward()  # type: ignore[no-untyped-call]
            first = loss.item() if number == 0 else first
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return first

    @torch.no_grad()
    def accuracies(self, most: int = 64) -> list[dict[int, float]]:
        """Return, for each head, the part of held-out positions at which the target's likeliest token is among the
        head's k likeliest, by k in TOLD_RANKS; over `most` windows, evenly spread."""
        hits = torch.zeros(self.plan.heads, max(TOLD_RANKS))
        count = torch.zeros(self.plan.heads, 1)
        held_out = self._windows.held_out
        spread = torch.linspace(0, len(held_out) - 1, min(most, len(held_out))).long()
        for rows in torch.split(held_out[spread], self.plan.rows):
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

    # --- files --------------------------------------------------------------------------------------

    def save(self, out: Path) -> None:
        """Write the heads in vLLM's layout, and the state to go on from while the training is not `over`. Heads without
        an output head of their own use the target's."""
        out.mkdir(parents=True, exist_ok=True)
        shape = self.heads.shape
        stored = {name: tensor.to(torch.bfloat16) for name, tensor in _named(self.heads)}
        if self.plan.own_outputs:
            assert self.heads.outputs is not None
            outputs = self.heads.outputs.detach().to(torch.bfloat16)
            stored |= {f"lm_heads.{number}.weight": outputs[number].clone() for number in range(shape.heads)}
        _replace(out / "model.safetensors", stored)
        (out / "model.safetensors").chmod(0o644)  # for services of other users; texts stay private
        _write_json(
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
        if self.over:
            for name in (STATE, PLAN, TEXTS):
                (out / name).unlink(missing_ok=True)
            return
        _write_json(out / PLAN, {**asdict(self.origin), "plan": asdict(self.plan)})
        state: dict[str, Tensor] = {DONE: torch.tensor(self.done)}
        for number, parameter in enumerate(self._trained):
            state[f"{number}"] = parameter.detach().clone()
            for name in MOMENTS:
                if self.done:
                    state[f"{number}.{name}"] = self._optimizer.state[parameter][name].clone()
        _replace(out / STATE, state)

    def resume(self, out: Path) -> None:
        """Go on from the state in a directory that `check_unfinished` has passed; ResumeError if it does not fit the
        target."""
        state = load_file(out / STATE)
        done = int(state[DONE])
        for number, parameter in enumerate(self._trained):
            if f"{number}" not in state or state[f"{number}"].shape != parameter.shape:
                raise ResumeError(f"{out / STATE}: is not of this target")
            parameter.data.copy_(state[f"{number}"])
            if done:
                moments = {name: state[f"{number}.{name}"].to(parameter.device) for name in MOMENTS}
                self._optimizer.state[parameter] = {"step": torch.tensor(float(done)), **moments}
        self.done = done


def check_unfinished(
    out: Path, plan: TrainingPlan, *, target: str, text: str | None = None, own_tokens: int | None = None
) -> Origin:
    """Return the origin of the unfinished training in a directory; ResumeError, naming the option, if there is none, or
    one of another plan, target or text. `text`, `own_tokens`: as in Origin; None: those of the beginning."""
    missing = [name for name in (PLAN, STATE, TEXTS) if not (out / name).is_file()]
    kept = read_fields(out / PLAN)
    if kept is None or missing:
        raise ResumeError(f"{out}: has no unfinished training: {', '.join(missing)} not found")
    begun = kept.fields("plan").content
    for name, value in asdict(plan).items():
        if begun.get(name) != value:
            option = name.replace("_", "-")
            raise ResumeError(f"{out}: was begun with --{option} {begun.get(name)}, cannot go on with {value}")
    origin = Origin(kept.text("target"), kept.text("text"), kept.integer("own_tokens", 0, 2**63))
    if origin.target != target:
        raise ResumeError(f"{out}: was begun for {origin.target}, cannot go on for {target}")
    if text not in (None, origin.text):
        raise ResumeError(
            f"{out}: was begun with another --text, and keeps it: go on without --text, or begin elsewhere"
        )
    if own_tokens not in (None, origin.own_tokens):
        raise ResumeError(f"{out}: was begun with --own-tokens {origin.own_tokens}, cannot go on with {own_tokens}")
    return origin


def write_texts(out: Path, tokens: Tensor) -> None:
    """Write the tokens of a training, int64 [n], readable by their owner alone."""
    out.mkdir(parents=True, exist_ok=True)
    _replace(out / TEXTS, {"tokens": tokens})


def _schedule(progress: float) -> float:
    """Return the learning rate relative to its peak: a linear rise, then a cosine to zero."""
    if progress < WARM_UP:
        return (progress + 1e-3) / (WARM_UP + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


def _named(heads: MedusaHeads) -> Iterator[tuple[str, Tensor]]:
    for number in range(heads.shape.heads):
        for layer in range(heads.shape.layers):
            name = f"blocks.{number}.layers.{layer}"
            yield f"{name}.weight", heads.weights.detach()[number, layer].clone()
            if heads.biases is not None:
                yield f"{name}.bias", heads.biases.detach()[number, layer].clone()


def _replace(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors so that a file there is either the old or the new one."""
    partial = file.with_name(f"{file.name}.partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, file)


def _write_json(file: Path, content: dict[str, object]) -> None:
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, file)
