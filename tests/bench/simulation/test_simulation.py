from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from bench.simulation.bound import bound, trees
from bench.simulation.deployment import deployed, prompt, simulate
from bench.simulation.devices import PRESETS
from bench.simulation.ideal import ideal
from bench.simulation.language import Language
from bench.simulation.scenario import Scenario
from evaluation import virtual_time

SHORT = Scenario(PRESETS["70b"], sessions=3, drafts=2, delay=0.002, warm_up=5, measured=15)


@pytest.mark.parametrize("scenario", [SHORT, replace(SHORT, synchronous=True, nodes=8), replace(SHORT, drafts=0)])
def test_sessions_get_exactly_what_the_target_says(scenario: Scenario) -> None:
    async def main() -> list[list[int]]:
        async with deployed(scenario) as deployment:
            return await asyncio.gather(*(deployment.generate(number, max_tokens=60) for number in range(3)))

    texts = virtual_time.run(main())
    assert texts == [scenario.language.continuation(prompt(number), 60) for number in range(3)]


def test_a_run_can_be_repeated_exactly() -> None:
    first, second = simulate(SHORT), simulate(SHORT)
    assert first == second
    assert first.tokens > first.session_steps  # candidates were accepted


@pytest.mark.parametrize("delay", [pytest.param(0.0, marks=pytest.mark.verify), 0.0045])
def test_drafts_of_many_sessions_send_once_a_step_and_just_in_time(delay: float) -> None:
    """At least 2.8 times plain decoding's rate; 2.3 if candidates are sent immediately, 2.5 if the delay is unknown."""
    scenario = Scenario(PRESETS["70b"], sessions=10, drafts=5, delay=delay, warm_up=15, measured=15)
    assert simulate(scenario).rate > 2.65 * scenario.sessions / scenario.step


def test_plain_decoding_takes_the_targets_time() -> None:
    scenario = replace(SHORT, drafts=0)
    assert simulate(scenario).rate == pytest.approx(scenario.sessions / scenario.step, rel=0.1)


def test_the_drafts_best_token_is_right_as_often_as_asked() -> None:
    language = Language(0.7)
    texts = np.random.default_rng(0).integers(0, 2**63, size=20_000).astype(np.uint64)
    truth = language.next(texts)
    best = language.token(texts, np.zeros(len(texts), dtype=np.int64))
    # Six standard deviations of 20,000 draws: a false alarm would have probability 1e-8 if the texts were not fixed.
    assert np.mean(truth == best) == pytest.approx(0.7, abs=6 * (0.21 / 20_000) ** 0.5)
    assert (language.draft_logits(texts).argmax(axis=1) == best).all()
    assert (language.target_logits(texts).argmax(axis=1) == truth).all()


def test_bounds_are_in_order() -> None:
    for sessions, pods in ((1, 1), (16, 1), (64, 4)):
        for hardware in PRESETS.values():
            plain = sessions / hardware.target.seconds(sessions)
            most = bound(Language(), hardware, sessions, pods)
            assert plain <= most
            assert bound(Language(0.6), hardware, sessions, pods) <= most
            assert bound(Language(), hardware, sessions, 2 * pods) >= most


@pytest.mark.verify
def test_latency_costs_the_ideal_schedule_something() -> None:
    language, hardware = Language(), PRESETS["70b"]
    near, far = (ideal(language, hardware, 64, 1, delay) for delay in (0.0, 0.02))
    assert 64 / hardware.target.seconds(64) <= far < near <= bound(language, hardware, 64, 1)


def test_reading_a_chain_brings_what_a_chain_brings() -> None:
    """At high acceptance a, trees are chains with one child per node, and bring 1 + sum of a^i tokens."""
    best = trees(Language(0.95))
    cheap = best.tokens[:, 0]
    assert (np.diff(cheap) <= 1e-9).all()  # the more a candidate costs, the fewer tokens
    chain = sum(0.95**depth for depth in range(int(np.log(0.5) / np.log(0.95)) + 1))
    at_half = np.interp(0.5, np.geomspace(2e-3, 0.95, 48), cheap)
    assert at_half == pytest.approx(chain, rel=0.05)
