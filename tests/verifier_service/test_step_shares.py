"""The rule for sharing step time among tenants, tested with made-up latencies and sessions."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.costs.step_latency import StepLatency
from verifier_service.scheduling.step_shares import MEASURED_FIRST, MEASURED_LATER, REMEMBERED, Division, StepShares

STEPS = 60


@dataclass
class Text:
    """The part of a session that the rule reads: decoding, or with `prompt` tokens left to prefill."""

    remaining_prompt: int = 0

    @property
    def computable(self) -> int:
        return self.remaining_prompt + 1


@dataclass(eq=False)
class Entry:
    tenant: str
    weight: float
    arrival: int
    session: Text
    beside: float = 0.0
    last_step: int = 0


latencies = st.builds(
    lambda first, slopes: StepLatency(
        (1, 4, 16, 64, 256),
        list(
            itertools.accumulate(
                (slope * rows for slope, rows in zip(slopes, (3, 12, 48, 192), strict=True)), initial=first
            )
        ),
    ),
    st.floats(0.1, 10),
    st.lists(st.sampled_from([0.0, 0.01, 0.1, 1.0]), min_size=4, max_size=4),
)
crowds = st.lists(
    st.tuples(
        st.sampled_from([0.5, 1.0, 3.0]),  # weight
        st.lists(st.sampled_from([0.0, 0.0, 0.1, 5.0]), min_size=1, max_size=20),  # seconds beside rows, per text
    ),
    min_size=1,
    max_size=4,
)


def entries_of(crowd: list[tuple[float, list[float]]]) -> list[Entry]:
    arrivals = itertools.count()
    return [
        Entry(f"tenant {number}", weight, next(arrivals), Text(), beside)
        for number, (weight, texts) in enumerate(crowd)
        for beside in texts
    ]


def cost(division: Division, entries: list[Any]) -> float:
    return division.latency.of(len(entries)) + float(sum(entry.beside for entry in entries))


def divided(shares: StepShares, entries: list[Any], latency: StepLatency) -> Division | None:
    """Plan steps up to the next one without a measurement; return that one."""
    while True:
        division = shares.divide(entries, latency)
        shares.begin(division)
        if division is None or not division.measures:
            return division


@given(latencies, crowds, st.lists(st.integers(0, 12), min_size=8, max_size=8), st.floats(1e-3, 1.0))
def test_no_tenant_gets_fewer_candidates_than_none(
    latency: StepLatency, crowd: list[tuple[float, list[float]]], extra: list[int], taken: float
) -> None:
    entries: Any = entries_of(crowd)
    latency.observe(3, taken)  # the speed is no longer 1: products and quotients round
    shares = StepShares(64)
    for _ in range(STEPS):
        if (division := shares.divide(entries, latency)) is None:
            return
        wanted = {f"tenant {number}": extra[number % len(extra)] for number in range(len(crowd))}
        allowed = division.candidate_rows(wanted)
        assert all(0 <= count <= wanted[tenant] for tenant, count in allowed.items())
        shares.begin(division)


@given(latencies, crowds)
def test_no_step_is_longer_than_fair_sharing_allows(
    latency: StepLatency, crowd: list[tuple[float, list[float]]]
) -> None:
    """A step may use up unused parts of earlier steps. Over all steps, the total may exceed fair shares by one session
    of each tenant."""
    entries: Any = entries_of(crowd)
    shares = StepShares(64)
    took = allowed = 0.0
    for _ in range(STEPS):
        division = shares.divide(entries, latency)
        if division is None:
            assert len(crowd) == 1
            return
        bound, least = division.bound({})
        saved = sum(max(0.0, seconds) for seconds in shares.credit.values())
        seconds = cost(division, division.taking_part)
        assert seconds <= (bound + saved) * (1 + 1e-6)
        assert {id(e) for e in entries if e.tenant == least} <= set(map(id, division.taking_part))
        assert sorted(map(id, division.taking_part + division.sitting_out)) == sorted(map(id, entries))
        if division.measures:
            assert {e.tenant for e in division.taking_part} == {least}
        elif cost(division, entries) <= bound:
            assert not division.sitting_out
        took, allowed = took + seconds, allowed + bound
        shares.begin(division)
    assert took <= (allowed + bound) * (1 + 1e-6)


@given(latencies, crowds)
def test_every_session_has_its_turn(latency: StepLatency, crowd: list[tuple[float, list[float]]]) -> None:
    """The turn comes within the steps that the tenant's part needs for all of the tenant's sessions."""
    entries: Any = entries_of(crowd)
    shares = StepShares(64)
    division = shares.divide(entries, latency)
    if division is None or not division.sitting_out:
        return
    bound, least = division.bound({})
    others = {e.tenant: e.weight for e in entries if e.tenant != least}
    left = bound - division.alone(least)
    steepest = max(latency.of(rows + 1) - latency.of(rows) for rows in range(1, len(entries) + 1))
    for tenant, weight in others.items():
        own = [e for e in entries if e.tenant == tenant]
        whole = len(own) * steepest + sum(e.beside for e in own)
        steps = math.ceil(whole / (left * weight / sum(others.values())) * (1 + 1e-6)) + 1
        if steps > 2000:
            continue
        steps += MEASURED_FIRST + 2 * steps // MEASURED_LATER + 1  # measuring steps, in which the tenant has no part
        shares = StepShares(64)
        for e in entries:
            e.last_step = 0
        for _ in range(steps):
            division = shares.divide(entries, latency)
            assert division is not None
            shares.begin(division)
        assert all(e.last_step for e in own)


@pytest.mark.parametrize(("weight", "turns"), [(1.0, 100), (3.0, 33), (0.5, 200)])
def test_rows_go_by_weight(weight: float, turns: int) -> None:
    """All rows cost the same. One tenant has this weight and one text, the other has weight 1 and 20 texts."""
    latency = StepLatency((1, 256), [1.0, 256.0])
    entries: Any = [Entry("one", weight, 0, Text())] + [Entry("many", 1.0, 1 + i, Text()) for i in range(20)]
    shares, rows = StepShares(64), 0
    for _ in range(100):
        division = divided(shares, entries, latency)
        assert division is not None
        rows += len(division.taking_part) - 1
    assert rows == pytest.approx(turns, abs=1)
    counts = [entry.last_step for entry in entries[1:]]
    assert min(counts) > 0 or turns < 40


def test_prompts_repay_an_overdraft_of_decoding_once() -> None:
    """A tenant's text overdraws its credit, as by one slow mask, and ends; its prompt goes on."""
    latency = StepLatency((1, 256), [1.0, 256.0])
    text, own = Entry("text", 1.0, 0, Text()), Entry("prompt", 1.0, 2, Text())
    prompt: Any = Entry("prompt", 1.0, 1, Text(1000))
    shares = StepShares(64)
    divided(shares, [text, own, prompt], latency)
    shares.credit["prompt"] = -20.0
    read = 0
    for _ in range(100):
        division = divided(shares, [text, prompt], latency)
        assert division is not None
        part = division.prompt_seconds["prompt"]
        chunk = 8 if part > 0 else 0
        shares.charge("prompt", latency.of(1 + chunk) - latency.of(1) - part)
        read += chunk
    assert read >= 70


