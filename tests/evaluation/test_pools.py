"""The smallest sufficient number of drafts."""

from __future__ import annotations

import pytest

from evaluation.pools import VERIFIERS, smallest


@pytest.mark.parametrize(("needed", "verifiers"), [(0.1, 8), (0.2, 4), (0.3, 2), (0.9, 1), (1.0, 1)])
def test_verifiers_share_a_draft_as_far_as_that_costs_little(needed: float, verifiers: int) -> None:
    measured: list[float] = []

    def rate(part: float) -> float:
        measured.append(part)
        return 100.0 * min(1.0, part / needed)

    found = smallest(rate, alone=100.0)
    assert found.verifiers == verifiers
    assert found.left_out == len(VERIFIERS) - len(measured)
    assert found.rate >= 0.95 * found.best


def test_noise_within_the_margin_takes_no_more_drafts() -> None:
    assert smallest(lambda part: 97.0, alone=101.0).verifiers == 8


@pytest.mark.parametrize(("concurrent", "replicas"), [(8, (1, 1)), (64, (8, 2)), (65, (9, 3)), (1, (1, 1))])
def test_pools_for_so_many_texts(concurrent: int, replicas: tuple[int, int]) -> None:
    pools = smallest(lambda part: min(1.0, part / 0.25), alone=1.0)
    assert pools.replicas(streams=8, concurrent=concurrent) == replicas
