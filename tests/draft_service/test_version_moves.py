"""Texts of a version that fails move to the serving version: no text is lost, and what was drawn stays drawn."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from draft_service.request import DrafterSessionRequest, ExpansionPolicy
from draft_service.session import DrafterSession
from draft_service.version import State
from specdec.decoding.calibration import Calibration
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Rule, Sampling
from specdec.engine.kv.slots import PoolFullError
from specdec.serving.errors import ModelFailureError
from tests.draft_service.fakes import VOCABULARY
from tests.draft_service.versioned import (
    BAD,
    GOOD,
    POISON,
    Guessing,
    Poisoned,
    Service,
    lacks_memory,
    not_a_number,
    raises,
)


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        (raises, "a pass failed: broken"),
        (lacks_memory, "a pass failed: MemoryError"),
        (not_a_number, "a pass failed: the logits of "),
    ],
)
@pytest.mark.parametrize("lasts", [0, 1, 5])
def test_a_version_that_fails_is_rolled_back_at_once(
    ends: Callable[[NDArray[np.float32]], NDArray[np.float32]], reason: str, lasts: int
) -> None:
    service = Service(Guessing())
    own = service.open()
    canary = service.begin("v2", Guessing(lasts=lasts, ends=ends))
    moved = [service.open(is_new=True) for _ in range(3)]
    for _ in range(lasts + 2):
        service.loop.turn()
    assert canary.state is State.FAILED
    assert canary.reason.startswith(reason)
    assert service.loop.works
    assert not service.failed
    for each in (own, *moved):
        service.write(each, 30)
        assert service.drafter.version_of(each) is service.drafter.serving
        assert each.tree.size
    assert service.drafter.slots_used == sum(each.end + each.max_nodes for each in (own, *moved))


def test_a_moved_text_gets_the_candidates_of_one_that_was_never_moved() -> None:
    """Once the text has left its tree."""
    service = Service(Guessing())
    service.begin("v2", Guessing(BAD, lasts=4, ends=raises))
    moved, other = service.open(is_new=True), service.open()
    for _ in range(40):
        service.loop.turn()
    for each in (moved, other):
        service.loop.commit(each, each.tree.base, [1, 2, 3], time.monotonic())
    for _ in range(40):
        service.loop.turn()
    trees = [[node.token for node in each.tree.root.walk()] for each in (moved, other)]
    assert trees[0] == trees[1]


def test_what_a_moved_text_has_been_sent_stays_in_its_tree() -> None:
    """Its nodes are not drawn again and, while the text stays within its tree, not expanded by another version."""
    service = Service(Guessing())
    service.begin("v2", Guessing(lasts=3, ends=raises))
    moved = service.open(is_new=True)
    for _ in range(3):
        service.loop.turn()
    before = list(moved.tree.root.walk())
    assert len(before) > 1
    for _ in range(10):
        service.loop.turn()
    assert list(moved.tree.root.walk()) == before
    service.loop.commit(moved, moved.tree.base, [GOOD], time.monotonic())
    for _ in range(10):
        service.loop.turn()
    assert set(moved.tree.root.walk()) <= set(before)


def rejecting() -> DrafterSession:
    """Return a session under REJECTION."""
    sampler = RequestSampler(Sampling(temperature=1.0), rule=Rule.REJECTION)
    request = DrafterSessionRequest([1, 2, 3], [], sampler, frozenset(), 200, 10_000)
    return DrafterSession(request, ExpansionPolicy(max_nodes=24), VOCABULARY, Calibration())


def test_a_draw_keeps_its_distribution_and_is_the_only_one_of_its_node() -> None:
    """Across a move, under REJECTION: the verifier judges a token by the distribution that it was drawn from."""
    service = Service(Guessing())
    service.begin("v2", Guessing(BAD, lasts=4, ends=raises))
    moved = service.open(is_new=True, what=rejecting())
    for _ in range(4):
        service.loop.turn()
    before = {node: node.distribution for node in (moved.tree.root, *moved.tree.root.walk())}
    assert sum(distribution is not None for distribution in before.values()) >= 2
    for _ in range(60):
        for _ in range(3):
            service.loop.turn()
        nodes = [moved.tree.root, *moved.tree.root.walk()]
        for node in nodes:
            assert len(node.children) <= 1
            assert not node.children or node.distribution is not None
            if before.get(node) is not None:
                assert node.distribution is before[node]
        service.loop.commit(moved, moved.tree.base, [GOOD], time.monotonic())
    assert not service.failed


def test_a_canary_without_memory_leaves_texts_to_the_serving_version() -> None:
    service = Service(Guessing())
    service.begin("v2", Guessing(capacity=300))
    first, second = (service.open(is_new=True) for _ in range(2))
    names = [version.name for each in (first, second) if (version := service.drafter.version_of(each))]
    assert names == ["v2", "first"]


def test_a_full_serving_version_refuses_texts_as_without_versions() -> None:
    service = Service(Guessing(capacity=300))
    service.begin("v2", Guessing())
    service.open()
    with pytest.raises(PoolFullError):
        service.open()
    assert service.version("first").sessions == 1


def test_a_moved_text_without_memory_waits_for_it_and_follows_commits() -> None:
    service = Service(Guessing(capacity=300))
    own = service.open()
    service.begin("v2", Guessing(lasts=2, ends=raises))
    moved = service.open(is_new=True)
    service.write(moved, 3)
    assert service.drafter.version_of(moved) is None
    service.write(moved, 30)
    assert moved.tree.base == 36
    service.loop.detach(own)
    assert service.drafter.version_of(moved) is service.drafter.serving
    assert service.proposes(moved) == {GOOD}
    service.loop.detach(moved)
    assert (service.drafter.slots_used, service.version("first").sessions) == (0, 0)
    assert not service.failed


def test_a_text_without_memory_may_end() -> None:
    service = Service(Guessing(capacity=300))
    service.open()
    service.begin("v2", Guessing(lasts=0, ends=raises))
    moved = service.open(is_new=True)
    service.loop.turn()
    service.loop.detach(moved)
    assert service.version("first").sessions == 1


def test_the_serving_version_fails_as_without_versions() -> None:
    """A text that no pass takes ends alone, and the canary goes on."""
    service = Service(Poisoned())
    canary = service.begin("v2", Guessing())
    doomed, other = service.open(), service.open(is_new=True)
    service.write(other, 4)
    service.loop.commit(doomed, doomed.tree.base, [POISON], time.monotonic())
    service.write(other, 8)
    assert [type(error) for error in service.failed] == [ModelFailureError]
    assert service.drafter.version_of(doomed) is None
    assert canary.state is State.CANARY
    assert other.tree.size


def test_a_retired_version_that_fails_leaves_its_texts_to_the_serving_one() -> None:
    first = Guessing(BAD)
    service = Service(first)
    service.begin("v2", Guessing())
    kept = service.open()
    with pytest.raises(AssertionError, match="does not end"):
        service.try_on()
    first.lasts, first.ends = 0, raises
    assert service.proposes(kept) == {GOOD}
    assert service.version("first").state is State.FAILED
    assert service.drafter.is_free
    assert not service.failed
