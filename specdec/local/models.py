"""The models to run on this machine: the given ones, or the demo pair."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from specdec.local.child import LocalError

DEMO = Path(__file__).parents[2] / "demo"


class ModelPaths(NamedTuple):
    """Model directories of a stack."""

    target: Path
    draft: Path | None  # of a draft service
    local_draft: Path | None

    @classmethod
    def chosen(
        cls, target: Path | None = None, draft: str | None = None, local_draft: Path | None = None
    ) -> ModelPaths:
        """Return the models to serve; LocalError if the demo pair is needed and missing. `draft` may be "none". That is
        the default if `target` or `local_draft` is given, since the demo's draft fits only the demo's target."""
        if target is None and not (DEMO / "target" / "config.json").is_file():
            raise LocalError("this installation has no demo pair: give --target, such as demo/target in a checkout")
        default = None if target or local_draft else DEMO / "draft"
        return cls(
            target or DEMO / "target", None if draft == "none" else Path(draft) if draft else default, local_draft
        )
