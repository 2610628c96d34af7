"""Fair shares among tenants: the order of admission to KV memory, and the sessions to preempt.

Admission follows virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models", Algorithm 2),
with weights w:

    c_i = (cost of the tokens served to tenant i) / w_i;    a prompt token costs 1, a generated one GENERATED_COST

The tenant with the smallest counter is next. When a tenant with no new session waiting opens one, its counter is
lifted:

    c_i = max(c_i, max(V, min of c_j over tenants j with new sessions waiting) - BURST * u / w_i)

V is a virtual time. After each step it grows by the step's cost, divided by the sum of the weights of all active
tenants, as in weighted fair queueing (Demers et al. 1989), and at least to the smallest counter among them, as in
start-time fair queueing (Goyal et al. 1996). A tenant is active if one of its sessions is in the step, computes its
prompt, or waits. u is the mean cost of a text. So an idle tenant saves up almost no credit,
service that a tenant received while alone is not held against it, and V passes the counter of a waiting tenant although
new tenants keep coming.

Prompts of tenant i go before decoding of tenant j in a step (i is urgent, j yields) if

    n_i < n_j    and    c_i - l_i <= c_j

with n = (sessions in the step) / w, and l = (prompt tokens charged but not computed yet) / w.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import NamedTuple

from specdec.engine.kv.blocks import BLOCK
from verifier_service.sessions.running_session import RunningSession

GENERATED_COST = 2.0
"""Cost of a generated token relative to a prompt token, as in the paper: a generated token takes a whole step, not just
a row."""

BURST = 4.0
"""Credit of a tenant that returns from idle, in texts of mean cost. Light users often send a few requests together;
without credit, each request would wait until the other tenants had been served as much, per weight, as the request
before it."""

USUAL_SMOOTHING = 0.05
"""Weight of the latest text in the moving average of text costs."""

REMEMBERED = 1024
"""Maximum idle tenants whose counters are kept: leaving and returning must not reset a large counter."""

IMBALANCE = 1.25
"""A session is preempted for another tenant only if its own tenant then still holds this multiple of the other's memory
per weight: preemption costs a recomputation, and smaller differences even out as texts end. With 2, a tenant asking for
a fifth of the memory sometimes waits for a text of a flooding tenant to end."""


class Urgent(NamedTuple):
    """Tenants whose prompts go before the decoding of `yielding` tenants in a step; the two sets are disjoint."""

    tenants: Set[str]
    yielding: Set[str]


NO_URGENT = Urgent(frozenset(), frozenset())


class TenantShares:
    """The counters of tenants, owned by the step loop's thread."""

    def __init__(self) -> None:
        self._counters: OrderedDict[str, float] = OrderedDict()  # cost over weight; idle tenants in order of leaving
        self._sessions: Counter[str] = Counter()
        self._level = 0.0  # virtual time V
        self._served = 0.0  # cost since the last step
        self._usual = 0.0  # cost of a text, moving average

    @property
    def tenants(self) -> int:
        """The number of tenants with sessions."""
        return len(self._sessions)

    def joined(self, entry: RunningSession, wanting: Collection[str]) -> None:
        """Add a session that waits for memory; `wanting`: tenants with other new sessions waiting."""
        tenant = entry.tenant
        if tenant not in wanting:
            of_others = min((self._counters[other] for other in wanting), default=0.0)
            # No credit for idle time beyond a small burst: raise the counter to the waiting tenants' smallest one or
            # the virtual time, whichever is larger, less the burst.
            least = max(of_others, self._level) - BURST * self._usual / entry.weight
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), least)
        self._sessions[tenant] += 1

    def left(self, entry: RunningSession) -> None:
        """Remove a session."""
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
            idle = (tenant for tenant in self._counters if tenant not in self._sessions)
            for tenant in list(islice(idle, forgotten)):
                del self._counters[tenant]

    def got_prompt(self, entry: RunningSession, tokens: int) -> None:
        """Charge prompt tokens to be computed; a negative number refunds uncomputed ones."""
        self._count(entry, tokens)

    def got_tokens(self, entry: RunningSession, tokens: int) -> None:
        """Charge generated tokens."""
        self._count(entry, GENERATED_COST * tokens)

    def stepped(self, weights: Mapping[str, float]) -> None:
        """Advance the virtual time after a step has been charged; `weights`: of the active tenants, at least one."""
        served = max(0.0, self._served)  # negative after refunds: the following steps make up for that
        self._served -= served
        lowest = min(self._counters[tenant] for tenant in weights)
        self._level = max(self._level + served / sum(weights.values()), lowest)

    def next(self, waiting: Iterable[RunningSession]) -> RunningSession | None:
        """Return the session to admit next: by its tenant's counter, then by its tenant's sessions per weight (smallest
        first), then by precedence within the tenant."""

        def turn(entry: RunningSession) -> tuple[float, float, tuple[bool, int, int]]:
            return self._counters[entry.tenant], self._sessions[entry.tenant] / entry.weight, entry.precedence

        return min(waiting, key=turn, default=None)

    def urgent(self, prompts: Collection[RunningSession], decoding: Collection[RunningSession]) -> Urgent:
        """Return the urgent and the yielding tenants of a step (module docstring). A tenant yields to another that has
        fewer sessions per weight and has received at most as much service. Prompt tokens already charged but not yet
        computed do not count as service of that other tenant."""
        if not prompts or len(self._sessions) < 2:  # the common case, kept cheap
            return NO_URGENT
        sessions: defaultdict[str, float] = defaultdict(float)
        lacking: defaultdict[str, float] = defaultdict(float)  # charged at admission, not computed yet
        for entry in (*prompts, *decoding):
            sessions[entry.tenant] += 1 / entry.weight
        for entry in prompts:
            # A preempted session's prompt was charged when it was first admitted and is computed again for free.
            if not entry.preemptions:
                lacking[entry.tenant] += (entry.session.tree.base - entry.session.computed) / entry.weight
        had = {tenant: self._counters[tenant] - tokens for tenant, tokens in lacking.items()}
        decoders = {entry.tenant for entry in decoding}
        most = max((sessions[tenant] for tenant in decoders), default=0.0)
        highest = max((self._counters[tenant] for tenant in decoders), default=0.0)
        # To go before some decoding tenant, a tenant needs fewer sessions per weight (with many, its prompts could stop
        # all decoding) and at most as much service (a tenant ahead of its share waits its turn).
        able = [tenant for tenant in had if sessions[tenant] < most and had[tenant] <= highest]
        if not able:
            return NO_URGENT
        # The neediest tenant decides which tenants yield; the others may only join it.
        neediest = min(able, key=lambda tenant: (sessions[tenant], had[tenant]))
        yielding = {
            tenant
            for tenant in decoders
            if sessions[neediest] < sessions[tenant] and had[neediest] <= self._counters[tenant]
        }
        if not yielding:
            return NO_URGENT
        # Keep the tenants that may go before every yielding one. The strict n_i < n_j makes the two sets disjoint.
        fewest = min(sessions[tenant] for tenant in yielding)
        lowest = min(self._counters[tenant] for tenant in yielding)
        return Urgent({tenant for tenant in able if sessions[tenant] < fewest and had[tenant] <= lowest}, yielding)

    def _count(self, entry: RunningSession, cost: float) -> None:
        entry.cost += cost
        self._served += cost
        self._counters[entry.tenant] += cost / entry.weight