def test_one_tenant_is_never_divided() -> None:
    latency = StepLatency((1, 256), [1.0, 256.0])
    assert StepShares(64).divide([Entry("one", 1.0, i, Text()) for i in range(20)], latency) is None  # type: ignore[misc]


@pytest.mark.parametrize("latency", [StepLatency((1, 256), [1.0, 256.0]), StepLatency((1, 256), [1.0, 1.0])])
def test_rows_alone_are_measured_now_and_then(latency: StepLatency) -> None:
    """The measurement is for the tenant with the lowest counter, and more frequent at first. Two tenants that alternate
    there are not measured more often."""
    entries: Any = [Entry("one", 1.0, 0, Text()), Entry("two", 1.0, 1, Text())]
    entries += [Entry("crowd", 1.0, 2 + i, Text()) for i in range(20)]
    shares, measured = StepShares(64), []
    for step in range(1000):
        entries[step % 2].beside = 0.001
        entries[1 - step % 2].beside = 0.0
        division = shares.divide(entries, latency)
        assert division is not None
        shares.begin(division)
        measured.append(division.measures)
    assert 2 <= sum(measured[:50]) <= 6
    assert 10 <= sum(measured[100:]) <= 30


@pytest.mark.parametrize("replaced_every", [2, 1000])
def test_many_tenants_are_measured_no_more_often_than_two(replaced_every: int) -> None:
    """The tenant that sets the bound changes with the texts and with the noise in their costs."""
    latency, noise = StepLatency((1, 256), [1.0, 256.0]), random.Random(0)
    entries: Any = [Entry(f"tenant {number}", 1.0, number, Text()) for number in range(32)]
    shares, measured = StepShares(64), 0
    for step in range(640):
        if step % replaced_every == 0:
            entries = [*entries[1:], Entry(f"new {step}", 1.0, 32 + step, Text())]
        for entry in entries:
            entry.beside = 0.01 + 0.001 * noise.random()
        division = shares.divide(entries, latency)
        assert division is not None
        shares.begin(division)
        measured += division.measures
    assert 640 // MEASURED_LATER <= measured <= 640 // MEASURED_LATER + MEASURED_FIRST


