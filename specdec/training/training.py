"""The common part of all trainings: steps of AdamW on a schedule, and a state to resume from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from specdec.engine.memory import free_bytes
from specdec.engine.placement import BYTES
from specdec.engine.preflight.memory_needed import in_gigabytes
from specdec.engine.unsupported import UnsupportedModelError
from specdec.training.files import PLAN, STATE, TEXTS, as_stored, make_folder, read_tensors, replace_tensors
from specdec.training.plan import DivergedError, Origin, Plan, ResumeError, write_plan

DONE = "done"
"""Name of the tensor in STATE that holds the number of steps."""

WARM_UP = 0.1
"""Fraction of the steps during which the learning rate rises."""

LOGITS_A_PASS = 1 << 26
"""Maximum logits of a model in one pass, 256 MB in float32; a step over more windows takes several passes."""

COPIES = 3
"""Additional float32 numbers per weight: its gradient and two moments."""

LOGIT_COPIES = 8
"""Float32 numbers per logit of a pass: logits, logarithms and probabilities of both models, and gradients."""

LAYER_NUMBERS = 20
"""Float32 numbers that a layer keeps for the gradients, for each token of a pass and each of its hidden dimensions. On
a small Llama, 19 were measured."""

ATTENTION_COPIES = 4
"""Float32 numbers for each attention weight, in layers that compute the weights of a whole window at once."""

MOMENTS = "exp_avg", "exp_avg_sq"
STEP = "step"
BETAS, EPSILON = (0.9, 0.95), 1e-8


class Batches(Protocol):
    """The source of a step's windows; the same seed and step give the same ones."""

    def batch(self, rows: int, seed: int, step: int) -> Tensor:
        """Return `rows` windows to train on, int64 [rows, length], or their numbers, int64 [rows]."""


P = TypeVar("P", bound=Plan)


