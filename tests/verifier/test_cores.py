"""All threads for who has no draft at work, fewer beside one; each number with what its steps cost."""

from __future__ import annotations

import pytest

from specdec.engine.blocks import BLOCK
from tests.verifier.fakes import Client, Decided, TextEngine, step_loop
from verifier_service.cores import Cores
from verifier_service.guard import Way
from verifier_service.session import Policy

BLOCKS = 40


class Threaded(TextEngine):
    threads: tuple[int, ...] = (2, 1)


def test_steps_are_measured_with_each_number() -> None:
    engine = Threaded(BLOCKS)
    cores = Cores(engine, BLOCKS * BLOCK)
    assert engine.used == 2
    assert cores.cost is cores.undrafted_cost
    cores.share(with_drafts=True)
    assert engine.used == 1
    assert cores.cost is not cores.undrafted_cost
    cores.share(with_drafts=False)
    assert engine.used == 2
    assert cores.cost is cores.undrafted_cost


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("always", [True, False])
def test_room_is_left_where_candidates_of_drafts_are_taken(way: Way, speculate: bool, always: bool) -> None:
    engine = Threaded(BLOCKS)
    loop = step_loop(engine, guard=Decided(way))
    Client(loop, [3, 4, 5], policy=Policy(speculate, 8, 0.0, always=always))
    loop.turn()
    assert engine.used == (1 if speculate and (always or way is Way.DRAFTED) else 2)