def held(running: Iterable[RunningSession]) -> dict[str, float]:
    """Return each tenant's tokens of KV memory, divided by its weight. Blocks shared by sessions (only within a tenant)
    count once."""
    found: defaultdict[str, float] = defaultdict(float)
    for entry in running:
        assert entry.session.table is not None
        found[entry.tenant] += entry.session.table.share * BLOCK / entry.weight
    return found


def given_back(entry: RunningSession) -> float:
    """Return the tokens of KV memory freed by preempting a running session, divided by its weight."""
    assert entry.session.table is not None
    return entry.session.table.exclusive * BLOCK / entry.weight


def spared(running: Iterable[RunningSession]) -> list[RunningSession]:
    """Return the sessions, in order, without the oldest of each tenant. The oldest is exempt from preemption, however
    much its tenant holds: otherwise a long text could be recomputed again and again and never finish."""
    first: dict[str, RunningSession] = {}
    return [entry for entry in running if first.setdefault(entry.tenant, entry) is not entry]


def youngest_of_largest(running: list[RunningSession]) -> RunningSession:
    """Return the session to preempt when running ones need memory: the youngest of the tenant with the most memory per
    weight, or the youngest of all if every tenant has only one session."""
    shares = held(running)
    return max(reversed(spared(running) or running[-1:]), key=lambda entry: shares[entry.tenant])


def competing_sessions(running: Sequence[RunningSession], entry: RunningSession, tokens: int) -> list[RunningSession]:
    """Return the running sessions whose growth may take memory from the waiting `entry`, which needs `tokens` tokens.
    Sessions that would be preempted first are left out: each tenant holding at least `IMBALANCE` times this tenant's
    future share would lose all its sessions except the oldest."""
    shares = held(running)
    own = shares.pop(entry.tenant, 0.0) + tokens / entry.weight
    beyond = {tenant for tenant, tokens_held in shares.items() if tokens_held >= IMBALANCE * own}
    preemptible = {id(other) for other in spared(running) if other.tenant in beyond}
    return [other for other in running if id(other) not in preemptible]


def youngest_beyond(running: list[RunningSession], entry: RunningSession, tokens: int) -> RunningSession | None:
    """Return the session to preempt so that the waiting `entry` gets memory for `tokens` tokens: the youngest of the
    tenant with the most memory per weight, among tenants that hold `IMBALANCE` times this tenant's future share even
    after the preemption. None if there is none."""
    others = [other for other in spared(running) if other.tenant != entry.tenant]
    if not others:
        return None
    shares = held(running)
    wanted = IMBALANCE * (shares.get(entry.tenant, 0.0) + tokens / entry.weight)
    # Above the limit even after the preemption: otherwise the two tenants would preempt each other in turn.
    beyond = (other for other in reversed(others) if wanted <= shares[other.tenant] - given_back(other))
    return max(beyond, key=lambda other: shares[other.tenant], default=None)


def prompt_weights(prompts: Sequence[RunningSession]) -> list[float]:
    """Return each prompt's weight in a step: its tenant's weight divided by the number of the tenant's prompts; 1 with
    a single tenant."""
    count = Counter(entry.tenant for entry in prompts)
    if len(count) <= 1:
        return [1.0] * len(prompts)
    return [entry.weight / count[entry.tenant] for entry in prompts]
