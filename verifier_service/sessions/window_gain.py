"""The gain of lookahead windows: which size, if any, pays in a text's next step.

A window costs rows in every step, and brings tokens only when one of its n-grams is accepted later. Cost and gain are
in tokens a step: the cost follows from the step latency of the current batch (`WindowCosts`), the gain from earlier
steps with a window of this size.

- The gain of a size in a text is its gain in all texts of the tenant, times the *likeness* of the text to these. The
  likeness is learned from all windows of the text. Among sizes with a known gain, the one with the highest net gain
  (gain minus cost) is used, if that is positive.
- The next larger size is then tried, at first the smallest. A *trial* is paid in advance, from a budget that is a share
  of the tenant's tokens. It ends after enough steps or when its price is used up, and refunds the rest. After a trial
  that does not pay, known sizes are tried again only after a pause, twice as long each time.

So if no window ever hits, windows and their candidates cost at most that share of the tokens.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.ngrams import NgramPool
from verifier_service.settings.tuning import DEFAULTS, WindowTuning

MAX_TENANTS = 256
"""Maximum tenants with remembered gains; the tenant whose latest text began earliest is forgotten first."""

TENANT_GUESSES = 8
"""N-grams per first token in the pool that a tenant's texts share."""

LEAST_GAIN = 1e-3
"""Gain in tokens a step below which texts are not compared: a ratio of two such gains says nothing."""

LEAST_LIKENESS = 0.25
"""Lower bound on a text's likeness where the tenant's gain of a new size is estimated as the text's gain divided by its
likeness."""

Cost = Callable[[Lookahead], float]
"""The cost of a window in the coming step, in tokens, by its size."""


@dataclass
class Average:
    """A moving average over steps."""

    mean: float
    steps: float = 0.0  # averaged in it

    def observe(self, value: float, most_steps: float, count: int = 1) -> None:
        """Add `count` steps with this value, to an average over at most `most_steps`."""
        for _ in range(count):
            self.steps = min(self.steps + 1.0, most_steps)
            self.mean += (value - self.mean) / self.steps


@dataclass
class TenantWindows:
    """The gains of windows in a tenant's texts."""

    gains: dict[Lookahead, Average] = field(default_factory=dict)
    """Gains by size: accepted tokens a step, less the cost of the candidates' rows."""
    budget: float = 0.0  # for trials, in tokens
    pool: NgramPool | None = None  # the n-grams of all its texts; None: each text has its own


class WindowsByTenant:
    """The windows of all tenants. `of` is thread-safe; its result belongs to the step loop's thread."""

    def __init__(self, *, pooled: bool = False) -> None:
        """`pooled`: the texts of a tenant share their n-grams."""
        self._pooled = pooled
        self._known: OrderedDict[str, TenantWindows] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, tenant: str) -> TenantWindows:
        """Return the windows of a tenant: the same object for all its texts."""
        with self._lock:
            found = self._known.get(tenant)
            if found is None:
                pool = NgramPool(TENANT_GUESSES) if self._pooled else None
                found = self._known[tenant] = TenantWindows(pool=pool)
            self._known.move_to_end(tenant)
            if len(self._known) > MAX_TENANTS:
                self._known.popitem(last=False)
        return found


@dataclass
class Trial:
    """A size on trial. Amounts are in tokens."""

    size: Lookahead
    price: float  # paid for it
    least: float  # net gain to beat: the best known size's, or 0 for no window
    lost: float = 0.0  # so far, relative to `least`
    gain: float = 0.0  # over its steps with a full window
    steps: int = 0  # with a full window


