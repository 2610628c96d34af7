"""Shares of tenants: whose turn it is to get memory, and who has more of it than others would.

Turns go by virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models", Algorithm 2): each
tenant's counter grows with what it gets, divided by its weight, and the tenant with the smallest counter is next. When
a tenant asks that had no new session waiting, its counter is raised to at least the smallest one of tenants that have
some, and to at least the level, less some texts' worth (`BURST`). The level is what the counters of all tenants had
reached that were in some step or waited during it: a virtual time, as in start-time fair queueing (Goyal et al. 1996).
So hardly any time that was not used is saved up, and what a tenant had alone is not held against it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence, Set
from itertools import islice
from typing import NamedTuple

from specdec.engine.kv.blocks import BLOCK
from verifier_service.sessions.running_session import RunningSession

GENERATED_COST = 2.0
"""Cost of a generated token, where one of a prompt costs 1, as in the paper: it takes a step, not a row of one."""

BURST = 4.0
"""Usual texts that a tenant may have before others if it wants some again. Without, each of a few requests that come at
once would wait until others have had as much as the one before it: who asks for little seldom asks evenly."""

USUAL_SMOOTHING = 0.05
"""Weight of the latest text in the moving average of what texts cost."""

REMEMBERED = 1024
"""Tenants without sessions whose counters are kept. Who leaves with much and returns at once is not given it anew."""

IMBALANCE = 1.25
"""How many times as much memory for its weight a tenant must have for some to be taken from it, counting what is left
then. A text that loses its memory is computed again, and smaller differences even out as texts end. With 2, a tenant
that asks for a fifth of what fits waits now and then until a text of one that floods has ended."""


class Urgent(NamedTuple):
    """Whose prompts go before whose texts in a step: no tenant is in both."""

    tenants: Set[str]
    yielding: Set[str]


NOBODY = Urgent(frozenset(), frozenset())


class Shares:
    """The counters of tenants. Belongs to the step loop's thread."""

    def __init__(self) -> None:
        self._counters: OrderedDict[str, float] = OrderedDict()  # tokens over weight; who left last comes last
        self._sessions: Counter[str] = Counter()
        self._level = 0.0  # that the counters of all tenants had reached that were in some step or waited
        self._usual = 0.0  # cost of a text, moving average

    @property
    def tenants(self) -> int:
        """The number of tenants that have sessions."""
        return len(self._sessions)

    def joined(self, entry: RunningSession, wanting: Collection[str]) -> None:
        """Note that a session has come, which waits for memory as other new ones of the tenants `wanting` it do."""
        tenant = entry.tenant
        if tenant not in wanting:
            of_others = min((self._counters[each] for each in wanting), default=0.0)
            least = max(of_others, self._level) - BURST * self._usual / entry.weight
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), least)
        self._sessions[tenant] += 1

    def left(self, entry: RunningSession) -> None:
        """Note that a session is over."""
        tenant, cost = entry.tenant, entry.cost
        if cost:
            self._usual += USUAL_SMOOTHING * (cost - self._usual) if self._usual else cost
        self._sessions[tenant] -= 1
        if self._sessions[tenant]:
            return
        del self._sessions[tenant]
        self._counters.move_to_end(tenant)
        forgotten = len(self._counters) - len(self._sessions) - REMEMBERED
        if forgotten > 0:
            idle = (each for each in self._counters if each not in self._sessions)
            for tenant in list(islice(idle, forgotten)):
                del self._counters[tenant]

    def got_prompt(self, entry: RunningSession, tokens: int) -> None:
        """Count tokens of a prompt that are to be computed. A negative number takes back what will not be."""
        self._count(entry, tokens)

    def got_tokens(self, entry: RunningSession, tokens: int) -> None:
        """Count generated tokens."""
        self._count(entry, GENERATED_COST * tokens)

    def stepped(self, tenants: Collection[str]) -> None:
        """Note whose sessions were in a step, or waited; their tokens are counted already."""
        self._level = max(self._level, min((self._counters[each] for each in tenants), default=0.0))

    def next(self, waiting: Iterable[RunningSession]) -> RunningSession | None:
        """Return the waiting session whose turn it is: the first one of the tenant with the smallest counter, and of
        equal ones of that with fewer sessions for its weight."""

        def turn(entry: RunningSession) -> tuple[float, float, tuple[bool, int, int]]:
            return self._counters[entry.tenant], self._sessions[entry.tenant] / entry.weight, entry.precedence

        return min(waiting, key=turn, default=None)

    def urgent(self, prompts: Collection[RunningSession], decoding: Collection[RunningSession]) -> Urgent:
        """Return whose prompts go before whose texts. The texts are of tenants that have more sessions for their
        weight, and counters that are not below those of the others but for what these prompts still lack."""
        if not prompts or len(self._sessions) < 2:  # as in most steps
            return NOBODY
        sessions: defaultdict[str, float] = defaultdict(float)
        lacking: defaultdict[str, float] = defaultdict(float)  # counted with the prompts, but not computed
        for entry in (*prompts, *decoding):
            sessions[entry.tenant] += 1 / entry.weight
        for entry in prompts:
            if not entry.preemptions:
                lacking[entry.tenant] += (entry.session.tree.base - entry.session.computed) / entry.weight
        had = {tenant: self._counters[tenant] - tokens for tenant, tokens in lacking.items()}
        decoders = {entry.tenant for entry in decoding}
        most = max((sessions[each] for each in decoders), default=0.0)
        highest = max((self._counters[each] for each in decoders), default=0.0)
        able = [each for each in had if sessions[each] < most and had[each] <= highest]
        if not able:
            return NOBODY
        neediest = min(able, key=lambda each: (sessions[each], had[each]))
        yielding = {
            each for each in decoders if sessions[neediest] < sessions[each] and had[neediest] <= self._counters[each]
        }
        if not yielding:
            return NOBODY
        fewest = min(sessions[each] for each in yielding)
        lowest = min(self._counters[each] for each in yielding)
        return Urgent({each for each in able if sessions[each] < fewest and had[each] <= lowest}, yielding)

    def _count(self, entry: RunningSession, cost: float) -> None:
        entry.cost += cost
        self._counters[entry.tenant] += cost / entry.weight


