"""Statistics of a verifier: how full and how busy it is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specdec.serving.errors import TooLateError
from specdec.serving.histogram import Histogram
from verifier_service.backend.result import VerifyResult

LONGEST_TOLD = 16
"""Accepted candidates of a step from which lengths are counted as one."""

INTERVAL_SMOOTHING = 0.1
"""Weight of the last step in the moving average of intervals."""

SLOWER = 1.25
"""How many times as long as at the present pace a text is expected to take: more will come that share its steps."""


@dataclass
class VerifierStats:
    """Counters and gauges of a verifier; the step loop's thread writes them, any thread reads them."""

    running: int = 0
    waiting: int = 0
    # By tenant, and replaced as a whole:
    new_of: Counter[str] = field(default_factory=Counter)  # those of them that never had memory
    throttled: int = 0  # waiting sessions that are far ahead of their readers
    steps: int = 0
    rows: int = 0
    committed: int = 0  # tokens
    drafted: int = 0  # candidates verified
    accepted: int = 0
    drafted_steps: int = 0  # steps of sessions that have a draft, after which the text goes on
    draft_ready_steps: int = 0  # those of them that ended with the next candidates already there
    refused: int = 0  # messages of candidates that were invalid
    prompt_tokens: int = 0  # tokens that sessions came with when they got memory, generated ones included
    cached_tokens: int = 0  # those of them that were in the KV cache already
    preemptions: int = 0
    busy: float = 0.0  # seconds spent in steps
    step_begun: float = 0.0  # when the present step began; 0: there is none
    step_expected: float = 0.0  # seconds that the present step is expected to take
    step_seconds: Histogram = field(default_factory=Histogram)
    forward: float = 0.0  # seconds of steps in forward passes
    proposing: float = 0.0  # seconds before steps in which proposers made candidates
    delayed: float = 0.0  # seconds for which steps were delayed for candidates of drafts
    mode: str = ""  # that adaptive speculation has chosen last; empty: none yet
    queue_seconds: Histogram = field(default_factory=Histogram)  # from a session's arrival until it had memory
    accepted_lengths: list[int] = field(default_factory=lambda: [0] * (LONGEST_TOLD + 1))
    """Steps of sessions that had candidates, by how many were accepted."""
    interval: float = 0.0  # seconds from token to token of a session, moving average; 0: not known
    usual_tokens: float = 0.0  # tokens that are generated in a session until it ends, moving average
    lifetime: float = 1.0  # seconds for which a session has memory, moving average
    _held_up: float = 0.0  # seconds for which texts that decode have had no step

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

    def observe_pace(
        self, seconds: float, results: Sequence[VerifyResult], *, sat_out: bool = False, in_turn: int = 0
    ) -> None:
        """Count the seconds from step to step, whatever they went to. Texts that have `sat_out` the step for a prompt
        wait for the next one as well; those that take part `in_turn` and are not in this one wait for their turn."""
        self._held_up += seconds
        if sat_out:
            return
        held_up, self._held_up = self._held_up, 0.0
        if results:
            tokens = max(1, sum(len(result.tokens) for result in results))
            interval = held_up * (len(results) + in_turn) / tokens
            self.interval += INTERVAL_SMOOTHING * (interval - self.interval) if self.interval else interval

    def forget_pace(self) -> None:
        """Note that there is nothing to do: what texts have waited for counts no more."""
        self._held_up = 0.0

    def observe_parts(self, *, forward: float, proposing: float, delayed: float) -> None:
        """Count the seconds of a step's forward pass, and of what went before the step."""
        self.forward += forward
        self.proposing += proposing
        self.delayed += delayed

    def finished(self, tokens: int, seconds: float, smoothing: float) -> None:
        """Count a session that has ended: it has generated so many tokens, and had memory for so many seconds."""
        self.lifetime += smoothing * (seconds - self.lifetime)
        self.usual_tokens += smoothing * (tokens - self.usual_tokens) if self.usual_tokens else tokens

    def too_late(self, most: int, deadline: float | None, waiting: int) -> TooLateError | None:
        """Return the error for a text of at most `most` tokens, or as many as texts usually have, that is behind
        `waiting` others, if at the present pace it would not be finished by its deadline (monotonic time). None: it
        would, or nobody knows: nothing runs, or nothing has ended yet."""
        if deadline is None or not self.running:
            return None
        wait = self.expected_wait(waiting) if waiting else 0.0
        seconds, left = wait + SLOWER * self.interval * min(most, self.usual_tokens), deadline - time.monotonic()
        if seconds <= left:
            return None
        return TooLateError(
            f"the text would take about {seconds:.1f} s, {max(0.0, left):.1f} s are left", self.expected_wait(waiting)
        )

    def expected_wait(self, waiting: int) -> float:
        """Return the seconds until `waiting` sessions and one more are expected to have got memory."""
        return min(60.0, max(0.1, self.lifetime * (waiting + 1) / max(1, self.running)))
