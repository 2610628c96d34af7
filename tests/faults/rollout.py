"""The file of models of a cluster: two revisions of one model, and how its shares move."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tests.faults.pods import Pod


class Rollout:
    """A file that orchestrators follow. Its methods are what a scenario may do to it."""

    def __init__(self, file: Path, verifiers: Mapping[str, tuple[Path, Sequence[Pod]]], drafts: Sequence[Pod]) -> None:
        """`verifiers` has the directory and the pods of the revisions `a` and `b`; drafts serve both."""
        self.file = file
        self._verifiers = verifiers
        self._drafts = [pod.address for pod in drafts]
        self.back()

    def canary(self) -> None:
        """Give it some."""
        self._write(a=90, b=10)

    def half(self) -> None:
        self._write(a=50, b=50)

    def forth(self) -> None:
        """Give it all."""
        self._write(a=0, b=100)

    def back(self) -> None:
        """Give all to the old one, as at first."""
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
