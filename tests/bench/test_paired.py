"""Measurements in turns."""

from __future__ import annotations

from bench.paired import Spread, in_turns, ratios


async def test_ways_take_turns_and_the_first_round_is_dropped() -> None:
    asked: list[tuple[str, int]] = []

    async def run(way: str, number: int) -> int:
        asked.append((way, number))
        return number

    assert await in_turns("ab", 2, run) == {"a": [0, 1], "b": [0, 1]}
    assert asked == [("a", -1), ("b", -1), ("b", 0), ("a", 0), ("a", 1), ("b", 1)]


def test_ratios_are_within_a_round() -> None:
    assert ratios([4.0, 9.0, 1.0], [1.0, 3.0, 2.0]) == Spread(3.0, 0.5, 4.0)
