"""Shares of tenants: whose turn it is to get memory, and who has more of it than others would.

Turns go by virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models", Algorithm 2): each
tenant's counter grows with what it gets, divided by its weight, and the tenant with the smallest counter is next. Who
comes, or comes back after a pause, starts no lower than the smallest counter of those who are there or, if nobody is,
than that of who left last: time that was not used is not saved up, and what a tenant had alone is not held against it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from verifier_service.sessions.running_session import RunningSession

GENERATED_COST = 2.0
"""Cost of a generated token, where one of a prompt costs 1, as in the paper: it takes a step, not a row of one."""

REMEMBERED = 1024
"""Tenants without sessions whose counters are kept. Who leaves with much and returns at once is not given it anew."""

IMBALANCE = 2.0
"""How many times as much memory for its weight a tenant must have for some to be taken from it, counting what is left
then. A text that loses its memory is computed again, and smaller differences even out as texts end."""


class Shares:
    """The counters of tenants. Belongs to the step loop's thread."""

    def __init__(self) -> None:
        self._counters: OrderedDict[str, float] = OrderedDict()  # tokens over weight
        self._sessions: Counter[str] = Counter()
        self._level = 0.0  # the counter of the tenant that left last

    def joined(self, entry: RunningSession) -> None:
        """Note that a session has come."""
        tenant = entry.tenant
        if not self._sessions[tenant]:
            there = [self._counters[each] for each in self._sessions if self._sessions[each]]
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), min(there, default=self._level))
            self._counters.move_to_end(tenant)
        self._sessions[tenant] += 1

    def left(self, entry: RunningSession) -> None:
        """Note that a session is over."""
        self._sessions[entry.tenant] -= 1
        if self._sessions[entry.tenant]:
            return
        del self._sessions[entry.tenant]
        self._level = self._counters[entry.tenant]
        forgotten = len(self._counters) - len(self._sessions) - REMEMBERED
        if forgotten > 0:
            idle = (each for each in self._counters if each not in self._sessions)
            for tenant in list(islice(idle, forgotten)):
                del self._counters[tenant]

    def got_prompt(self, entry: RunningSession, tokens: int) -> None:
        """Count tokens of a prompt that are to be computed."""
        self._counters[entry.tenant] += tokens / entry.weight

    def got_tokens(self, entry: RunningSession, tokens: int) -> None:
        """Count generated tokens."""
        self._counters[entry.tenant] += GENERATED_COST * tokens / entry.weight

    def next(self, waiting: Iterable[RunningSession]) -> RunningSession | None:
        """Return the waiting session whose turn it is: of the tenant with the smallest counter the first."""
        return min(waiting, key=lambda entry: (self._counters[entry.tenant], entry.precedence), default=None)

    def urgent(self, prompts: Collection[RunningSession], decoding: Collection[RunningSession]) -> set[str]:
        """Return the tenants whose prompts need not wait for the texts of others: every other tenant that decodes has
        more sessions for its weight, and a counter that is not below theirs before these prompts."""
        if not prompts or len(self._sessions) < 2:  # as in most steps
            return set()
        decoders = {entry.tenant for entry in decoding}
        sessions: defaultdict[str, float] = defaultdict(float)
        asked: defaultdict[str, float] = defaultdict(float)  # what the prompts have added to the counters
        for entry in (*prompts, *decoding):
            sessions[entry.tenant] += 1 / entry.weight
        for entry in prompts:
            if not entry.preemptions:
                asked[entry.tenant] += (entry.session.tree.base - entry.session.cached_tokens) / entry.weight

        def has_less(tenant: str, other: str) -> bool:
            before = self._counters[tenant] - asked[tenant]
            return sessions[tenant] < sessions[other] and before <= self._counters[other]

        return {
            tenant
            for tenant in asked
            if decoders - {tenant} and all(has_less(tenant, other) for other in decoders - {tenant})
        }


def held(running: Iterable[RunningSession]) -> dict[str, float]:
    """Return the tokens of KV memory that each tenant's sessions hold, divided by its weight."""
    found: defaultdict[str, float] = defaultdict(float)
    for entry in running:
        found[entry.tenant] += len(entry.session.slots) / entry.weight
    return found


def spared(running: Iterable[RunningSession]) -> list[RunningSession]:
    """Return the sessions, in their order, without the first one of each tenant. That one always goes on, however much
    a tenant has: otherwise a long text might be computed again and again, and never end."""
    first: dict[str, RunningSession] = {}
    return [entry for entry in running if first.setdefault(entry.tenant, entry) is not entry]


def youngest_of_largest(running: list[RunningSession]) -> RunningSession:
    """Return the session to preempt when running ones need memory: the youngest of the tenant that holds most for its
    weight; the youngest of all if every tenant has only one."""
    shares = held(running)
    return max(reversed(spared(running) or running[-1:]), key=lambda entry: shares[entry.tenant])


def who_counts(running: Sequence[RunningSession], entry: RunningSession, tokens: int) -> list[RunningSession]:
    """Return the running sessions whose growth may take memory from `entry`, which waits and needs memory for `tokens`
    tokens: not those that would be preempted before it, which are all but the oldest ones of tenants that hold
    `IMBALANCE` times what its tenant would hold then."""
    shares = held(running)
    own = shares.pop(entry.tenant, 0.0) + tokens / entry.weight
    beyond = {tenant for tenant, tokens_held in shares.items() if tokens_held >= IMBALANCE * own}
    giving_way = {id(each) for each in spared(running) if each.tenant in beyond}
    return [each for each in running if id(each) not in giving_way]


def youngest_beyond(running: list[RunningSession], entry: RunningSession, tokens: int) -> RunningSession | None:
    """Return the session to preempt so that `entry`, which waits, gets memory for `tokens` tokens: the youngest of the
    tenant that holds most for its weight, if that then still holds `IMBALANCE` times what the tenant of `entry` does;
    None: nobody has so much."""
    others = [each for each in spared(running) if each.tenant != entry.tenant]
    if not others:
        return None
    shares = held(running)
    victim = max(reversed(others), key=lambda each: shares[each.tenant])
    left = shares[victim.tenant] - len(victim.session.slots) / victim.weight
    return victim if IMBALANCE * (shares[entry.tenant] + tokens / entry.weight) <= left else None


def prompt_weights(prompts: Sequence[RunningSession]) -> list[float]:
    """Return the weight of each prompt in a step: those of a tenant have its weight together. Equal ones are 1."""
    count = Counter(entry.tenant for entry in prompts)
    if len(count) <= 1:
        return [1.0] * len(prompts)
    return [entry.weight / count[entry.tenant] for entry in prompts]
