"""Measurements in turns."""

from __future__ import annotations

from bench.paired import Spread, in_turns, ratios
from bench.serving.structured_output import requests


async def test_ways_take_turns_and_the_first_round_is_dropped() -> None:
    asked: list[tuple[str, int]] = []

    async def run(way: str, number: int) -> int:
        asked.append((way, number))
        return number

    assert await in_turns("ab", 2, run) == {"a": [0, 1], "b": [0, 1]}
    assert asked == [("a", 2), ("b", 2), ("b", 0), ("a", 0), ("a", 1), ("b", 1)]


async def test_the_warm_up_has_work_of_its_own() -> None:
    """`random.Random` takes the absolute value of a seed: a round of number -1 would do the work of round 1."""
    asked = list[object]()

    async def run(way: str, number: int) -> None:
        asked.append(requests(number))

    await in_turns("a", 2, run)
    assert asked[0] not in asked[1:]


def test_ratios_are_within_a_round() -> None:
    assert ratios([4.0, 9.0, 1.0], [1.0, 3.0, 2.0]) == Spread(3.0, 0.5, 4.0)
