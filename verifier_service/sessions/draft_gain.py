"""What a remote draft brings to a text, in tokens a step, and whether the text leaves it alone for a while."""

from __future__ import annotations

from collections import OrderedDict

from verifier_service.settings.tuning import DEFAULTS, DraftGainTuning

MAX_TENANTS = 256
"""Tenants whose gain is kept; the one that was silent longest is forgotten first."""


class DraftGain:
    """The gain of one text. A draft that brings next to nothing is left alone by this text, and tried again later: the
    text may have become another one. `expected`: tokens a step that it brings to the tenant's texts."""

    def __init__(self, expected: float | None = None, tuning: DraftGainTuning = DEFAULTS.draft_gain) -> None:
        self._tuning = tuning
        self._gain = tuning.first_gain if expected is None else max(tuning.trial_gain, expected)
        self._seen = tuning.first_weight  # steps that the gain is the mean of
        self._resting = 0  # steps for which the draft is still left alone
        self._next_rest = tuning.first_rest_steps

    @property
    def helps(self) -> bool:
        """True if the draft helps, as far as is known, or is on trial."""
        return not self._resting

    def observe(self, accepted: int) -> None:
        """Learn from a step that had candidates of the draft, and accepted so many."""
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
    """What remote drafts bring to the texts of each tenant: what a new text expects."""

    def __init__(self, tuning: DraftGainTuning = DEFAULTS.draft_gain) -> None:
        self._tuning = tuning
        self._gains: OrderedDict[str, float] = OrderedDict()

    def of(self, tenant: str) -> float | None:
        """Return a tenant's gain; None if none of its texts had candidates. Any thread may ask."""
        return self._gains.get(tenant)

    def observe(self, tenant: str, accepted: int) -> None:
        """Learn from a step of one of the tenant's texts."""
        gain = self._gains.get(tenant, self._tuning.first_gain)
        self._gains[tenant] = gain + (accepted - gain) / self._tuning.remembered_steps
        self._gains.move_to_end(tenant)
        if len(self._gains) > MAX_TENANTS:
            self._gains.popitem(last=False)
