"""Failover events: changes of pods under a text, and of the use of its draft. Each event is logged, counted and
recorded in the timeline."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import structlog

from orchestrator.text.request_timeline import SampleTimeline

log = structlog.get_logger()

FailoverReason = Literal[
    "verifier_lost", "numerics_changed", "draft_lost", "draft_useless", "draft_back", "draft_paused", "draft_resumed"
]

EXPECTED: frozenset[FailoverReason] = frozenset({"draft_back", "draft_paused", "draft_resumed"})
"""Events logged as info; all others are logged as warnings."""


class FailoverEvents:
    """The failover events of one sample. `of_all` counts those of all samples."""

    def __init__(self, timeline: SampleTimeline, of_all: Counter[str] | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._of_all: Counter[str] = Counter() if of_all is None else of_all
        self._timeline = timeline

    def record(self, reason: FailoverReason, pod: object, why: str = "") -> None:
        self.counts[reason] += 1
        self._of_all[reason] += 1
        self._timeline.failover(reason, str(pod))
        tell = log.info if reason in EXPECTED else log.warning
        tell("failover", reason=reason, pod=str(pod), why=why)
