"""Step time is shared among tenants: how one tenant's rows, candidates, windows, grammars and prompts affect another.

Steps take virtual time, computed from their rows, so a text's duration alone and beside others is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.speculation import OWN_DRAFTERS, CandidateSource
from tests.replay.clock import Clock
from tests.replay.engines import TimedEngine
from tests.verifier_service.fakes import Client, Decided, FixedLatency, TextEngine, ThreadedTextEngine, step_loop
from tests.verifier_service.step_loop.helpers import NO_BAD, SlowGrammar, client, text, turns
from verifier_service.backend.request import Policy
from verifier_service.backend.result import Mode
from verifier_service.costs.step_latency import MEASURED_ROWS, StepLatency
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, ProposalStats, Proposer
from verifier_service.step_loop import StepLoop

FAIR = 2.2
"""Maximal slowdown of a text beside one tenant of equal weight: 2, plus rounding."""

PLAIN = Policy(frozenset(), 8, 0.0)
FORCED = Policy(frozenset({CandidateSource.REMOTE}), 64, 0.0, forced=True)
LOOKUPS = Policy(frozenset({CandidateSource.NGRAM}), 8, 0.0, forced=True)
WINDOW = Policy(OWN_DRAFTERS, 64, 0.0, lookahead=Lookahead(15, 5, 15))

TOKENS = 60


class SlowProposer(Proposer):
    """Proposes nothing, and takes `seconds` for it."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def propose(self, step: ComingStep) -> ProposalStats:
        self._clock.now += self._seconds * sum(1 for _ in step.proposed_for())
        return NO_PROPOSALS


class OneThread(ThreadedTextEngine):
    threads = (1,)


class Site:
    """A step loop on a virtual clock: a pass over n rows takes `base` + `row` * n seconds."""

    def __init__(self, clock: Clock, base: float, row: float, proposing: float, latency: StepLatency | None) -> None:
        self.clock = clock
        self.engine = OneThread(1200)
        self.loop = StepLoop(
            TimedEngine(self.engine, clock, base, row),
            max_unread_tokens=10_000,
            latency=latency,
            proposers=[SlowProposer(clock, proposing)],
        )
        self.others: list[Client] = []
        self.prompts = 0  # length of the other tenant's prompts; one is always present

    def other(self, seed: int, policy: Policy = PLAIN, grammar: float = 0.0, **fields: Any) -> None:
        made = Client(self.loop, text(5, seed), 200, tenant="other", policy=policy, sampling=NO_BAD, **fields)
        if grammar:
            made.session.grammar = SlowGrammar(self.clock, grammar)  # type: ignore[assignment]
        self.others.append(made)

    def prompt(self) -> None:
        """Add a request of the other tenant: a long prompt, and one token to generate."""
        self.prompts += 1
        self.others.append(Client(self.loop, text(600, self.prompts), 1, tenant="other", policy=PLAIN, sampling=NO_BAD))

    def seconds(self, policy: Policy = PLAIN, tokens: int = TOKENS, draft: int = 0) -> float:
        """Return the seconds from first to last token of another tenant's text; `draft`: correct candidates in each
        step."""
        mine = Client(self.loop, text(5, 7), tokens, tenant="quiet", policy=policy, sampling=NO_BAD)
        begin: float | None = None
        while not mine.over:
            for each in self.others:
                if each.session.policy is FORCED and not each.over and not each.session.remaining_prompt:
                    each.offer(4, [2] * 5)
            if self.prompts and not any(not each.over for each in self.others):
                self.prompt()
            if draft and not mine.session.remaining_prompt:
                mine.offer(draft)
            assert self.loop.turn() == 0.0
            if begin is None and mine.tokens:
                begin = self.clock.now
        assert mine.tokens == mine.want
        assert begin is not None
        return self.clock.now - begin


@contextmanager
def site(base: float, row: float, *, proposing: float = 0.0, latency: StepLatency | None = None) -> Iterator[Site]:
    """`proposing`: seconds a proposer takes per session; `latency`: the initial model, None to measure it."""
    clock = Clock()
    with clock.rules():
        yield Site(clock, base, row, proposing, latency)


def crowd(site: Site, texts: int, policy: Policy = PLAIN, grammar: float = 0.0) -> None:
    for seed in range(texts):
        site.other(seed, policy, grammar)


CROWDS: Mapping[str, Callable[[Site], None]] = {
    "16 texts": lambda site: crowd(site, 16),
    "96 samples": lambda site: crowd(site, 96),
    "lookahead": lambda site: crowd(site, 16, WINDOW),
    "drafts": lambda site: crowd(site, 16, FORCED),
    "two with drafts": lambda site: crowd(site, 2, FORCED),
    "two with windows": lambda site: crowd(site, 2, WINDOW),
    "prompts": Site.prompt,
    "grammars": lambda site: crowd(site, 4, grammar=0.005),
}

NAMES = [pytest.param(name, marks=pytest.mark.verify) if name == "96 samples" else name for name in CROWDS]

CPU, LINEAR, GPU = (0.001, 0.0003), (0.0, 0.002), (0.010, 0.0)
"""Seconds per pass and per row: on a CPU, with rows as the only cost, and with free additional rows."""


