"""The committed text of one sample: its final tokens.

It is the only source of truth: trees and caches of draft and verifier can be rebuilt from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.requests.sample import Sample


class CommittedText:
    """The generated tokens of one sample so far. Only `Verification` appends to them; sessions are opened with them."""

    def __init__(self, sample: Sample) -> None:
        self._generated = list(sample.generated)

    @property
    def generated(self) -> Sequence[int]:
        """The tokens after the prompt."""
        return self._generated

    def add(self, tokens: Sequence[int]) -> None:
        self._generated += tokens