class Training(ABC, Generic[P]):
    """A training, such as of heads or of a draft. Call `step` until `over`, and `save` at any time."""

    unit = "step"

    trains: ClassVar[str]
    """Name of what is trained, in PLAN and in messages."""

    resumable = True
    """False: only the trained weights are written, and no state to resume from."""

    def __init__(
        self,
        plan: P,
        origin: Origin,
        batches: Batches,
        trained: Iterable[Tensor],
        max_norm: float = math.inf,
    ) -> None:
        """`trained`: the weights to learn, float32. `max_norm`: limit on the norm of a step's gradient."""
        self.plan = plan
        self.origin = origin
        self.done = 0  # steps
        self._batches = batches
        self._trained = [parameter.requires_grad_() for parameter in trained]
        self._max_norm = max_norm
        self._optimizer = torch.optim.AdamW(self._trained, lr=plan.rate, betas=BETAS, eps=EPSILON, weight_decay=0.0)

    @property
    def total(self) -> int:
        return self.plan.steps

    @property
    def over(self) -> bool:
        return self.done >= self.total

    def step(self) -> float:
        """Train on one batch of windows; return the loss for `describe`. DivergedError if the loss or the gradient is
        not finite."""
        plan = self.plan
        for group in self._optimizer.param_groups:
            group["lr"] = plan.rate * _schedule(self.done / plan.steps)
        loss = self._learn(self._batches.batch(plan.rows, plan.seed, self.done))
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self._max_norm).item()
        if not math.isfinite(loss + norm):
            raise DivergedError(f"step {self.done + 1} has no finite loss or gradient: begin again with a lower --rate")
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return loss

    @abstractmethod
    def describe(self, loss: float) -> str:
        """Return a human-readable line about the last step."""

    @abstractmethod
    def _learn(self, windows: Tensor) -> float:
        """Accumulate the gradients of a batch, as returned by `Batches`; return its loss."""

    @abstractmethod
    def _write(self, out: Path) -> None:
        """Write the weights trained so far, ready for use."""

    def _complete(self, out: Path) -> None:
        """Mark the trained weights as complete."""

    def _kept(self) -> dict[str, object]:
        """Return additional fields of PLAN."""
        return {}

    # --- files --------------------------------------------------------------------------------------

    def save(self, out: Path) -> None:
        """Write the trained weights and, while the training is not `over`, the state to resume from. WriteError if a
        file cannot be written; the previous files are kept."""
        make_folder(out)
        if not self.over and self.resumable:
            replace_tensors(out / STATE, self._state())
            write_plan(
                out, self.trains, self.plan, self.origin, **self._kept()
            )  # last, because it makes the training resumable
        self._write(out)
        if self.over:
            self._complete(out)
            for name in (PLAN, STATE, TEXTS):  # plan first: without it, leftovers cannot be resumed
                (out / name).unlink(missing_ok=True)

    def _state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {DONE: torch.tensor(self.done)}
        for number, parameter in enumerate(self._trained):
            state[f"{number}"] = as_stored(parameter)
            moments = self._optimizer.state.get(parameter, {})  # empty for a weight that no step has used
            for name in MOMENTS:
                if name in moments:
                    state[f"{number}.{name}"] = as_stored(moments[name])
            if moments and moments[STEP].item() != self.done:
                state[f"{number}.{STEP}"] = as_stored(moments[STEP])
        return state

    def resume(self, out: Path) -> None:
        """Resume from the state in a directory whose plan has been checked; ResumeError if the state does not fit the
        model."""
        state = read_tensors(out / STATE)
        numbered = [(f"{number}", parameter) for number, parameter in enumerate(self._trained)]
        if DONE not in state or any(name not in state or state[name].shape != to.shape for name, to in numbered):
            raise ResumeError(f"{out / STATE}: belongs to another model")
        done = int(state[DONE])
        for number, parameter in numbered:
            parameter.data.copy_(state[number])
            moments = {
                name: state[f"{number}.{name}"].to(parameter.device, copy=True)  # the file is memory-mapped
                for name in MOMENTS
                if f"{number}.{name}" in state
            }
            if moments:
                step = state.get(f"{number}.{STEP}", torch.tensor(float(done)))
                self._optimizer.state[parameter] = {STEP: step, **moments}
        self.done = done


def rows_a_pass(plan: Plan, vocabulary: int) -> int:
    """Return the number of windows of one pass."""
    return max(1, min(plan.rows, LOGITS_A_PASS // (plan.length * vocabulary)))


def activations(tokens: int, hidden: int, layers: int, attention_weights: int = 0) -> int:
    """Return how many float32 numbers a pass keeps for the gradients of `layers` layers that read this many tokens.
    `attention_weights`: number of weights in memory together; 0: attention is computed without keeping any."""
    return LAYER_NUMBERS * tokens * hidden * layers + ATTENTION_COPIES * attention_weights


def check_room(
    name: str,
    trained: Iterable[Tensor],
    plan: Plan,
    vocabulary: int,
    kept: int,
    device: str | torch.device,
    remedy: str,
) -> None:
    """Raise UnsupportedModelError, with the model's name and a remedy, unless the device has room for a training, in
    addition to its models and the weights to learn. `kept`: `activations` for one window of a pass."""
    weights, rows = sum(parameter.numel() for parameter in trained), rows_a_pass(plan, vocabulary)
    logits = rows * plan.length * vocabulary
    needed = BYTES["float32"] * (COPIES * weights + LOGIT_COPIES * logits + rows * kept)
    if needed > (free := free_bytes(str(device))):
        raise UnsupportedModelError(
            f"{name}: training needs {in_gigabytes(needed)} more for gradients, moments, activations and logits, but "
            f"{device} has {in_gigabytes(free)} free: {remedy}"
        )


def _schedule(progress: float) -> float:
    """Return the learning rate relative to its peak: a linear rise, then a cosine to zero."""
    if progress < WARM_UP:
        return (progress + 1e-3) / (WARM_UP + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))