@pytest.mark.parametrize("cost", [CPU, LINEAR], ids=["cpu", "linear"])
@pytest.mark.parametrize("name", NAMES)
def test_a_text_takes_twice_as_long_beside_one_tenant(name: str, cost: tuple[float, float]) -> None:
    with site(*cost) as one:
        alone = one.seconds()
        CROWDS[name](one)
        turns(one.loop, 2 if name == "prompts" else 10)
        beside = one.seconds()
    assert beside / alone < FAIR


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_speculates_takes_twice_as_long_beside_one_tenant(name: str) -> None:
    forced = Policy(frozenset({CandidateSource.REMOTE}), 8, 0.0, forced=True)
    with site(*CPU) as one:
        alone = one.seconds(forced, draft=4)
        CROWDS[name](one)
        turns(one.loop, 2 if name == "prompts" else 10)
        beside = one.seconds(forced, draft=4)
    assert beside / alone < FAIR


def test_what_proposers_cost_is_shared_too() -> None:
    """Lookups dominate the cost of a row."""
    with site(*CPU, proposing=0.002) as one:
        alone = one.seconds()
        crowd(one, 16, LOOKUPS)
        turns(one.loop, 10)
        beside = one.seconds()
        assert beside / alone < FAIR
        assert all(each.session.generated > 10 for each in one.others)


@pytest.mark.parametrize("name", ["16 texts", pytest.param("96 samples", marks=pytest.mark.verify), "lookahead"])
@pytest.mark.parametrize("slope", [0.1, 3.0])
def test_what_was_measured_at_start_may_be_wrong(name: str, slope: float) -> None:
    """While both tenants are active, no step has the quiet tenant's row alone, except occasionally to measure it."""
    base, row = CPU
    begun = [(base + row) * (1 + slope * row / base * (count - 1)) for count in MEASURED_ROWS]
    with site(base, row, latency=StepLatency(MEASURED_ROWS, begun)) as one:
        alone = (base + row) * (TOKENS - 1)
        CROWDS[name](one)
        turns(one.loop, 50)
        one.seconds()
        assert one.seconds() / alone < FAIR


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_a_wrong_row_cost_is_corrected_beside_another_tenant(tenant: str) -> None:
    """As measured by a verifier that started on a busy machine: no candidate seems to pay."""

    def true(rows: int) -> float:
        return 0.010 + 0.0001 * rows

    latency = StepLatency(MEASURED_ROWS, [true(rows) * (2 if rows > 2 else 1) for rows in MEASURED_ROWS])
    drafted = Policy(frozenset({CandidateSource.REMOTE}), 8, 0.0)
    with site(0.010, 0.0001, latency=latency) as here:
        both = [
            Client(here.loop, text(5, seed), 700, tenant=of, policy=drafted, sampling=NO_BAD)
            for seed, of in ((7, "a"), (8, tenant))
        ]
        for _ in range(150):
            for each in both:
                if not each.over and not each.session.remaining_prompt:
                    each.offer(4)
            here.loop.turn()
        assert here.loop.stats.offered > 300
        assert latency.of(10) < 1.3 * true(10)


def test_nobody_sits_out_where_further_rows_are_free() -> None:
    with site(*GPU) as one:
        alone = one.seconds()
        crowd(one, 60)
        turns(one.loop, 10)
        before = [each.session.generated for each in one.others]
        assert one.seconds() < 1.2 * alone
        assert all(each.session.generated >= count + TOKENS - 1 for each, count in zip(one.others, before, strict=True))


def test_a_crowd_gets_what_a_quiet_tenant_leaves() -> None:
    """The crowd's texts take turns and together get half of the time."""
    with site(*LINEAR) as one:
        crowd(one, 16)
        turns(one.loop, 10)
        before = [each.session.generated for each in one.others]
        one.seconds()
        got = [each.session.generated - count for each, count in zip(one.others, before, strict=True)]
    assert max(got) - min(got) <= 1
    assert sum(got) >= TOKENS - 10


def test_a_heavier_tenant_gets_more() -> None:
    with site(*LINEAR) as one:
        alone = one.seconds()
        for seed in range(8):
            one.other(seed, weight=3.0)
        turns(one.loop, 10)
        assert one.seconds() == pytest.approx(4 * alone, rel=0.1)


def test_a_step_in_which_others_sit_out_waits_for_no_draft() -> None:
    """The step that measures one tenant's rows: the other one sits out."""
    clock = Clock()
    with clock.rules():
        loop = step_loop(TextEngine(40), latency=FixedLatency(0.02), controller=Decided(Mode.REMOTE_DRAFT))
        drafted = client(loop, 5, 1, 100, tenant="a", policy=Policy(frozenset({CandidateSource.REMOTE}), 8, 0.05))
        plain = client(loop, 5, 2, 100, tenant="b", policy=PLAIN)
        while not (drafted.tokens and plain.tokens):
            loop.turn()
            drafted.read()
            plain.read()
        sitting_out = 0
        for _ in range(20):
            drafted.session.draft_timing.committed(drafted.session.tree.base, clock.now)
            before = len(plain.tokens)
            assert loop.turn() == 0.0
            drafted.read()
            plain.read()
            sitting_out += len(plain.tokens) == before
        assert sitting_out
