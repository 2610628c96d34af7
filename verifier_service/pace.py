"""Whether a session should put off its step for candidates that are on their way.

A step of time T that is started now, w seconds after the last commit, brings E tokens: a rate of E / (T + w).
The next message of the draft, due in r seconds, will add about A * q tokens, q being the reach of the best leaf
and A the chance that a guess is right. Waiting pays while A * q / r exceeds the rate.
"""

from __future__ import annotations

SMOOTHING = 0.2
REMEMBERED_COMMITS = 16


class Pace:
    """What one session has learned of its draft: how soon it answers a commit, how fast it goes on, how often
    it is right. Seconds; times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._acceptance = 0.7
        self._delay = 0.003  # from a commit to the first candidates that know of it
        self._gap = 0.001  # from one message to the next
        self._commits: dict[int, float] = {}  # base -> when it became so
        self._last: dict[int, float] = {}  # base -> when the last message that knows of it came

    def committed(self, base: int, now: float) -> None:
        """The text has `base` tokens from now on."""
        self._commits[base] = now
        if len(self._commits) > REMEMBERED_COMMITS:
            oldest = next(iter(self._commits))
            del self._commits[oldest]
            self._last.pop(oldest, None)

    def arrived(self, base: int, at: float) -> None:
        """A message that starts at `base` came; late ones teach as well."""
        begun = self._commits.get(base)
        if begun is None:
            return
        if base in self._last:
            self._gap += SMOOTHING * (at - self._last[base] - self._gap)
        else:
            self._delay += SMOOTHING * (at - begun - self._delay)
        self._last[base] = at

    def walked(self, accepted: int, corrected: bool) -> None:
        """A step took `accepted` candidates and then, perhaps, another token than was offered."""
        for right in [True] * accepted + [False] * corrected:
            self._acceptance += 0.05 * (right - self._acceptance)

    def gave_up(self, base: int, now: float) -> None:
        """A wait ended in vain: what was awaited takes at least that long."""
        if base in self._last:
            self._gap = max(self._gap, now - self._last[base])
        else:
            self._delay = max(self._delay, now - self._commits[base])

    def wait_until(
        self, base: int, now: float, *, expected: float, leaf: float, step_time: float, patience: float
    ) -> float | None:
        """Until when to put the step off, or None: step now.

        `expected` tokens would come of a step now, `leaf` is the reach of the best leaf. A wait ends when
        candidates arrive, or at twice the time they usually take.
        """
        begun = self._commits[base]
        since, usual = (self._last[base], self._gap) if base in self._last else (begun, self._delay)
        deadline = min(since + 2 * usual, begun + patience)
        if now >= deadline:
            return None
        remaining = max(since + usual - now, 1e-4)
        pays = self._acceptance * leaf / remaining > expected / (step_time + now - begun)
        return deadline if pays else None
