"""Changes of pods under one text: each is logged and counted."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import structlog

log = structlog.get_logger()

Reason = Literal["verifier_lost", "numerics_changed", "draft_lost", "draft_useless", "draft_back"]


class Switches:
    """Of one sample."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, reason: Reason, pod: object, why: str = "") -> None:
        self.counts[reason] += 1
        log.warning("switched", reason=reason, pod=str(pod), why=why)
