"""Sizes that can be: not more than the machine has, and some."""

from __future__ import annotations

import os

import pytest

from specdec.engine.engine import UnsupportedModelError
from specdec.engine.memory import MOST_SLOTS, SHARE, free_bytes, slots_for


def machine() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_there_is_memory_and_no_more_than_the_machine_has() -> None:
    assert 1 << 20 < free_bytes("cpu") <= machine()


def test_slots_take_their_share() -> None:
    slot = machine() // 100_000
    assert 512 <= slots_for(slot, "cpu") <= 100_000 * SHARE
    with pytest.raises(UnsupportedModelError, match="--kv-tokens"):
        slots_for(machine() // 100, "cpu")
    assert slots_for(1, "cpu") == MOST_SLOTS
