"""Preparation of a training of heads, to begin or to resume: its target and its texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.engine.model_directory import ModelDirectory
from specdec.text.tokenizer import Tokenizer
from specdec.training.block import BlockPlan, BlockTraining
from specdec.training.eagle3 import Eagle3Plan, Eagle3Training
from specdec.training.files import STATE, clear
from specdec.training.heads import HeadTraining
from specdec.training.medusa import MedusaPlan, MedusaTraining
from specdec.training.models import load_target
from specdec.training.own_text import OwnText, TrainingText
from specdec.training.plan import Origin, Plan, check_unfinished, write_plan
from specdec.training.texts import digest_of, tokens_of

TRAININGS: Mapping[type[Plan], type[MedusaTraining] | type[Eagle3Training] | type[BlockTraining]] = {
    MedusaPlan: MedusaTraining,
    Eagle3Plan: Eagle3Training,
    BlockPlan: BlockTraining,
}
"""The kinds of training, by their plans."""


@dataclass(frozen=True)
class HeadsOptions:
    """The text of a training, and its device."""

    files: Sequence[Path]  # when resuming, none or the same as at the beginning
    own_tokens: int | None  # written by the target; None: no tokens, or, when resuming, the number at the beginning
    device: str


class PreparedHeads:
    """A training of heads with its target loaded: first the target writes `own_text`, then comes the `training`."""

    def __init__(self, model: PreTrainedModel, text: TrainingText, plan: Plan, origin: Origin) -> None:
        self.own_text = OwnText(model, text, plan, origin.own_tokens)
        self._model, self._text, self._plan, self._origin = model, text, plan, origin

    def training(self, out: Path) -> HeadTraining[Any]:
        """Return the training, at its beginning or where the one in `out` stopped. UnsupportedModelError if the device
        has no room for it."""
        vocabulary = int(self._model.config.get_text_config().vocab_size)
        windows = self._text.windows(self._plan.length, vocabulary)
        plan: Any = self._plan  # of the training's kind
        training = TRAININGS[type(plan)](self._model, windows, plan, self._origin)
        if (out / STATE).is_file():
            training.resume(out)
        training.save(out)
        return training


def prepared(directory: ModelDirectory, options: HeadsOptions, plan: Plan, out: Path, *, resume: bool) -> PreparedHeads:
    """Return a training to begin, or to resume where the one in `out` stopped. Afterwards `out` has everything needed
    to resume. ModelDirectoryError or UnsupportedModelError, with a one-line message, if a file has no usable text,
    `out` has nothing to resume, or the target cannot have heads of this kind."""
    kind = TRAININGS[type(plan)]
    digest = digest_of(options.files) if options.files else None
    target = {"target": directory.name, "target_fingerprint": directory.model_fingerprint}
    if resume:
        texts = {"text": digest, "own_tokens": options.own_tokens}
        origin = check_unfinished(out, kind.trains, plan, Origin, **target, **texts)
        text = TrainingText.kept(out)
    else:
        origin = Origin(text=digest or "", own_tokens=options.own_tokens or 0, **target)
        given = tokens_of(options.files, Tokenizer(directory), min(directory.end_tokens, default=None))
        none = torch.empty(0, dtype=torch.int64)
        own = none.view(0, plan.length)
        text = TrainingText(given, none, own, own)
        text.check(plan.length, directory.vocabulary, "target")  # before it is loaded
    model = load_target(directory, options.device)
    kind.check(model)  # before the target writes its own text, which takes long
    if not resume:
        clear(out)
        text.save(out)
        write_plan(out, kind.trains, plan, origin)
    return PreparedHeads(model, text, plan, origin)
