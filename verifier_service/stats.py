"""How full and how busy a verifier is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class VerifierStats:
    """Written by the loop's thread, read by any."""

    running: int = 0
    waiting: int = 0
    throttled: int = 0  # of those waiting, far ahead of their readers
    steps: int = 0
    rows: int = 0
    committed: int = 0  # tokens
    drafted: int = 0  # candidates verified
    accepted: int = 0
    drafted_steps: int = 0  # verdicts on sessions for which there is a draft, and that go on
    draft_ready_steps: int = 0  # of these, those whose next candidates had come before the step was over
    refused: int = 0  # messages of candidates that made no sense
    prompt_tokens: int = 0  # that sessions came with
    cached_tokens: int = 0  # of these, in memory already
    preemptions: int = 0
    busy: float = 0.0  # seconds spent in steps
    step_begun: float = 0.0  # when the step under way was; 0: none is
    step_expected: float = 0.0  # seconds that a step of its size usually takes
    lifetime: float = 1.0  # seconds they had memory for, moving average

    def expected_wait(self, waiting: int) -> float:
        """Seconds until one more than `waiting` sessions have had their turn."""
        return min(60.0, max(0.1, self.lifetime * (waiting + 1) / max(1, self.running)))
