"""Prompts of one tenant beside texts of another: prompts share a step by tenant, and texts yield to urgent prompts of
others, for a bounded number of steps."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.engine.batch import PackedBatch
from specdec.engine.kv.blocks import BLOCK
from tests.verifier_service.fakes import DEAR, FREE, FixedLatency, TextEngine, run, step_loop
from tests.verifier_service.step_loop.helpers import check_over, client, turns
from verifier_service.backend.request import Policy
from verifier_service.costs.step_latency import StepLatency
from verifier_service.settings.tuning import DEFAULTS


def test_prompts_share_a_step_by_tenant() -> None:
    """Twenty prompts of one tenant progress no faster than a single prompt of another."""
    engine = TextEngine(200)
    loop = step_loop(engine, step_rows=64)
    flood = [client(loop, 3 * BLOCK, seed, 2, tenant="flood") for seed in range(20)]
    other = client(loop, 3 * BLOCK, 99, 2, tenant="other")
    turns(loop, 1)
    assert other.session.computed == 32
    assert max(each.session.computed for each in flood) <= 2
    turns(loop, 6)
    assert other.tokens
    assert not any(each.tokens for each in flood)
    run(loop, *flood, other)
    check_over(loop, engine, *flood, other)


@pytest.mark.parametrize("decoding", [2, 3])
def test_a_prompt_is_not_cut_up_for_a_tenant_that_has_more(decoding: int) -> None:
    """The flood has three or four texts, its own prompt included; the other tenant has three prompts."""
    engine = TextEngine(200)
    loop = step_loop(engine, latency=DEAR)
    flood = [client(loop, 5, seed, 200, tenant="flood") for seed in range(decoding)]
    while not all(each.tokens for each in flood):
        turns(loop, 1)
    others = [client(loop, 2 * BLOCK, 99 + seed, 2, tenant="other") for seed in range(3)]
    prompt = client(loop, 3 * BLOCK, 9, 2, tenant="flood")
    turns(loop, 1)
    least = DEFAULTS.prefill.min_chunk_tokens
    assert prompt.session.computed <= least
    if decoding == 3:
        assert all(each.tokens for each in others)
    else:
        assert max(each.session.computed for each in others) <= least
    for each in flood:
        each.read()
    run(loop, *flood, *others, prompt)
    check_over(loop, engine, *flood, *others, prompt)


@pytest.mark.parametrize("latency", [DEAR, FREE], ids=["dear rows", "free rows"])
def test_texts_of_a_flood_sit_out_a_step_with_a_prompt_of_another_if_it_is_shorter_so(latency: StepLatency) -> None:
    engine = TextEngine(200)
    loop = step_loop(engine, latency=latency)
    flood = [client(loop, 5, seed, 50, tenant="flood") for seed in range(12)]
    while not all(each.tokens for each in flood):
        turns(loop, 1)
    other = client(loop, 6, 99, 2, tenant="other")
    turns(loop, 1)
    assert other.tokens
    assert engine.steps[-1] == (6 if latency is DEAR else 6 + len(flood))
    run(loop, *flood, other)
    check_over(loop, engine, *flood, other)


def test_prompt_after_prompt_does_not_stop_a_flood() -> None:
    """The flood's texts sit out steps only while the other tenant has been served no more than the flood."""
    engine = TextEngine(200)
    loop = step_loop(engine, latency=DEAR)
    flood = [client(loop, 5, seed, 300, tenant="flood") for seed in range(12)]
    while not all(each.tokens for each in flood):
        turns(loop, 1)
    before = sum(len(each.tokens) for each in flood)
    others = []
    for seed in range(100):
        others.append(client(loop, 30, 100 + seed, 1, tenant="other"))
        turns(loop, 1)
        for each in flood:
            each.read()
    assert sum(len(each.tokens) for each in flood) - before >= 50 * len(flood)
    for each in (*flood, *others):
        each.cancel()


