"""Statistics of a verifier: how full and how busy it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from specdec.serving.histogram import Histogram
from verifier_service.backend.result import VerifyResult

LONGEST_TOLD = 16
"""Accepted candidates of a step from which lengths are counted as one."""


@dataclass
class VerifierStats:
    """Counters and gauges of a verifier; the step loop's thread writes them, any thread reads them."""

    running: int = 0
    waiting: int = 0
    waiting_of: Counter[str] = field(default_factory=Counter)  # waiting sessions by tenant; replaced as a whole
    throttled: int = 0  # waiting sessions that are far ahead of their readers
    steps: int = 0
    rows: int = 0
    committed: int = 0  # tokens
    drafted: int = 0  # candidates verified
    accepted: int = 0
    drafted_steps: int = 0  # steps of sessions that have a draft, after which the text goes on
    draft_ready_steps: int = 0  # those of them that ended with the next candidates already there
    refused: int = 0  # messages of candidates that were invalid
    prompt_tokens: int = 0  # tokens that sessions came with, generated ones included
    cached_tokens: int = 0  # those of them that were in the KV cache already
    preemptions: int = 0
    busy: float = 0.0  # seconds spent in steps
    step_begun: float = 0.0  # when the present step began; 0: there is none
    step_expected: float = 0.0  # seconds that the present step is expected to take
    step_seconds: Histogram = field(default_factory=Histogram)
    accepted_lengths: list[int] = field(default_factory=lambda: [0] * (LONGEST_TOLD + 1))
    """Steps of sessions that had candidates, by how many were accepted."""
    lifetime: float = 1.0  # seconds from admission to the end of a session, moving average

    def observe(self, rows: int, seconds: float, results: Iterable[VerifyResult]) -> None:
        """Count a step."""
        self.steps += 1
        self.rows += rows
        self.busy += seconds
        self.step_seconds.observe(seconds)
        for result in results:
            self.committed += len(result.tokens)
            self.drafted += result.offered
            self.accepted += result.accepted
            if result.offered:
                self.accepted_lengths[min(result.accepted, LONGEST_TOLD)] += 1

    def expected_wait(self, waiting: int) -> float:
        """Return the seconds until `waiting` sessions and one more are expected to have got memory."""
        return min(60.0, max(0.1, self.lifetime * (waiting + 1) / max(1, self.running)))
