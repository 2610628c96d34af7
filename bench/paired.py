"""Ways of doing the same work, measured side by side: they take turns, and are compared within a round."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

Way = TypeVar("Way")
Result = TypeVar("Result")


class Spread(NamedTuple):
    median: float
    least: float
    most: float


async def in_turns(
    ways: Sequence[Way], rounds: int, run: Callable[[Way, int], Awaitable[Result]]
) -> dict[Way, list[Result]]:
    """Run all ways in each round, every other round in reverse; return each way's results, one per round. Round -1
    warms up, and its results are dropped."""
    found: dict[Way, list[Result]] = {way: [] for way in ways}
    for number in range(-1, rounds):
        for way in ways if number % 2 else reversed(ways):
            result = await run(way, number)
            if number >= 0:
                found[way].append(result)
    return found


def spread(values: Iterable[float]) -> Spread:
    values = list(values)
    return Spread(median(values), min(values), max(values))


def ratios(over: Iterable[float], under: Iterable[float]) -> Spread:
    """Return the spread, over all rounds, of each round's ratio."""
    return spread(a / b for a, b in zip(over, under, strict=True))