def test_nobody_sits_out_where_rows_are_free() -> None:
    latency = StepLatency((1, 64, 256), [1.0, 1.01, 4.0])
    entries: Any = [Entry("one", 1.0, 0, Text())] + [Entry("many", 1.0, 1 + i, Text()) for i in range(60)]
    division = divided(StepShares(64), entries, latency)
    assert division is not None
    assert not division.sitting_out


def test_a_prompt_has_its_tenants_part_and_a_debt_is_paid() -> None:
    latency = StepLatency((1, 256), [1.0, 256.0])
    entries: Any = [Entry("text", 1.0, 0, Text()), Entry("prompt", 1.0, 1, Text(100))]
    shares, read, seconds = StepShares(64), 0, 0.0
    for _ in range(100):
        division = divided(shares, entries, latency)
        assert division is not None
        part = division.prompt_seconds["prompt"]
        chunk = 8 if part > 0 else 0  # smallest chunk
        shares.charge("prompt", latency.of(1 + chunk) - latency.of(1) - part)
        read, seconds = read + chunk, seconds + latency.of(1 + chunk)
    assert 96 <= read <= 112
    assert seconds <= 2 * 100 + 8


@pytest.mark.parametrize(("prompts", "beside"), [(8, 0.0), (1, 0.012)])
def test_a_text_takes_part_beside_prompts_of_its_own_tenant(prompts: int, beside: float) -> None:
    """Even if its row or grammar costs more than its part of one step, and the prompts cost more than theirs."""
    latency = StepLatency((1, 256), [0.008, 0.518])
    text: Any = Entry("both", 1.0, 2, Text(), beside)
    entries: Any = [Entry("other", 1.0, 0, Text()), Entry("other", 1.0, 1, Text()), text]
    entries += [Entry("both", 1.0, 3 + number, Text(1000)) for number in range(prompts)]
    shares, steps = StepShares(64), 0
    for _ in range(200):
        division = shares.divide(entries, latency)
        assert division is not None
        shares.begin(division)
        rows = len(division.taking_part)
        steps += text in division.taking_part
        for tenant, part in division.prompt_seconds.items():
            chunk = 8 if part > 0 else 0  # smallest chunk
            shares.charge(tenant, latency.of(rows + chunk) - latency.of(rows) - part)
    assert steps >= 40


def with_grammar(tenant: str, seconds: float = 0.0) -> Any:
    """Return a session whose grammar took these seconds in a step."""
    text = SimpleNamespace(grammar="a grammar", grammar_seconds=seconds)
    return SimpleNamespace(tenant=tenant, usual_grammar_seconds=0.0, session=text)


def test_the_grammar_cost_of_a_busy_tenant_is_remembered_among_many_others() -> None:
    shares, result = StepShares(prefill_rows=512), cast("Any", None)
    for number in range(REMEMBERED):
        shares.observe_grammars([(with_grammar("busy", 0.5), result), (with_grammar(f"tenant {number}", 0.1), result)])
    new = with_grammar("busy")
    shares.joined(new)
    assert new.usual_grammar_seconds == pytest.approx(0.5)