def held(running: Iterable[RunningSession]) -> dict[str, float]:
    """Return the tokens of KV memory that each tenant's sessions hold, divided by its weight. What several of them
    share, which those of one tenant alone do, is counted once."""
    found: defaultdict[str, float] = defaultdict(float)
    for entry in running:
        assert entry.session.table is not None
        found[entry.tenant] += entry.session.table.share * BLOCK / entry.weight
    return found


def given_back(entry: RunningSession) -> float:
    """Return the tokens of KV memory that are free once a running session is preempted, divided by its weight."""
    assert entry.session.table is not None
    return entry.session.table.exclusive * BLOCK / entry.weight


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
    """Return the session to preempt so that `entry`, which waits, gets memory for `tokens` tokens: of those whose
    tenant then still holds `IMBALANCE` times what the tenant of `entry` does, the youngest of the tenant that holds
    most for its weight; None: nobody has so much."""
    others = [each for each in spared(running) if each.tenant != entry.tenant]
    if not others:
        return None
    shares = held(running)
    wanted = IMBALANCE * (shares[entry.tenant] + tokens / entry.weight)
    beyond = (each for each in reversed(others) if wanted <= shares[each.tenant] - given_back(each))
    return max(beyond, key=lambda each: shares[each.tenant], default=None)


def prompt_weights(prompts: Sequence[RunningSession]) -> list[float]:
    """Return the weight of each prompt in a step: those of a tenant have its weight together. Equal ones are 1."""
    count = Counter(entry.tenant for entry in prompts)
    if len(count) <= 1:
        return [1.0] * len(prompts)
    return [entry.weight / count[entry.tenant] for entry in prompts]
