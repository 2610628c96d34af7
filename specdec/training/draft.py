"""Distillation of a draft from its target (Hinton et al. 2015): at every position of a text, the draft learns the
target's whole distribution of the next token.

All weights of the draft learn, in float32. The training text is text that the target reads or writes (on-policy for the
target, Zhou et al. 2024, DistillSpec), since the draft sees such text in service.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.model_file import Fields
from specdec.training.divergences import NAMES, Acceptance, Loss, acceptance, divergence, overruled
from specdec.training.draft_files import DraftFiles
from specdec.training.files import complete
from specdec.training.plan import DRAFT, Origin, Plan, plan_begun
from specdec.training.texts import Mixture, Windows
from specdec.training.training import Batches, Training, rows_a_pass

MAX_NORM = 1.0
"""Limit on the norm of a step's gradient."""

HELD_OUT_WINDOWS = 32
"""Maximum windows on which a draft is measured."""

BEFORE = "before"
"""Field of PLAN: acceptance before the first step, by kind of text."""

NEW, OLD = "held-out text", "replay"
"""Kinds of text on which a draft is measured."""


@dataclass(frozen=True, kw_only=True)
class DraftPlan(Plan):
    """The parameters of a draft's training."""

    untrained: bool = False  # starts from random weights
    loss: Loss = "forward"
    overruled: float = 0.0  # extra weight of positions where the target's likeliest token is not the draft's


@dataclass(frozen=True)
class DraftOrigin(Origin):
    """The models and texts that a draft's training started with."""

    draft: str  # its name
    draft_fingerprint: str
    replay: str  # digest of the files of older text; empty if there are none
    replay_share: float

    @classmethod
    def kept(cls, fields: Fields) -> Self:
        return cls(
            **vars(Origin.kept(fields)),
            draft=fields.text("draft"),
            draft_fingerprint=fields.text("draft_fingerprint"),
            replay=fields.text("replay"),
            replay_share=fields.number("replay_share"),
        )


class DraftTraining(Training[DraftPlan]):
    """A training of a draft beside its frozen target."""

    trains = DRAFT

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        mixture: Mixture,
        plan: DraftPlan,
        origin: DraftOrigin,
        files: DraftFiles,
        batches: Batches | None = None,
    ) -> None:
        """`draft` is in float32, on the target's device. `batches` provides the input of `_learn`; None: windows of the
        mixture."""
        self.before: dict[str, Acceptance] = {}
        """Acceptance before the first step, by kind of text; empty until `measure_before`."""
        self._target = target.requires_grad_(False).eval()
        self._draft = draft.requires_grad_(True).eval()  # without dropout, a step depends only on its windows
        self._mixture = mixture
        self._files = files
        super().__init__(plan, origin, batches or mixture, draft.parameters(), MAX_NORM)

    def describe(self, loss: float) -> str:
        return f"step {self.done} of {self.total}, {NAMES[self.plan.loss]} {loss:.3f}"

    def _learn(self, windows: Tensor) -> float:
        """Return the mean divergence of the batch, without the extra weight of overruled positions."""
        total = 0.0
        for log_p, log_q in self._passes(windows):
            apart = divergence(self.plan.loss, log_p, log_q)
            weighted = apart * (1 + self.plan.overruled * overruled(log_p, log_q))
            (weighted.sum() / windows.numel()).backward()  # type: ignore[no-untyped-call]
            total += apart.sum().item()
        return total / windows.numel()

    def _passes(self, windows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield log-probabilities [rows, length, V] of target and draft for some windows at a time, over the token ids
        that both have. The logits of a position describe the token after it."""
        for rows in torch.split(windows.to(self._draft.device), rows_a_pass(self.plan, self._widest)):
            with torch.no_grad():
                p = self._target(rows, use_cache=False).logits
            q = self._draft(rows, use_cache=False).logits
            common = min(p.shape[-1], q.shape[-1])
            yield p[..., :common].float().log_softmax(-1), q[..., :common].float().log_softmax(-1)

    @property
    def _widest(self) -> int:
        return max(int(model.config.get_text_config().vocab_size) for model in (self._target, self._draft))

    # --- measuring ----------------------------------------------------------------------------------

    def measure(self) -> dict[str, Acceptance]:
        """Return the draft's acceptance on text that no step trains on, by kind of text: NEW and, with replay text,
        OLD."""
        found = {NEW: self._on(self._mixture.new)}
        if self._mixture.old is not None:
            found[OLD] = self._on(self._mixture.old)
        return found

    @torch.no_grad()
    def _on(self, windows: Windows) -> Acceptance:
        sums, count = torch.zeros(3, dtype=torch.float64), 0
        for log_p, log_q in self._passes(windows.spread(HELD_OUT_WINDOWS)):
            found = acceptance(log_p.flatten(0, 1), log_q.flatten(0, 1))
            sums += found.sum(0).cpu()
            count += len(found)
        return Acceptance(*(sums / count).tolist())

    def measure_before(self) -> None:
        """Measure the draft before its training, unless that is done already. Call it before the first step."""
        if not self.before:
            assert not self.done, "the draft is no longer as it was"
            self.before = self.measure()

    # --- files --------------------------------------------------------------------------------------

    def _kept(self) -> dict[str, object]:
        return {BEFORE: {kind: list(found) for kind, found in self.before.items()}}

    def _write(self, out: Path) -> None:
        self._files.write(self._draft, out)

    def _complete(self, out: Path) -> None:
        complete(out)

    def resume(self, out: Path) -> None:
        super().resume(out)
        kept = plan_begun(out, self.trains, self.plan).content.get(BEFORE, {})
        self.before = {kind: Acceptance(*found) for kind, found in kept.items()}
