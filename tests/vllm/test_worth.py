"""Candidates are proposed only while they increase throughput."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdec.vllm.worth import MAX_PAUSE, Worth

Step = Callable[[bool, int], tuple[int, float]]
"""(candidates were proposed, number of texts) -> (tokens of a step, its seconds)."""


def run(worth: Worth, step: Step, seconds: float, texts: int = 1, start: float = 0.0) -> tuple[float, float]:
    """Run steps for `seconds`; return the share of time with proposals, and tokens per second."""
    now, proposes, proposing, tokens = start, worth.after_step(texts, 0, start, continues=False), 0.0, 0
    while now < start + seconds:
        given, took = step(proposes, texts)
        now, tokens, proposing = now + took, tokens + given, proposing + took * proposes
        proposes = worth.after_step(texts, given, now, continues=True)
    return proposing / (now - start), tokens / (now - start)


def pays(proposes: bool, texts: int) -> tuple[int, float]:
    return (3 * texts, 0.02) if proposes else (texts, 0.01)


def costs(proposes: bool, texts: int) -> tuple[int, float]:
    return (texts, 0.03) if proposes else (texts, 0.01)


def test_what_pays_is_used_nearly_always() -> None:
    share, rate = run(Worth(), pays, 600.0)
    assert share > 0.97
    assert rate > 0.97 * 150


def test_what_costs_is_tried_ever_more_rarely() -> None:
    worth = Worth()
    run(worth, costs, 60.0)
    share, rate = run(worth, costs, 2 * MAX_PAUSE, start=60.0)
    assert share < 0.03
    assert rate > 0.97 * 100


def test_batches_of_other_sizes_are_measured_by_themselves() -> None:
    def step(proposes: bool, texts: int) -> tuple[int, float]:
        return pays(proposes, texts) if texts == 1 else costs(proposes, texts)

    worth, now = Worth(), 0.0
    for _ in range(20):
        run(worth, step, 5.0, 1, now)
        run(worth, step, 5.0, 16, now + 5.0)
        now += 10.0
    assert run(worth, step, 20.0, 1, now)[0] > 0.9
    assert run(worth, step, 20.0, 16, now + 20.0)[0] < 0.1


def test_what_comes_to_cost_is_left_at_once() -> None:
    """As when sampled texts follow greedy ones."""
    worth = Worth()
    run(worth, pays, 300.0)
    run(worth, costs, 5.0, start=300.0)
    assert run(worth, costs, 50.0, start=305.0)[0] < 0.1


def test_what_comes_to_pay_is_found() -> None:
    worth = Worth()
    run(worth, costs, 300.0)
    run(worth, pays, MAX_PAUSE + 5.0, start=300.0)
    assert run(worth, pays, 50.0, start=700.0)[0] > 0.9


def test_steps_of_seconds_are_measured() -> None:
    def step(proposes: bool, texts: int) -> tuple[int, float]:
        return (texts, 6.0) if proposes else (texts, 2.0)

    worth = Worth()
    run(worth, step, 60.0)
    assert run(worth, step, 2 * MAX_PAUSE, start=100.0)[0] < 0.2


@pytest.mark.parametrize("texts", [1, 5])
def test_pauses_and_new_texts_are_not_measured(texts: int) -> None:
    worth = Worth()
    for number in range(1000):  # a step per minute, each with other texts
        assert worth.after_step(texts, 1, 60.0 * number, continues=False)
    for number in range(1000):  # steps with a different number of texts each
        assert worth.after_step(texts + number % 2, 1, 60_000.0 + number, continues=True)
