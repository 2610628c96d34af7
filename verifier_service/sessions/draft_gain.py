"""The gain of a remote draft for a text, in tokens a step, and the pauses of drafts with too little gain."""

from __future__ import annotations

from collections import OrderedDict

from verifier_service.settings.tuning import DEFAULTS, DraftGainTuning

MAX_TENANTS = 256
"""Tenants with a remembered gain; the least recently active one is forgotten first."""


class DraftGain:
    """The gain of one text. A text rests its draft if the gain is next to nothing, and tries it again later: the text
    may have changed in character. `expected`: gain of the tenant's texts."""

    def __init__(self, expected: float | None = None, tuning: DraftGainTuning = DEFAULTS.draft_gain) -> None:
        self._tuning = tuning
        self._gain = tuning.first_gain if expected is None else max(tuning.trial_gain, expected)
        self._seen = tuning.first_weight  # number of steps averaged in the gain
        self._resting = 0  # steps left of the current rest
        self._next_rest = tuning.first_rest_steps

    @property
    def helps(self) -> bool:
        """True if the draft is estimated to help, or is on trial."""
        return not self._resting

    def observe(self, accepted: int) -> None:
        """Add a step with candidates of the draft, `accepted` of them accepted."""
        tuning = self._tuning
        self._seen = min(self._seen + 1, tuning.remembered_steps)
        self._gain += (accepted - self._gain) / self._seen
        if self._gain < tuning.least_gain:
            self._resting = self._next_rest
            self._next_rest = min(2 * self._next_rest, tuning.longest_rest_steps)
        elif self._gain > 2 * tuning.least_gain and self._seen == tuning.remembered_steps:
            self._next_rest = tuning.first_rest_steps

    def rest(self) -> None:
        """Count a step without the draft."""
        self._resting -= 1
        if not self._resting:
            self._gain, self._seen = self._tuning.trial_gain, self._tuning.first_weight


class TenantGains:
    """Gain of remote drafts by tenant: the prior for a new text."""

    def __init__(self, tuning: DraftGainTuning = DEFAULTS.draft_gain) -> None:
        self._tuning = tuning
        self._gains: OrderedDict[str, float] = OrderedDict()

    def of(self, tenant: str) -> float | None:
        """Return a tenant's gain; None if none of its texts had candidates. Thread-safe."""
        return self._gains.get(tenant)

    def observe(self, tenant: str, accepted: int) -> None:
        """Add a step of one of the tenant's texts."""
        gain = self._gains.get(tenant, self._tuning.first_gain)
        self._gains[tenant] = gain + (accepted - gain) / self._tuning.remembered_steps
        self._gains.move_to_end(tenant)
        if len(self._gains) > MAX_TENANTS:
            self._gains.popitem(last=False)
