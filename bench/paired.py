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
    """Run all ways in each round, every other round in reverse; return each way's results, one per round. A further
    round, numbered `rounds`, warms up before them with work of its own; its results are dropped."""
    found: dict[Way, list[Result]] = {way: [] for way in ways}
    for turn, number in enumerate(warmed_up(rounds), -1):
        for way in ways if turn % 2 else reversed(ways):
            result = await run(way, number)
            if turn >= 0:
                found[way].append(result)
    return found


def warmed_up(rounds: int) -> list[int]:
    """Return the numbers of all rounds in order, that of the warm-up first."""
    return [rounds, *range(rounds)]


def spread(values: Iterable[float]) -> Spread:
    values = list(values)
    return Spread(median(values), min(values), max(values))


def ratios(over: Iterable[float], under: Iterable[float]) -> Spread:
    """Return the spread, over all rounds, of each round's ratio."""
    return spread(a / b for a, b in zip(over, under, strict=True))
