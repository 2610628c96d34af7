"""The KV pool never hands out a slot twice, never slot 0, and stays intact.

A state machine allocates and frees in any order and portions, and compares the pool with a set of slots: counts are
right, slots ascend, they are consecutive whenever some run of free slots is long enough, and after everything is freed
the whole pool is one run again.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.engine.kv.slots import PADDING_SLOT, KVPool, PoolFullError, Slots


def consecutive(slots: Slots) -> bool:
    return bool((np.diff(slots) == 1).all())


def runs(free: set[int]) -> list[list[int]]:
    """Return the maximal runs of consecutive slots, ascending."""
    found: list[list[int]] = []
    for slot in sorted(free):
        if found and found[-1][-1] == slot - 1:
            found[-1].append(slot)
        else:
            found.append([slot])
    return found


class Sessions(RuleBasedStateMachine):
    """All operations of sessions on a pool."""

    @initialize(capacity=st.integers(2, 40))
    def start(self, capacity: int) -> None:
        self.pool = KVPool(capacity)
        self.held: list[int] = []

    @property
    def free(self) -> set[int]:
        return set(range(1, self.pool.capacity)) - set(self.held)

    @rule(count=st.integers(1, 15))
    def take(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(PoolFullError) as caught:
                self.pool.take(count)
            assert (caught.value.wanted, caught.value.free) == (count, len(self.free))
            return
        free = self.free
        fitting = [run for run in runs(free) if len(run) >= count]
        slots = self.pool.take(count)
        taken = slots.tolist()
        assert slots.dtype == np.int64
        assert len(taken) == count
        assert all(a < b for a, b in pairwise(taken))
        assert set(taken) <= free
        if fitting:
            assert taken == fitting[0][:count]
        self.held += taken

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_some(self, data: st.DataObject) -> None:
        """Free any of the held slots, of any session, in any order."""
        some = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        self.pool.give(np.array(some, dtype=np.int64))
        self.held = [slot for slot in self.held if slot not in some]

    @precondition(lambda self: self.held)
    @rule()
    def give_all_and_take_all(self) -> None:
        self.pool.give(np.array(self.held, dtype=np.int64))
        everything = self.pool.take(self.pool.capacity - 1)
        assert everything.tolist() == list(range(1, self.pool.capacity))
        self.held = everything.tolist()

    @invariant()
    def counts(self) -> None:
        assert self.pool.free == len(self.free)
        assert self.pool.used == len(self.held)
        assert len(set(self.held)) == len(self.held)
        assert PADDING_SLOT not in self.held


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


def test_pieces_are_used_when_no_run_is_long_enough() -> None:
    pool = KVPool(10)
    slots = pool.take(9)
    pool.give(slots[[0, 1, 4, 5, 6]])
    assert pool.take(4).tolist() == [1, 2, 5, 6]
    assert pool.take(1).tolist() == [7]
    assert pool.free == 0


def test_a_refused_take_changes_nothing() -> None:
    pool = KVPool(5)
    pool.take(2)
    with pytest.raises(PoolFullError, match="3 key/value slots wanted, 2 free"):
        pool.take(3)
    assert consecutive(pool.take(2))


def test_giving_nothing_back_is_allowed() -> None:
    pool = KVPool(4)
    pool.give(np.array([], dtype=np.int64))
    assert pool.free == 3


@pytest.mark.parametrize("used", [0, 2, 3])
def test_taking_nothing_gives_nothing(used: int) -> None:
    """From an empty, a partly used and a full pool."""
    pool = KVPool(4)
    if used:
        pool.take(used)
    assert pool.take(0).tolist() == []
    assert pool.free == 3 - used
    pool.give(np.array([], dtype=np.int64))
    assert len(pool.take(3 - used)) == 3 - used


def test_a_pool_without_slots_hands_out_none() -> None:
    pool = KVPool(1)
    assert pool.free == 0
    with pytest.raises(PoolFullError):
        pool.take(1)
