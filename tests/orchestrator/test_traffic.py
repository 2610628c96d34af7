"""Requests are split by the shares of revisions; equal seeds get the same revision."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from orchestrator.models import catalog
from orchestrator.models.catalog import PART, point_of
from specdec.v2 import generation_pb2


@dataclass(frozen=True)
class Revision:
    name: int
    share: float
    ready: bool = True


def by_share(revisions: Sequence[Any], point: float) -> Revision:
    """Choose among fakes: only a revision's share and readiness matter."""
    chosen: Any = catalog.by_share(revisions, point)
    assert isinstance(chosen, Revision)
    return chosen


SHARES = st.lists(st.integers(0, 1000).map(float), min_size=1, max_size=5).filter(any)
POINTS = st.floats(0, 1, exclude_max=True)


@given(SHARES, POINTS)
def test_a_revision_without_a_share_is_never_chosen(shares: list[float], point: float) -> None:
    assert by_share([Revision(i, share) for i, share in enumerate(shares)], point).share > 0


@given(SHARES, POINTS, st.data())
def test_one_that_is_ready_is_chosen_if_there_is_one(shares: list[float], point: float, data: st.DataObject) -> None:
    revisions = [Revision(i, share, data.draw(st.booleans())) for i, share in enumerate(shares)]
    chosen = by_share(revisions, point)
    assert chosen.share > 0
    assert chosen.ready or not any(each.ready for each in revisions if each.share)
    everybody_ready = by_share([Revision(each.name, each.share) for each in revisions], point)
    if revisions[everybody_ready.name].ready:
        assert chosen.name == everybody_ready.name  # other revisions' states move no request


@given(st.integers(0, 100), st.integers(0, 100), POINTS)
def test_a_larger_share_takes_requests_and_gives_none_away(before: int, after: int, point: float) -> None:
    def taken(share: int) -> bool:
        return by_share([Revision(0, 101.0 - share), Revision(1, float(share))], point).name == 1

    low, high = sorted((before, after))
    assert taken(high) or not taken(low)


def test_shares_are_met() -> None:
    """Requests without seeds are split at random; the false-alarm probability is 10^-6."""
    revisions = [Revision(0, 50.0), Revision(1, 0.0), Revision(2, 45.0), Revision(3, 5.0)]
    request = generation_pb2.GenerateRequest(text="hello")
    found = Counter(by_share(revisions, point_of(request)).name for _ in range(20_000))
    assert set(found) == {0, 2, 3}
    assert chisquare([found[0], found[2], found[3]], [10_000, 9_000, 1_000]).pvalue > 1e-6


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_what_is_not_ready_is_divided_by_share(order: tuple[int, ...]) -> None:
    """In any order of the revisions."""
    revisions = [Revision(0, 45.0, ready=False), Revision(1, 10.0), Revision(2, 45.0)]
    points = (number / 10_000 for number in range(10_000))
    found = Counter(by_share([revisions[number] for number in order], point).name for point in points)
    assert found[1] == pytest.approx(10_000 * 10 / 55, abs=5)
    assert found[0] == 0


def test_seeds_meet_the_shares_as_well() -> None:
    """Points come from a hash of the seed: equal in every run."""
    points = [
        point_of(generation_pb2.GenerateRequest(text="hello", sampling=generation_pb2.SamplingParameters(seed=seed)))
        for seed in range(20_000)
    ]
    counts = Counter(int(10 * point) for point in points)
    assert chisquare([counts[each] for each in range(10)]).pvalue > 1e-6
    assert min(points) >= 0
    assert max(points) < 1


def test_a_request_with_a_seed_has_one_place_however_it_speculates() -> None:
    sampling = generation_pb2.SamplingParameters(seed=3)
    chat = generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
    prompts: list[dict[str, Any]] = [{"text": "a"}, {"tokens": generation_pb2.TokenPrompt(ids=[1, 2])}, {"chat": chat}]
    for prompt in prompts:
        request = generation_pb2.GenerateRequest(sampling=sampling, **prompt)
        plain = generation_pb2.GenerateRequest(
            sampling=sampling,
            speculation=generation_pb2.Speculation(off=True),
            max_tokens=3,
            **prompt,
        )
        assert point_of(request) == point_of(plain)
        plain.sampling.seed = 4
        assert point_of(request) != point_of(plain)


def test_what_is_asked_decides_where_it_falls() -> None:
    def point(**prompt: Any) -> float:
        return point_of(generation_pb2.GenerateRequest(sampling=generation_pb2.SamplingParameters(seed=1), **prompt))

    def chat(*turns: str) -> dict[str, Any]:
        return {"chat": {"messages": [{"role": "user", "content": turn} for turn in turns]}}

    asked: list[dict[str, Any]] = [
        {},
        {"text": "a"},
        {"text": "b"},
        {"text": "a" * PART},
        {"text": "a" * (PART + 1)},
        {"tokens": {"ids": [1]}},
        {"tokens": {"ids": [2]}},
        chat("a"),
        chat("b"),
        chat("a", "b"),
        chat(*"a" * 100, "b"),
        chat(*"a" * 100, "c"),
        chat("a" * 2 * PART + "b"),
        chat("a" * 2 * PART + "c"),
    ]
    assert len({point(**prompt) for prompt in asked}) == len(asked)
    assert [point(**prompt) for prompt in asked] == [point(**prompt) for prompt in asked]
