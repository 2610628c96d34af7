"""The fewest drafts that are enough."""

from __future__ import annotations

import pytest

from evaluation.pools import smallest


@pytest.mark.parametrize(
    ("needed", "drafts", "verifiers"), [(0.1, 1, 8), (0.2, 1, 4), (0.3, 1, 2), (0.9, 1, 1), (1.5, 2, 1), (3.0, 4, 1)]
)
def test_a_verifier_gets_what_it_needs_and_no_more(needed: float, drafts: int, verifiers: int) -> None:
    found = smallest(lambda part: 100.0 * min(1.0, part / needed))
    assert (found.drafts, found.verifiers) == (drafts, verifiers)
    assert found.rate >= 0.95 * found.best


def test_noise_within_the_margin_takes_no_more_drafts() -> None:
    rates = iter([101.0, 97.0])
    found = smallest(lambda part: next(rates))
    assert (found.drafts, found.verifiers) == (1, 8)


@pytest.mark.parametrize(("concurrent", "replicas"), [(8, (1, 1)), (64, (8, 2)), (65, (9, 3)), (1, (1, 1))])
def test_pools_for_so_many_texts(concurrent: int, replicas: tuple[int, int]) -> None:
    pools = smallest(lambda part: min(1.0, part / 0.25))
    assert pools.replicas(streams=8, concurrent=concurrent) == replicas
