"""The plan and the origin of a training, and whether an unfinished one can be resumed with them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from specdec.engine.model_file import Fields, ModelDirectoryError, read_fields
from specdec.training.files import PLAN, make_folder, replace_json

TRAINS = "trains"
"""Field of PLAN: what is trained. A plan for Medusa heads may lack it."""

MEDUSA, EAGLE3, DSPARK, DRAFT = "Medusa heads", "EAGLE-3 heads", "a DSpark block draft", "a draft"

MAX_TOKENS = 2**63


class DivergedError(Exception):
    """Raised, with a one-line message, if a step has no finite loss or gradient. The step changes no weight."""


class ResumeError(ModelDirectoryError):
    """Raised, with a one-line message, if a training cannot be resumed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parameters of a training. On one machine with the same number of threads, the same plan and texts give the
    same weights."""

    steps: int = 2000
    rows: int = 8  # windows of a step
    length: int = 256  # tokens of a window
    rate: float = 1e-3
    seed: int = 0


@dataclass(frozen=True)
class Origin:
    """The target and the text that a training started with."""

    target: str  # its name
    text: str  # digest of the files of text
    own_tokens: int  # additional tokens, written by the target
    target_fingerprint: str


def write_plan(out: Path, plan: Plan, origin: Origin, **more: object) -> None:
    """Write PLAN. WriteError if that fails."""
    make_folder(out)
    replace_json(out / PLAN, {**asdict(origin), "plan": asdict(plan), **more})


def plan_begun(out: Path, trains: str, plan: Plan, *needed: str) -> Fields:
    """Return the fields of PLAN of an unfinished training. ResumeError, naming the option, if there is none, or if it
    trains something else or has another plan. `needed`: further files that must exist."""
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
            raise ResumeError(f"{out}: was started with --{option} {begun.get(name)}, cannot be resumed with {value}")
    return kept


def check_model(out: Path, word: str, begun: tuple[str, str], found: tuple[str, str]) -> None:
    """Raise ResumeError unless a training is resumed with the model that it started with. `begun`, `found`: name and
    fingerprint; `word`: preposition before the model's name in the message."""
    if found[0] != begun[0]:
        raise ResumeError(f"{out}: was started {word} {begun[0]}, cannot be resumed {word} {found[0]}")
    if found[1] != begun[1]:
        raise ResumeError(f"{out}: was started {word} another {found[0]}: its configuration or weights have changed")


def check_texts(out: Path, origin: Origin, *, text: str | None, own_tokens: int | None) -> None:
    """Raise ResumeError unless a training is resumed with the text that it started with. `text`: digest of the files.
    `text` or `own_tokens` of None means the value at the beginning."""
    if text not in (None, origin.text):
        raise ResumeError(
            f"{out}: was started with another --text, and keeps it: continue without --text, or start elsewhere"
        )
    if own_tokens not in (None, origin.own_tokens):
        raise ResumeError(
            f"{out}: was started with --own-tokens {origin.own_tokens}, cannot be resumed with {own_tokens}"
        )
