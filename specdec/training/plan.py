"""The plan and the origin of a training, and whether an unfinished one goes on with them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from specdec.engine.model_file import Fields, ModelDirectoryError, read_fields
from specdec.training.files import PLAN, make_folder, replace_json

TRAINS = "trains"
"""Field of PLAN: what is trained. It may be missing for Medusa heads."""

MEDUSA, EAGLE3, DRAFT = "Medusa heads", "EAGLE-3 heads", "a draft"

MAX_TOKENS = 2**63


class DivergedError(Exception):
    """Raised, with a one-line message, if a step has no finite loss or gradient: it changes no weight."""


class ResumeError(ModelDirectoryError):
    """Raised, with a one-line message, if a training cannot go on."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parameters of a training. On one machine, with one number of threads, the same plan and texts give the same
    weights."""

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


def write_plan(out: Path, plan: Plan, origin: Origin, **more: object) -> None:
    """Write PLAN. WriteError if that fails."""
    make_folder(out)
    replace_json(out / PLAN, {**asdict(origin), "plan": asdict(plan), **more})


def plan_begun(out: Path, trains: str, plan: Plan, *needed: str) -> Fields:
    """Return what PLAN has of an unfinished training; ResumeError, naming the option, if there is none, or one of
    something else or by another plan. `needed`: files that must be there besides."""
    missing = [name for name in (PLAN, *needed) if not (out / name).is_file()]
    kept = read_fields(out / PLAN)
    if kept is None or missing:
        raise ResumeError(f"{out}: has no unfinished training: {', '.join(missing)} not found")
    if (found := kept.content.get(TRAINS, MEDUSA)) != trains:
        raise ResumeError(f"{out}: has an unfinished training of {found}, not of {trains}")
    begun = kept.fields("plan").content
    for name, value in asdict(plan).items():
        if begun.get(name) != value:
            option = name.replace("_", "-")
            raise ResumeError(f"{out}: was begun with --{option} {begun.get(name)}, cannot go on with {value}")
    return kept


def check_texts(out: Path, origin: Origin, *, text: str | None, own_tokens: int | None) -> None:
    """Raise ResumeError unless a training goes on with the text that it was begun with. `text`: digest of the files;
    None, like `own_tokens` None, stands for those of the beginning."""
    if text not in (None, origin.text):
        raise ResumeError(
            f"{out}: was begun with another --text, and keeps it: go on without --text, or begin elsewhere"
        )
    if own_tokens not in (None, origin.own_tokens):
        raise ResumeError(f"{out}: was begun with --own-tokens {origin.own_tokens}, cannot go on with {own_tokens}")
