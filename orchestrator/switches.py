"""Changes of pods under one text, and of whether a draft is worth its while: each is logged and counted."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import structlog

log = structlog.get_logger()

Reason = Literal[
    "verifier_lost", "numerics_changed", "draft_lost", "draft_useless", "draft_back", "draft_rests", "draft_works"
]

ORDINARY: frozenset[Reason] = frozenset({"draft_back", "draft_rests", "draft_works"})
"""Nobody need be told of at once."""


class Switches:
    """Of one sample."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, reason: Reason, pod: object, why: str = "") -> None:
        self.counts[reason] += 1
        tell = log.info if reason in ORDINARY else log.warning
        tell("switched", reason=reason, pod=str(pod), why=why)
