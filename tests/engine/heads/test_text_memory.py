"""The memory of heads: the slots of texts."""

from __future__ import annotations

import pytest
import torch

from specdec.engine.heads.text_memory import TextMemory, TextSlots
from specdec.engine.kv.slots import PoolFullError


def test_the_slots_of_a_text_follow_it_without_gaps() -> None:
    memory = TextMemory(256, 1, 2, torch.float32, torch.device("cpu"))
    text, other = TextSlots(memory), TextSlots(memory)
    first = text.take(10, 3)
    assert (text.first, text.end) == (10, 13)
    second = text.take(13, 70)
    assert len({*first, *second, 0}) == 74  # no slot twice, nor the one for padding
    assert text.last(2).tolist() == second[-2:].tolist()
    assert text.last(500).tolist() == [*first, *second]
    other.take(0, 64)
    assert memory.pool.used == 128 + 64
    text.take(90, 1)  # a gap: slots before it are freed
    assert (text.first, text.end, len(text.last(9))) == (90, 91, 1)
    assert memory.pool.used == 64 + 64
    with pytest.raises(PoolFullError):
        text.take(91, 500)
    assert memory.pool.used == 64
    assert len(text.take(91, 2)) == 2  # it begins again
    for each in (text, other):
        each.release()
    assert memory.pool.used == 0
