"""The trial of a new version of a draft's model: does it guess more tokens than the serving version?

Sessions opened during the trial are assigned to one of the two at random. Each gives one observation in [0, 1]: the
share of guessed tokens among its first WINDOW_TOKENS. Tokens of one text depend on each other, texts do not.
Observations are compared as they arrive: D_1, D_2, ... in [-1, 1] are the differences between the new version's and the
serving version's mean observation since the previous comparison. Their mean is 0 if the versions are equally good. Two
bettors, one on "better" and one on "worse", begin with a wealth of 1. For each D_i they stake a share lambda_i in
[0, 1) of their wealth, chosen before D_i is known (in W_t, + is for "better", - for "worse"):

    W_t = prod_i (1 +- lambda_i D_i)            lambda_i = mean / (variance + mean^2) of earlier differences, clipped

If the version is not better, the wealth on "better" is a non-negative supermartingale: the probability that it ever
reaches 2 / alpha is at most alpha / 2 (Ville's inequality). The same holds for the wealth on "worse" if the version is
not worse. So the trial may end at any time, and a verdict is wrong with a probability of at most alpha, for any
distribution and any number of looks. (Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by
betting"; lambda_i is their approximate GRAPA.)

This module knows neither models nor sessions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

WINDOW_TOKENS = 256
"""Number of a session's first tokens that count: a limit, so that long texts give an observation soon."""

MIN_TOKENS = 16
"""Minimum tokens of an observation: a shorter text says little, but would have the weight of a long one."""

MAX_BET = 0.9
"""Maximum share of its wealth that a bettor stakes; the rest survives a difference of -1."""

PRIOR_VARIANCE = 0.25
"""Prior variance of the differences, with the weight of one difference."""

SPEED_PASSES = 50
"""Passes of the new version before its speed is judged. One pass says little: another process may have had the core."""

Session = TypeVar("Session", bound=Hashable)


@dataclass(frozen=True)
class TrialLimits:
    """How new versions are tried."""

    share: float = 0.1  # of new sessions, drafted by the new version
    tokens: int = 50_000  # committed tokens of its unpaused sessions after which the trial ends undecided
    alpha: float = 0.05  # probability of a wrong verdict
    max_slowdown: float = 1.5  # seconds of a pass, in multiples of the serving version's


class Outcome(Enum):
    """How a trial ends."""

    PROMOTED = "promoted"
    WORSE = "worse"
    SLOW = "slow"
    UNDECIDED = "undecided"


class Bettor:
    """Bets that the mean of numbers in [-1, 1] is positive."""

    def __init__(self) -> None:
        self.log_wealth = 0.0
        self._count = 0
        self._sum = 0.0
        self._squares = PRIOR_VARIANCE  # sum of squared deviations from the mean so far

    def observe(self, difference: float) -> None:
        """Bet on the next number, then learn from it."""
        mean, variance = self._sum / (self._count + 1), self._squares / (self._count + 1)
        bet = min(max(mean / (variance + mean * mean), 0.0), MAX_BET)
        self.log_wealth += math.log1p(bet * difference)
        self._count += 1
        self._sum += difference
        self._squares += (difference - self._sum / (self._count + 1)) ** 2


@dataclass
class _Observed:
    """Counts over the first tokens of a session on trial."""

    is_new: bool  # drafted by the new version
    tokens: int = 0
    guessed: int = 0


@dataclass
class _Observations:
    """The observations of one version; only their mean counts."""

    count: int = 0
    sum: float = 0.0

    @property
    def mean(self) -> float:
        return self.sum / self.count

    def add(self, observation: float) -> None:
        self.count += 1
        self.sum += observation


class VersionTrial(Generic[Session]):
    """The trial of one version."""

    def __init__(self, limits: TrialLimits) -> None:
        self.verdict: Outcome | None = None
        """None while the trial goes on."""
        self.tokens = 0
        """Tokens committed in sessions of the new version while it was not paused."""
        self._limits = limits
        self._running: dict[Session, _Observed] = {}  # sessions without an observation so far
        self._unpaired = _Observations(), _Observations()  # of the serving and the new version, not compared yet
        self._all = _Observations(), _Observations()  # all, for `reason`
        self._better, self._worse = Bettor(), Bettor()
        self._passes = self._slow_passes = 0
        self._new: set[Session] = set()

    @property
    def reason(self) -> str:
        """The result of the trial, for a person to read."""
        if self.verdict is Outcome.SLOW:
            return (
                f"{self._slow_passes} of {self._passes} passes took more than {self._limits.max_slowdown:g} times as "
                "long as the serving version's"
            )
        serving, new = self._all
        if not (serving.count and new.count):
            return f"{self.tokens} tokens, in too few texts to compare"
        return (
            f"guessed {new.mean:.1%} of the tokens in {new.count} texts, the serving version {serving.mean:.1%} in "
            f"{serving.count}; {self.tokens} tokens on trial"
        )

    def opened(self, session: Session, *, is_new: bool) -> None:
        """Add a session drawn for the new version or for the serving one."""
        self._running[session] = _Observed(is_new)
        if is_new:
            self._new.add(session)

    def committed(self, session: Session, tokens: int, guessed: int, *, paused: bool) -> None:
        """Count tokens of a session; the first `guessed` ones were guessed. A paused draft costs nothing, so its tokens
        do not use up the trial. They are still observed: a version may be paused because it guesses badly, and its
        worst texts must not be left out."""
        if session in self._new and not paused:
            self.tokens += tokens
        found = self._running.get(session)
        if found is not None:
            counted = min(tokens, WINDOW_TOKENS - found.tokens)
            found.tokens += counted
            found.guessed += min(guessed, counted)
            if found.tokens == WINDOW_TOKENS:
                self._observe(session)
        if self.verdict is None and self.tokens >= self._limits.tokens:
            self.verdict = Outcome.UNDECIDED

    def closed(self, session: Session) -> None:
        """End a session, known or not. If it has at least MIN_TOKENS but no observation so far, it gives one now."""
        self._new.discard(session)
        found = self._running.get(session)
        if found is None:
            return
        if found.tokens >= MIN_TOKENS:
            self._observe(session)
        else:
            del self._running[session]

    def passed(self, seconds: float, expected: float) -> None:
        """Count a pass of the new version; `expected`: seconds of such a pass in the serving version."""
        self._passes += 1
        self._slow_passes += seconds > self._limits.max_slowdown * expected
        if self.verdict is None and self._passes >= SPEED_PASSES and 2 * self._slow_passes > self._passes:
            self.verdict = Outcome.SLOW

    def _observe(self, session: Session) -> None:
        found = self._running.pop(session)
        share = found.guessed / found.tokens
        self._all[found.is_new].add(share)
        self._unpaired[found.is_new].add(share)
        serving, new = self._unpaired
        if not (serving.count and new.count):
            return
        difference = new.mean - serving.mean
        self._unpaired = _Observations(), _Observations()
        self._better.observe(difference)
        self._worse.observe(-difference)
        needed = math.log(2 / self._limits.alpha)
        if self.verdict is None and self._better.log_wealth >= needed:
            self.verdict = Outcome.PROMOTED
        elif self.verdict is None and self._worse.log_wealth >= needed:
            self.verdict = Outcome.WORSE
