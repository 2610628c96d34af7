"""The committed text of one sample: its tokens that are final.

It is the only truth: trees and caches of draft and verifier can be rebuilt from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.sample import Sample


class CommittedText:
    """The generated tokens of one sample so far. `Verification` alone adds to them; who opens a session reads them."""

    def __init__(self, sample: Sample) -> None:
        self._generated = list(sample.generated)

    @property
    def generated(self) -> Sequence[int]:
        """The tokens that follow the prompt."""
        return self._generated

    def add(self, tokens: Sequence[int]) -> None:
        self._generated += tokens
