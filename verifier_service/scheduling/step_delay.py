"""The step delay: whether to postpone a step for candidates in flight.

A step of T seconds started now, w seconds after the last one ended, yields E tokens: a rate of E / (T + w). A session's
next draft message, expected in r seconds, adds about A * q tokens and costs a row worth p tokens: q is the path
probability of the best leaf, A the acceptance, p the break-even probability. All sessions of a step wait together, so
waiting pays while

    sum over sessions of (A * q - p) / r  >  E / (T + w)

The condition is checked for each tenant's sessions separately, and the step waits only if it holds for all tenants: no
tenant waits for candidates of another tenant's draft.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from verifier_service.costs.step_latency import StepLatency
from verifier_service.sessions.draft_timing import WaitEstimate
from verifier_service.sessions.session import VerifierSession


def delay_until(estimates: Sequence[WaitEstimate], now: float, last_step: float, step_time: float) -> float | None:
    """Return the time until which to delay the step; None: step now. A message that arrives earlier leads to a new
    decision."""
    gain = sum(wait_estimate.gain for wait_estimate in estimates)
    expected = sum(wait_estimate.expected for wait_estimate in estimates)
    # Both sides in tokens a second. As the right side falls during the wait, `until` bounds the wait for each session.
    if gain <= expected / (step_time + now - last_step):
        return None
    # The first session to give up changes the sum: decide again then.
    return min(wait_estimate.until for wait_estimate in estimates if wait_estimate.gain)


class StepDelay:
    """The delay of the coming step."""

    def __init__(self) -> None:
        self._since: float | None = None  # start of the delay; None: not delayed

    def seconds(
        self,
        sessions: Sequence[VerifierSession],
        drafted: Sequence[bool],
        now: float,
        *,
        last_step: float,
        latency: StepLatency,
        break_even: float,
    ) -> float | None:
        """Return the seconds to delay the step of these sessions; None: step now. `drafted`: which sessions use a
        remote draft; `last_step`: end of the last step."""
        # A prompt fills the device anyway, and its first token would be late.
        if any(session.remaining_prompt for session in sessions):
            return None
        estimates = [
            session.wait_estimate(now, break_even, drafted=has_draft)
            for session, has_draft in zip(sessions, drafted, strict=True)
        ]
        of_tenants: defaultdict[str, list[WaitEstimate]] = defaultdict(list)
        for session, estimate in zip(sessions, estimates, strict=True):
            of_tenants[session.request.tenant].append(estimate)
        earliest, step_time = math.inf, latency.of(len(sessions))
        for own in of_tenants.values():
            until = delay_until(own, now, last_step, step_time)
            if until is None:
                return None
            earliest = min(earliest, until)
        self._since = self._since or now
        return earliest - now

    def end(self, now: float) -> float:
        """End the delay, since the step begins or no session is ready. Return the delay's seconds."""
        since, self._since = self._since, None
        return now - since if since else 0.0
