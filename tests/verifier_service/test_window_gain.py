"""AUTO opens lookahead windows where they pay; elsewhere, trials cost next to nothing. Costs are rows times a price,
without a clock."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.sampling import Sampling
from specdec.decoding.speculation import CandidateSource
from tests.replay.clock import Clock
from tests.replay.engines import TimedEngine
from tests.verifier_service.fakes import BAD, Client, Decided, FixedLatency, TextEngine, run, step_loop
from tests.verifier_service.test_ngram_proposer import Parrot
from verifier_service.backend.request import Policy
from verifier_service.backend.result import LOOKAHEAD, Mode
from verifier_service.costs.step_latency import MEASURED_ROWS, StepLatency
from verifier_service.sessions.window_gain import MAX_TENANTS, TenantWindows, WindowGain, WindowsByTenant
from verifier_service.settings.tuning import DEFAULTS

TUNING = DEFAULTS.windows
SIZES = TUNING.sizes
SMALLEST = SIZES[0]
WINDOWS = Policy(frozenset({CandidateSource.LOOKAHEAD}), 64, 0.0)


@dataclass
class Text:
    """A text whose windows bring `brings` tokens a step, depending on their size; a row costs `price` tokens."""

    brings: Callable[[Lookahead], float]
    price: float
    tenant: TenantWindows = field(default_factory=TenantWindows)
    tokens: float = 0.0
    cost: float = 0.0
    used: list[Lookahead | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gain = WindowGain(self.tenant)
        self._open: Lookahead | None = None
        self._levels = 0

    def of(self, size: Lookahead) -> float:
        return size.rows * self.price

    def steps(self, count: int) -> None:
        for _ in range(count):
            size = self.gain.wanted(SIZES, self.of, self._open)
            self._levels = min(self._levels + 1, size.ngram - 1) if size is not None and size == self._open else 1
            self._open = size
            accepted, full = 0.0, False
            if size is not None:
                full = self._levels == size.ngram - 1
                accepted = self.brings(size) if full else 0.0
                self.gain.begin(size, SIZES, self.of)
                self.gain.charge(size, self.of(size), 0.0)
                self.cost += self.of(size)
            self.used.append(size)
            self.tokens += 1 + accepted
            if not self.gain.observe(1 + accepted, accepted, full=full):  # type: ignore[arg-type]
                self._open = None


def test_a_text_that_ends_in_a_trial_gives_back_the_rest_of_its_price() -> None:
    tenant = TenantWindows(budget=8.0)
    text = Text(never, 0.02, tenant)
    text.steps(3)
    assert set(text.used) == {SMALLEST}
    assert tenant.budget < 8.0 - 8 * SMALLEST.rows * 0.02
    for _ in range(2):
        text.gain.close()
        assert tenant.budget >= 8.0 - text.cost - 1e-9


def never(_: Lookahead) -> float:
    return 0.0


def by_rows(size: Lookahead) -> float:
    """Larger windows bring more, with diminishing returns; the smallest brings 1 token a step."""
    return 0.42 * math.log(1 + 2 * size.rows)


@given(st.floats(0.0, 1.0), st.integers(1, 3000))
def test_where_none_ever_hits_trials_cost_two_hundredths_of_the_tokens_at_most(price: float, steps: int) -> None:
    text = Text(never, price)
    text.steps(steps)
    of_last_step = SMALLEST.rows * price  # a trial ends with the step in which its price is used up
    assert text.cost <= TUNING.trial_share * text.tokens + of_last_step
    assert TUNING.trial_share <= 0.02


def test_such_a_text_pauses_longer_and_longer() -> None:
    text = Text(never, 0.02)
    text.steps(20_000)
    assert set(text.used) == {None, SMALLEST}
    assert 0 < text.cost < 0.005 * text.tokens


@pytest.mark.parametrize("price", [0.0, 0.002, 0.01, 0.03, 0.08])
def test_the_size_that_brings_most_is_found_from_the_smallest_up(price: float) -> None:
    text = Text(by_rows, price)
    text.steps(3000)
    opened = [size for size in dict.fromkeys(text.used) if size is not None]
    assert opened == list(SIZES[: len(opened)])
    net = {size: by_rows(size) - text.of(size) for size in SIZES}
    (usual, _), *_ = Counter(text.used[-500:]).most_common()
    assert usual is not None
    assert net[usual] >= max(net.values()) - TUNING.margin
    assert text.tokens - text.cost >= 0.9 * 3000 * (1 + net[usual])


def test_a_window_closes_when_it_finds_nothing_more() -> None:
    found = [1.2]
    text = Text(lambda _: found[0], 0.03)
    text.steps(1000)
    assert text.used[-1] is not None
    found[0], paid = 0.0, text.cost
    text.steps(1000)
    assert text.used[-1] is None
    assert text.cost - paid < 0.02 * 1000  # within the share of the following tokens


def test_the_next_text_of_a_tenant_starts_with_what_is_known() -> None:
    tenant = TenantWindows()
    Text(by_rows, 0.03, tenant).steps(2000)
    alike, other, unlike = Text(by_rows, 0.03, tenant), Text(by_rows, 0.03), Text(never, 0.03, tenant)
    alike.steps(50)
    other.steps(50)
    assert alike.used[0] is not None
    assert set(other.used) == {None}
    unlike.steps(200)
    assert unlike.used[-1] is None
    assert unlike.cost < 16  # tokens, although windows paid in the tenant's other texts


def test_the_batch_decides_by_what_rows_cost_in_it() -> None:
    tenant = TenantWindows()
    Text(by_rows, 0.01, tenant).steps(2000)
    crowd = Text(by_rows, 0.4, tenant)
    crowd.steps(20)
    assert set(crowd.used) == {None}


def test_a_tenants_texts_share_one_budget_and_tenants_share_nothing() -> None:
    known = WindowsByTenant()
    assert known.of("a") is known.of("a")
    assert known.of("a") is not known.of("b")


def test_threads_that_make_sessions_share_a_tenants_windows() -> None:
    """More tenants than are remembered, so that threads add and drop them at the same time."""
    known, tenants = WindowsByTenant(), [str(number) for number in range(MAX_TENANTS + 8)]

    def make(_: int) -> None:
        for _ in range(20):
            for tenant in tenants:
                known.of(tenant)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(make, range(4)))
    finally:
        sys.setswitchinterval(before)
    assert len(known._known) == MAX_TENANTS


@pytest.mark.parametrize("jacobi", [False, True])
def test_a_step_loop_opens_windows_by_itself_where_they_hit(jacobi: bool) -> None:
    """The target is predictable and lookups are off: plain steps would bring one token each."""
    policy = Policy(WINDOWS.drafters, 64, 0.0, jacobi=jacobi)
    engine = Parrot(30)
    loop = step_loop(engine, FixedLatency(0.03), controller=Decided(Mode.NGRAM))
    client = Client(loop, [2 + (i + 1) % 7 for i in range(15)], 900, policy=policy)
    while not client.over:
        client.read()
        loop.turn()
    sources = [source for result in client.mail.results for source in result.sources]
    assert client.tokens == [2 + i % 7 for i in range(15, 915)]
    assert sources[-300:].count(LOOKAHEAD) > 120
    assert sum(1 + 0.03 * rows for rows in engine.steps) < 0.8 * 900 * 1.03


class ThreadedParrot(Parrot):
    """On the CPU, with one thread."""

    threads = (1,)

    def use_threads(self, count: int) -> None:
        assert count == 1


def test_adaptive_speculation_finds_windows_that_pay_within_two_seconds() -> None:
    """With lookups off and a virtual clock, plain decoding brings 200 tokens a second, a fixed window 308. The measured
    rate includes trials of larger windows and probes of plain decoding."""
    rates = {}
    for name, policy in (("auto", WINDOWS), ("fixed", Policy(WINDOWS.drafters, 64, 0.0, lookahead=SMALLEST))):
        clock = Clock()
        with clock.rules():
            engine = TimedEngine(ThreadedParrot(40), clock, 0.97 * 0.005, 0.03 * 0.005)
            latency = StepLatency(MEASURED_ROWS, [0.005 * (0.97 + 0.03 * rows) for rows in MEASURED_ROWS])
            loop = step_loop(engine, latency)  # type: ignore[arg-type]
            client = Client(loop, [2 + (i + 1) % 7 for i in range(15)], 2300, policy=policy)
            at = []
            while not client.over:
                client.read()
                loop.turn()
                at.append((clock.now, len(client.tokens)))
        (start, had) = next(entry for entry in at if entry[0] >= at[0][0] + 2.0)
        rates[name] = (at[-1][1] - had) / (at[-1][0] - start)
    assert rates["auto"] > 0.9 * rates["fixed"] > 0.9 * 1.4 * 200


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.5, seed=4),
        pytest.param(Sampling(banned_tokens=frozenset({BAD})), marks=pytest.mark.verify),
    ],
)
def test_a_step_loop_pays_next_to_nothing_where_they_do_not(sampling: Sampling) -> None:
    """Compares the cost of all steps, with rows at their price, with that of plain decoding."""
    price = 0.06
    engine = TextEngine(40)
    engine.bad = -1
    loop = step_loop(engine, FixedLatency(price), controller=Decided(Mode.NGRAM))
    client = Client(loop, [2, 3, 4], 2000, sampling=sampling, policy=WINDOWS)
    run(loop, client, turns=2100)
    assert client.tokens == client.want
    steps = engine.steps[1:]  # the first one is the prompt's
    assert max(steps) > 1
    assert sum(1 + price * rows for rows in steps) <= 1.02 * len(client.tokens) * (1 + price)