def test_texts_of_a_third_tenant_go_on_beside_a_prompt_that_others_yield_to() -> None:
    """The third tenant has no more sessions than the tenant with the prompt."""
    engine = TextEngine(200)
    loop = step_loop(engine, latency=DEAR)
    flood = [client(loop, 5, seed, 200, tenant="flood") for seed in range(12)]
    third = client(loop, 5, 50, 200, tenant="third")
    while not all(each.tokens for each in (*flood, third)):
        turns(loop, 1)
    turns(loop, 1)
    for each in (*flood, third):
        each.read()
    before, had = len(third.tokens), [len(each.tokens) for each in flood]
    prompt = client(loop, BLOCK, 9, 2, tenant="other")
    turns(loop, 1)
    assert len(third.tokens) == before + 1
    assert sum(len(each.tokens) for each in flood) <= sum(had) + 1  # the tenant's part is at most one text
    assert prompt.tokens
    for each in (*flood, third, prompt):
        each.cancel()


def test_a_prompt_does_not_lengthen_each_step_where_texts_need_not_sit_out() -> None:
    """Each prompt has a new tenant; in every third step, prompts are cut to leave room for the texts."""
    engine = TextEngine(400)
    loop = step_loop(engine, latency=FixedLatency(0.01))
    texts = [client(loop, 5, seed, 1000, tenant="there") for seed in range(12)]
    while not all(each.tokens for each in texts):
        turns(loop, 1)
    before, newcomers = [len(each.tokens) for each in texts], []
    for seed in range(3):
        newcomers.append(client(loop, 400, 100 + seed, 1, tenant=f"newcomer {seed}"))
        turns(loop, 1)
    assert [len(each.tokens) for each in texts] == [count + 3 for count in before]
    assert min(engine.steps[-3:]) < 300 < 400 < max(engine.steps[-3:])
    for each in (*texts, *newcomers):
        each.cancel()


@pytest.mark.parametrize("name", ["newcomer", "newcomer {}"], ids=["one tenant", "a new tenant each"])
def test_newcomers_never_stop_the_texts_that_are_there(name: str) -> None:
    """A text takes part in at least every third step, even if each prompt has a new tenant with a zero counter."""
    engine = TextEngine(200)
    loop = step_loop(engine, latency=DEAR)
    texts = [client(loop, 5, seed, 1000, tenant="there") for seed in range(3)]
    while not all(each.tokens for each in texts):
        turns(loop, 1)
    newcomers = []
    for trio in range(40):
        before = [each.session.generated for each in texts]
        for seed in range(3 * trio, 3 * trio + 3):
            newcomers.append(client(loop, 6, 100 + seed, 1, tenant=name.format(seed)))
            turns(loop, 1)
        assert all(each.session.generated > count for each, count in zip(texts, before, strict=True))
        for each in texts:
            each.read()
    run(loop, *newcomers)  # requests beyond the newcomers' share wait
    for each in texts:
        each.cancel()


def test_texts_that_sit_out_a_long_step_are_told_what_they_have_before_it() -> None:
    """Readers would otherwise wait for the end of the step, though the tokens exist."""
    engine = TextEngine(200)
    loop = step_loop(engine, latency=DEAR)
    alone = Policy(frozenset(), 8, 0.0)  # no draft waits for commits
    flood = [client(loop, 5, seed, 200, tenant="flood", policy=alone) for seed in range(12)]
    while not all(each.tokens for each in flood):
        turns(loop, 1)
    turns(loop, 2)
    for each in flood:
        each.read()
    assert any(each.running.pending_result for each in flood)  # the last results are still being coalesced
    other = client(loop, 30, 100, 5, tenant="other")
    had, forward = [each.session.generated for each in flood], engine.forward
    pending: list[int] = []  # flood sessions with a pending result at the start of a pass

    def pass_begins(batch: PackedBatch) -> NDArray[np.float32]:
        pending.append(sum(each.running.pending_result is not None for each in flood))
        return forward(batch)

    engine.forward = pass_begins  # type: ignore[method-assign]
    turns(loop, 1)
    engine.forward = forward  # type: ignore[method-assign]
    assert [each.session.generated for each in flood] == had  # they sat the step out
    assert pending == [0]
    run(loop, *flood, other)
    check_over(loop, engine, *flood, other)
