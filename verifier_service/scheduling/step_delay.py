"""Decides whether to delay a step for candidates that are on their way.

A step of T seconds that is started now, w seconds after the last one, brings E tokens: a rate of E / (T + w). The next
message of a session's draft, due in r seconds, will add about A * q tokens and a row that costs p tokens: q is the path
probability of the best leaf, A the acceptance, p the break-even probability. Waiting pays while (A * q - p) / r, summed
over the sessions, exceeds the rate: the sessions of a step wait together.

Each tenant decides for its own sessions, and the step waits only if all of them would: nobody waits for candidates of
another tenant's draft.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from verifier_service.costs.step_latency import StepLatency
from verifier_service.sessions.draft_timing import WaitEstimate
from verifier_service.sessions.session import Session

WITHOUT_DRAFT = WaitEstimate(1.0)
"""The wait estimate of a session that brings one token and waits for nothing."""


def delay_until(estimates: Sequence[WaitEstimate], now: float, last_step: float, step_time: float) -> float | None:
    """Return the time until which to delay the step; None: step now. Any message that arrives meanwhile leads to a new
    decision."""
    gain = sum(wait_estimate.gain for wait_estimate in estimates)
    expected = sum(wait_estimate.expected for wait_estimate in estimates)
    if gain <= expected / (step_time + now - last_step):
        return None
    return min(wait_estimate.until for wait_estimate in estimates if wait_estimate.gain)


class StepDelay:
    """The delay of the coming step."""

    def __init__(self) -> None:
        self._since: float | None = None  # when it began; None: the step is not delayed

    def seconds(
        self,
        sessions: Sequence[Session],
        drafted: Sequence[bool],
        now: float,
        *,
        last_step: float,
        latency: StepLatency,
        price: float,
    ) -> float | None:
        """Return for how long to delay the step of these sessions, of which those `drafted` use a remote draft; None:
        step now. `last_step` is when the last step ended, `price` the break-even probability."""
        if any(session.remaining_prompt for session in sessions):
            return None
        estimates = [
            session.wait_estimate(now, price) if has_draft else WITHOUT_DRAFT
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
        """End the delay: the step begins, or there is none. Return for how long it has lasted."""
        since, self._since = self._since, None
        return now - since if since else 0.0
