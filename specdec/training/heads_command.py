"""Preparation of a training of heads, to begin or to resume: its target and its texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdec.engine.model_directory import ModelDirectory
from specdec.progress import ProgressLines
from specdec.text.tokenizer import Tokenizer
from specdec.training.block import BlockPlan, BlockTraining
from specdec.training.eagle3 import Eagle3Plan, Eagle3Training
from specdec.training.files import TEXTS, clear, read_tensors, write_texts
from specdec.training.heads import HeadTraining, check_unfinished
from specdec.training.medusa import MedusaPlan, MedusaTraining
from specdec.training.models import load_target
from specdec.training.plan import Origin, Plan
from specdec.training.texts import PROMPT_TOKENS, Windows, continued, digest_of, tokens_of
from specdec.training.time_limit import TimeLimit

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
    limit: TimeLimit = field(default_factory=TimeLimit)  # when it is reached, the target writes no more


def prepared(
    directory: ModelDirectory,
    options: HeadsOptions,
    plan: Plan,
    out: Path,
    *,
    resume: bool,
    say: Callable[[str], None],
) -> HeadTraining[Any]:
    """Return a training at its beginning, or where the one in `out` stopped. Afterwards `out` has everything needed to
    resume. ModelDirectoryError or UnsupportedModelError, with a one-line message, if a file has no usable text, `out`
    has nothing to resume, or the target cannot have heads of this kind."""
    kind = TRAININGS[type(plan)]
    text = digest_of(options.files) if options.files else None
    if resume:
        origin = check_unfinished(
            out, kind.trains, plan, target=directory.name, text=text, own_tokens=options.own_tokens
        )
        windows = Windows(read_tensors(out / TEXTS)["tokens"], plan.length)
    else:
        assert text is not None
        origin = Origin(directory.name, text, options.own_tokens or 0)
        ids = tokens_of(options.files, Tokenizer(directory), min(directory.end_tokens, default=None))
        windows = Windows(ids, plan.length)  # raises TextError before the target is loaded
    model = load_target(directory, options.device)
    kind.check(model)  # before the target writes its own text, which takes long
    if not resume and options.own_tokens:
        say(f"the target writes {options.own_tokens} tokens to train on")
        written = plan.length - PROMPT_TOKENS  # tokens of a text
        rows = -(-options.own_tokens // written)
        begun = windows.trained.flatten()  # excludes held-out windows
        lines = ProgressLines(say, rows)
        with options.limit.running() as until:
            own = continued(
                model,
                begun,
                plan.length,
                rows,
                plan.seed,
                until=until,
                wrote=lambda texts: lines.heard(texts, f"{texts * written} tokens written"),
            )
        windows = Windows(torch.cat([windows.tokens, own]), plan.length)
    its_plan: Any = plan  # of this kind
    training = kind(model, windows, its_plan, origin)
    if resume:
        training.resume(out)
    else:
        clear(out)
        write_texts(out, windows.tokens)
        training.save(out)
    say(f"training {training.trains} on {len(windows.tokens)} tokens")
    return training
