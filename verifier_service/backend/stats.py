"""Statistics of a verifier: its load and its throughput."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specdec.serving.errors import TooLateError
from specdec.serving.histogram import Histogram
from verifier_service.backend.result import DecisionSums, StepSeconds, TokenSource, VerifyResult

LAST_BIN = 16
"""Last bin of the histogram of accepted candidates per step: larger numbers count there."""

INTERVAL_SMOOTHING = 0.1
"""Weight of the last step in the moving average of intervals."""

OUTLIER = 4.0
"""Cap on a counted interval, relative to the moving average: a single stall then does not make a pod look slow, while
lasting slowness still shows within about ten steps."""

SLOWER = 1.25
"""Factor on a text's expected duration at the current pace, since later arrivals will share its steps."""


@dataclass
class VerifierStats:
    """Counters and gauges of a verifier; written by the step loop's thread, read by any."""

    running: int = 0
    waiting: int = 0
    new_of: Counter[str] = field(default_factory=Counter)  # unadmitted sessions, by tenant; replaced, never modified
    throttled: int = 0  # waiting sessions far ahead of their readers
    steps: int = 0
    rows: int = 0
    committed: int = 0  # tokens
    offered: int = 0  # candidates verified
    accepted: int = 0
    drafted_steps: int = 0  # steps of sessions with a draft, except each text's last
    draft_ready_steps: int = 0  # drafted steps ending with the next candidates present
    refused: int = 0  # invalid messages of candidates
    prompt_tokens: int = 0  # tokens of sessions at first admission, generated ones included
    cached_tokens: int = 0  # of these, tokens found in the prefix cache
    preemptions: int = 0
    busy: float = 0.0  # seconds spent in steps
    step_begun: float = 0.0  # start of the current step; 0: none
    step_expected: float = 0.0  # expected seconds of the current step
    step_seconds: Histogram = field(default_factory=Histogram)
    forward: float = 0.0  # seconds of steps in forward passes
    proposing: float = 0.0  # seconds of proposers before steps
    delayed: float = 0.0  # seconds of step delay
    mode: str = ""  # choice of adaptive speculation in the last step; empty: it chose for no text
    rates: Mapping[str, float] | None = None  # tokens a second by mode, as last measured; never modified, only replaced
    decisions: DecisionSums = field(default_factory=DecisionSums)
    sources: dict[int, int] = field(default_factory=lambda: dict.fromkeys(map(int, TokenSource), 0))  # tokens
    queue_seconds: Histogram = field(default_factory=Histogram)  # from a session's arrival to its admission
    accepted_lengths: list[int] = field(default_factory=lambda: [0] * (LAST_BIN + 1))
    """Steps of sessions with candidates, by the number accepted."""
    interval: float = 0.0  # seconds from token to token of a session, moving average; 0: unknown
    usual_tokens: float = 0.0  # generated tokens of an ended session, moving average
    lifetime: float = 1.0  # seconds of a session with memory, moving average
    idle: bool = True  # there was no work since the last step
    _held_up: float = 0.0  # seconds since decoding texts last had a step

    def observe(self, rows: int, seconds: StepSeconds, results: Iterable[VerifyResult], proposing: float = 0.0) -> None:
        """Count a step; `proposing`: seconds of proposers before it."""
        self.steps += 1
        self.rows += rows
        self.busy += seconds.step
        self.step_seconds.observe(seconds.step)
        self.forward += seconds.forward
        self.proposing += proposing
        self.delayed += seconds.waited
        for result in results:
            self.committed += len(result.tokens)
            self.offered += result.offered
            self.accepted += result.accepted
            self.decisions.add(result.decisions)
            for source in result.sources:
                self.sources[source] += 1
            if result.offered:
                self.accepted_lengths[min(result.accepted, LAST_BIN)] += 1

    def observe_pace(
        self, seconds: float, results: Sequence[VerifyResult], *, texts_waited: bool = False, in_turn: int = 0
    ) -> None:
        """Count the seconds since the end of the last step; after idle time, since the start of this one.
        `texts_waited`: decoding texts sat this step out for a prompt, so its seconds count towards the next one;
        `in_turn`: number of sessions that sit this step out because tenants take turns."""
        self.idle = False
        self._held_up += seconds
        if texts_waited:
            return
        held_up, self._held_up = self._held_up, 0.0
        if results:
            tokens = max(1, sum(len(result.tokens) for result in results))
            interval = held_up * (len(results) + in_turn) / tokens
            usual = self.interval or interval
            self.interval = usual + INTERVAL_SMOOTHING * (min(interval, OUTLIER * usual) - usual)

    def forget_pace(self) -> None:
        """Reset the waiting time of texts; called when there is no work."""
        self._held_up, self.idle = 0.0, True

    def finished(self, tokens: int, seconds: float, smoothing: float) -> None:
        """Count an ended session: its generated tokens, and its seconds with memory, which may be hours if its reader
        has stalled."""
        self.lifetime += smoothing * (min(seconds, OUTLIER * max(1.0, self.lifetime)) - self.lifetime)
        self.usual_tokens += smoothing * (tokens - self.usual_tokens) if self.usual_tokens else tokens

    def too_late(self, most: int, deadline: float | None, waiting: int) -> TooLateError | None:
        """Return the error if a text behind `waiting` others would miss its deadline (`time.monotonic`) at the current
        pace; None if it would not, if it has no deadline, or if there is no work. The text's expected length is
        the average of ended texts, at most the `most` tokens that it lacks; 0 if none has ended yet."""
        if deadline is None or self.idle or not self.running:
            return None
        wait = self.expected_wait(waiting) if waiting else 0.0
        seconds, left = wait + SLOWER * self.interval * min(most, self.usual_tokens), deadline - time.monotonic()
        if seconds <= left:
            return None
        return TooLateError(
            f"the text would take about {seconds:.1f} s, but its deadline leaves {max(0.0, left):.1f} s",
            self.expected_wait(waiting),
        )

    def expected_wait(self, waiting: int) -> float:
        """Return the expected seconds, 0.1 to 60, until `waiting` sessions and one more have been admitted."""
        return min(60.0, max(0.1, self.lifetime * (waiting + 1) / max(1, self.running)))