class WindowGain:
    """The windows of one text. `wanted` has no side effects: a planner may ask several times for a step. It then calls
    `begin` and `charge` for the window it opens; `observe` adds the step once its tokens are known."""

    def __init__(self, tenant: TenantWindows | None = None, tuning: WindowTuning = DEFAULTS.windows) -> None:
        self._tuning = tuning
        self._tenant = TenantWindows() if tenant is None else tenant
        self._likeness = Average(1.0, tuning.first_weight)
        self._trial: Trial | None = None
        self._pause = self._next_pause = tuning.first_pause  # steps until a known size is tried again
        self._charged: tuple[Lookahead, float, float] | None = None  # of the coming step, as in `charge`

    def wanted(self, sizes: Sequence[Lookahead], cost: Cost, current: Lookahead | None) -> Lookahead | None:
        """Return the size of window for the next step, out of `sizes` in ascending order; None if none pays. `current`
        is the size of the open window: a window of another size begins empty, so it must be better by a margin."""
        if self._trial is not None and self._trial.size in sizes:
            return self._trial.size
        best, net = self._best(sizes, cost, current)
        place = 0 if best is None else sizes.index(best) + 1
        if place == len(sizes) or not self._may_try(sizes[place], best):
            return best
        affordable = self._price(sizes[place], best, net, cost) <= self._tenant.budget
        return sizes[place] if affordable else best

    def begin(self, size: Lookahead, sizes: Sequence[Lookahead], cost: Cost) -> None:
        """Note that the coming step has a window of this wanted size; pay for a trial if the step begins one."""
        if self._trial is not None:
            return
        best, net = self._best(sizes, cost, size)
        if size != best:
            self._trial = Trial(size, self._price(size, best, net, cost), net)
            self._tenant.budget -= self._trial.price

    def charge(self, size: Lookahead, window: float, candidates: float) -> None:
        """Record the costs, in tokens, of the coming step's window and of its candidates from windows."""
        self._charged = size, window, candidates

    def observe(self, tokens: int, accepted: int, *, full: bool) -> bool:
        """Add a step of `tokens` tokens, `accepted` of them from windows; `full`: the window has all its levels. Return
        False if a trial has ended and no window pays now."""
        tuning, tenant, charged = self._tuning, self._tenant, self._charged
        tenant.budget = min(tenant.budget + tuning.trial_share * tokens, tuning.most_budget)
        self._pause -= 1
        self._charged = None
        if charged is None:
            return True
        size, cost, of_candidates = charged
        gain, trial = accepted - of_candidates, self._trial
        if trial is not None:
            trial.lost += trial.least - (gain - cost)
            if full:
                trial.gain += gain
                trial.steps += 1
            going_on = trial.lost <= trial.price and trial.steps < tuning.trial_steps
            return going_on or self._ended(trial, cost)
        if full:
            of_tenant = tenant.gains[size]
            if of_tenant.mean > LEAST_GAIN:
                self._likeness.observe(gain / of_tenant.mean, tuning.remembered_steps)
            of_tenant.observe(gain, tuning.remembered_steps_of_tenant)
            if self._gain_of(of_tenant) <= cost:
                self._rest()
        return True

    def close(self) -> None:
        """Give back the rest of an open trial's price, because the text has ended."""
        if self._trial is not None:
            self._refund(self._trial)

    def _refund(self, trial: Trial) -> None:
        self._trial, tenant = None, self._tenant
        tenant.budget = min(tenant.budget + trial.price - max(0.0, trial.lost), self._tuning.most_budget)

    def _ended(self, trial: Trial, cost: float) -> bool:
        """End a trial of a window with this cost. Return False if nothing pays now."""
        tuning, tenant, likeness = self._tuning, self._tenant, self._likeness
        self._refund(trial)
        if trial.steps < tuning.least_trial_steps:  # the trial has shown only that rows cost more than expected
            return trial.least > 0.0
        mean = trial.gain / trial.steps
        if trial.size not in tenant.gains:
            tenant.gains[trial.size] = Average(mean / max(likeness.mean, LEAST_LIKENESS), trial.steps)
            likeness.observe(likeness.mean, tuning.remembered_steps, trial.steps)
        else:
            of_tenant = tenant.gains[trial.size]
            of_tenant.observe(mean, tuning.remembered_steps_of_tenant, trial.steps)
            if of_tenant.mean > LEAST_GAIN:
                self._likeness = Average(mean / of_tenant.mean, min(trial.steps, tuning.remembered_steps))
        if mean - cost > trial.least:
            self._next_pause = tuning.first_pause
            return True
        self._rest()
        return trial.least > 0.0  # a smaller window pays

    def _rest(self) -> None:
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, self._tuning.longest_pause)

    def _may_try(self, size: Lookahead, best: Lookahead | None) -> bool:
        """Return True if a size may go on trial. If there is a `best` size, the text's likeness must be known first; a
        size with a known gain must wait for the end of a pause."""
        if best is not None and self._likeness.steps < self._tuning.remembered_steps:
            return False
        return self._pause <= 0 or size not in self._tenant.gains

    def _gain_of(self, of_tenant: Average) -> float:
        """Return the gain of a size in this text."""
        return self._likeness.mean * of_tenant.mean

    def _best(
        self, sizes: Sequence[Lookahead], cost: Cost, current: Lookahead | None
    ) -> tuple[Lookahead | None, float]:
        """Return the size with the highest positive net gain, and this gain; (None, 0) if none is positive.

        A larger size must be better than the smaller ones by a standard error: a few steps, in which the text may just
        have repeated itself, must not make it the best."""
        best, highest = None, 0.0
        for size in sizes:
            of_tenant = self._tenant.gains.get(size)
            if of_tenant is None:
                continue
            net = self._gain_of(of_tenant) - cost(size)
            least = net - self._likeness.mean * self._tuning.spread / math.sqrt(of_tenant.steps)
            if least - (0.0 if current in (None, size) else self._tuning.margin) > highest:
                best, highest = size, net
        return best, highest

    def _price(self, size: Lookahead, best: Lookahead | None, net: float, cost: Cost) -> float:
        """Return the price of a trial: the cost of rows beyond those of the `best` known size, in `priced_steps` steps,
        and that size's net gain `net` in the steps that fill the new window."""
        more = cost(size) - (0.0 if best is None else cost(best))
        return max(0.0, more) * self._tuning.priced_steps + net * (size.ngram - 2)
