"""Tenants share the passes of a draft by weight, however many sessions they have."""

from __future__ import annotations

import pytest

from draft_service.session import DrafterSession
from specdec.serving.validation import weight_violations
from tests.draft_service.fakes import ROWS, Engine, Pod, session


def candidates(pod: Pod, of: DrafterSession) -> int:
    return sum(len(extension.paths.tokens) for extension in pod.sent[id(of)])


def pod_with(crowd: int, **policy: float) -> tuple[Pod, DrafterSession]:
    """Return a pod with one session of a quiet tenant and many of another, and the quiet session."""
    pod = Pod(Engine(sureness=12.0))
    quiet = session(tenant="quiet")
    for _ in range(crowd):
        pod.attach(session(tenant="crowd"))
    pod.attach(quiet)
    return pod, quiet


@pytest.mark.parametrize("crowd", [16, 60])
def test_a_session_has_as_many_candidates_beside_a_crowd_of_another_tenant(crowd: int) -> None:
    alone, mine = pod_with(0)
    beside, ours = pod_with(crowd)
    alone.run(8)
    beside.run(8)
    assert candidates(beside, ours) >= candidates(alone, mine) > 8


def test_more_tenants_than_rows_take_turns() -> None:
    pod = Pod(Engine(sureness=12.0))
    sessions = [session(tenant=f"tenant {number}") for number in range(3 * ROWS)]
    for each in sessions:
        pod.attach(each)
    pod.run(16)
    counts = [candidates(pod, each) for each in sessions]
    assert min(counts) > 0
    assert pod.drafter._virtual_times.keys() == {f"tenant {number}" for number in range(3 * ROWS)}
    assert max(pod.drafter._virtual_times.values()) - min(pod.drafter._virtual_times.values()) <= 2
    for each in sessions:
        pod.loop.detach(each)
    assert not pod.drafter._virtual_times


def test_new_tenants_get_nothing_of_what_was_served_before_them() -> None:
    """Even if the first of them begins while the old tenant reads."""
    pod = Pod(Engine(sureness=12.0))
    old = session(tenant="old")
    pod.attach(old)
    pod.run(60)
    pod.commit(old, [9])
    first = session(tenant="first")
    pod.attach(first)
    pod.run(1)
    pod.commit(old, [9])
    pod.run(1)
    for number in range(2 * ROWS):
        pod.attach(session(tenant=f"tenant {number}"))
    before = candidates(pod, old)
    pod.run(16)
    assert candidates(pod, old) - before >= candidates(pod, first) // 2 > 2


def test_prompts_of_a_crowd_do_not_lengthen_the_passes_of_another_tenant() -> None:
    pod, _ = pod_with(0)
    pod.run(2)
    for number in range(20):
        pod.attach(session(prompt=[1 + number % 5] * 400, tenant="crowd"))
    before = len(pod.engine.read)
    pod.run(10)
    assert max(map(len, pod.engine.read[before:])) <= 3 * ROWS


def test_weights_are_checked() -> None:
    assert weight_violations(0.0) == []
    assert weight_violations(2.0) == []
    assert weight_violations(200.0) == [("tenant_weight", "is 200, must be from 0.01 to 100")]
