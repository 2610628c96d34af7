"""Which models run on this machine: those that were named, or the demo pair."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from specdec.local.child import LocalError

DEMO = Path(__file__).parents[2] / "demo"


class Models(NamedTuple):
    """Directories of the models of a stack."""

    target: Path
    draft: Path | None  # of a draft service
    local_draft: Path | None

    @classmethod
    def chosen(cls, target: Path | None = None, draft: str | None = None, local_draft: Path | None = None) -> Models:
        """Return what to serve. `draft` may be "none"; that is the default if `target` or `local_draft` is given, since
        the demo's draft fits no other target than the demo's."""
        if target is None and not (DEMO / "target" / "config.json").is_file():
            raise LocalError("this installation has no demo pair: give --target, such as demo/target of a checkout")
        default = None if target or local_draft else DEMO / "draft"
        return cls(
            target or DEMO / "target", None if draft == "none" else Path(draft) if draft else default, local_draft
        )
