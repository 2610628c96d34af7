"""The number of prompts of an HTTP request. Each is a request of its own to an orchestrator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PROMPTS = "specdec-prompts"
"""Metadata key of the number."""

MAX_DIGITS = 6
"""Maximum digits of the number; longer ones are ignored."""


def prompts_in(metadata: Iterable[tuple[str, Any]]) -> int:
    """Return the number of prompts in the HTTP request that a call belongs to; 1 if the metadata has no number."""
    given = dict(metadata).get(PROMPTS, "1")
    return int(given) if isinstance(given, str) and given.isdecimal() and len(given) <= MAX_DIGITS else 1
