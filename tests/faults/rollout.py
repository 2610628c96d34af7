"""A cluster's file of models: two revisions of one model, with changing shares."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tests.faults.pods import Pod


class Rollout:
    """A file followed by orchestrators. Its methods are the actions available to a scenario."""

    def __init__(self, file: Path, verifiers: Mapping[str, tuple[Path, Sequence[Pod]]], drafts: Sequence[Pod]) -> None:
        """`verifiers`: directory and pods of the revisions `a` and `b`; drafts serve both."""
        self.file = file
        self._verifiers = verifiers
        self._drafts = [pod.address for pod in drafts]
        self.back()

    def canary(self) -> None:
        """Give the new revision a small share."""
        self._write(a=90, b=10)

    def half(self) -> None:
        self._write(a=50, b=50)

    def forth(self) -> None:
        """Give the new revision all traffic."""
        self._write(a=0, b=100)

    def back(self) -> None:
        """Give the old revision all traffic, as at first."""
        self._write(a=100, b=0)

    def _write(self, **shares: int) -> None:
        revisions = {
            name: {
                "directory": str(self._verifiers[name][0]),
                "verifiers": [pod.address for pod in self._verifiers[name][1]],
                "drafts": self._drafts,
                "share": share,
            }
            for name, share in shares.items()
        }
        new = self.file.with_suffix(".new")
        new.write_text(yaml.safe_dump({"models": {"m": {"revisions": revisions}}}))
        os.replace(new, self.file)
