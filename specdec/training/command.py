"""Preparation of a training by `specdec train-heads`: its target, its texts, and heads to begin or go on with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specdec.engine.hf.pretrained import DTYPES, load
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement
from specdec.engine.preflight.dtype import dtype_of
from specdec.text.tokenizer import Tokenizer
from specdec.training.medusa import TEXTS, HeadTraining, TrainingPlan, check_unfinished
from specdec.training.texts import Windows, continued, tokens_of


@dataclass(frozen=True)
class Wishes:
    """What a training reads, and where it runs."""

    files: Sequence[Path]
    own_tokens: int  # written by the target
    device: str


def prepared(
    directory: ModelDirectory,
    wishes: Wishes,
    plan: TrainingPlan,
    out: Path,
    *,
    resume: bool,
    say: Callable[[str], None],
) -> HeadTraining:
    """Return a training at its beginning, or where the one in `out` stopped. ModelDirectoryError, with a one-line
    message, if a file has no usable text or `out` nothing to go on with."""
    kept = out / TEXTS
    if resume:
        check_unfinished(out, plan)
        tokens = load_file(kept)["tokens"]
    else:
        tokens = tokens_of(wishes.files, Tokenizer(directory), min(directory.end_tokens, default=None))
        Windows(tokens, plan.length)  # refused before the target is loaded
    dtype = dtype_of(directory, Placement("eager", device=wishes.device))
    model = load(directory, DTYPES[dtype], wishes.device)
    model.set_attn_implementation("sdpa")
    if not resume:
        if wishes.own_tokens:
            say(f"the target writes {wishes.own_tokens} tokens to train on")
            rows = -(-wishes.own_tokens // plan.length)
            tokens = torch.cat([tokens, continued(model, tokens, plan.length, rows, plan.seed)])
        out.mkdir(parents=True, exist_ok=True)
        save_file({"tokens": tokens}, kept)
    say(f"training {plan.heads} heads on {len(tokens)} tokens")
    training = HeadTraining(model, Windows(tokens, plan.length), plan)
    if resume:
        training.resume(out)
    return training
