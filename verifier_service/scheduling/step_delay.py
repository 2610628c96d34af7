"""Decides whether to delay a step for candidates that are on their way.

A step of T seconds that is started now, w seconds after the last one, brings E tokens: a rate of E / (T + w). The next
message of a session's draft, due in r seconds, will add about A * q tokens and a row that costs p tokens: q is the path
probability of the best leaf, A the acceptance, p the break-even probability. Waiting pays while (A * q - p) / r, summed
over the sessions, exceeds the rate: the sessions of a step wait together.
"""

from __future__ import annotations

from collections.abc import Sequence

from verifier_service.sessions.draft_timing import WaitEstimate


def delay_until(estimates: Sequence[WaitEstimate], now: float, last_step: float, step_time: float) -> float | None:
    """Return the time until which to delay the step; None: step now. Any message that arrives meanwhile leads to a new
    decision."""
    gain = sum(wait_estimate.gain for wait_estimate in estimates)
    expected = sum(wait_estimate.expected for wait_estimate in estimates)
    if gain <= expected / (step_time + now - last_step):
        return None
    return min(wait_estimate.until for wait_estimate in estimates if wait_estimate.gain)
