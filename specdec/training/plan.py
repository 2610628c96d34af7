"""The plan and the origin of a training, and whether an unfinished one can be resumed with them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, TypeVar

from specdec.engine.model_file import Fields, ModelDirectoryError, read_fields
from specdec.training.files import PLAN, TEXTS, make_folder, replace_json

TRAINS = "trains"
"""Field of PLAN: what is trained."""

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

    @classmethod
    def kept(cls, fields: Fields) -> Self:
        """Return the origin in PLAN."""
        return cls(
            fields.text("target"),
            fields.text("text"),
            fields.integer("own_tokens", 0, MAX_TOKENS),
            fields.text("target_fingerprint"),
        )


Kept = TypeVar("Kept", bound=Origin)

MODELS = {"target": "for", "draft": "from"}
"""Fields of an origin with the names of models, and the prepositions before these names in messages."""


def write_plan(out: Path, trains: str, plan: Plan, origin: Origin, **more: object) -> None:
    """Write PLAN. WriteError if that fails."""
    make_folder(out)
    replace_json(out / PLAN, {TRAINS: trains, **asdict(origin), "plan": asdict(plan), **more})


def plan_begun(out: Path, trains: str, plan: Plan, *needed: str) -> Fields:
    """Return the fields of PLAN of an unfinished training. ResumeError if there is none, if it trains something else,
    or if it has another plan; then the error names the option. `needed`: further files that must exist."""
    missing = [name for name in (PLAN, *needed) if not (out / name).is_file()]
    kept = read_fields(out / PLAN)
    if kept is None or missing:
        raise ResumeError(f"{out}: has no unfinished training: {', '.join(missing)} not found")
    if (found := kept.content.get(TRAINS)) != trains:
        raise ResumeError(f"{out}: has an unfinished training of {found}, not of {trains}")
    begun = kept.fields("plan").content
    for name, value in asdict(plan).items():
        if begun.get(name) != value:
            option = name.replace("_", "-")
            raise ResumeError(f"{out}: was started with --{option} {begun.get(name)}, cannot be resumed with {value}")
    return kept


def check_unfinished(out: Path, trains: str, plan: Plan, origin: type[Kept], **given: str | float | None) -> Kept:
    """Return the origin of the unfinished training in a directory. ResumeError if there is none, if it trains something
    else, or if it has another plan, model or text; then the error names the option. `given`: fields of the origin;
    None: the value at the beginning."""
    found = origin.kept(plan_begun(out, trains, plan, TEXTS))
    for name, value in given.items():
        begun, option = getattr(found, name), f"--{name.replace('_', '-')}"
        model = name.removesuffix("_fingerprint")
        if value in (None, begun):
            continue
        if name in MODELS:
            how = f"{MODELS[name]} {begun}, cannot be resumed {MODELS[name]} {value}"
        elif model in MODELS:
            how = f"{MODELS[model]} another {getattr(found, model)}: its configuration or weights have changed"
        elif isinstance(value, str):
            how = (
                f"with other {option} files, whose tokens are stored here: resume without {option}, or use another OUT"
            )
        else:
            how = f"with {option} {begun}, cannot be resumed with {value}"
        raise ResumeError(f"{out}: was started {how}")
    return found
