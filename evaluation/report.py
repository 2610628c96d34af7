"""What an evaluation found, as a value for scripts and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evaluation.measurements import ABSENT, LOCAL, PLAIN, REMOTE_DRAFT, Figures, Tree, Way
from evaluation.pools import Pools
from specdec.decoding.sampling import Rule

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a pass whose seconds are told."""


@dataclass(frozen=True)
class Report:
    """Everything that was found of a pair."""

    target: str  # what it is and where it computes
    draft: str
    texts: int
    temperatures: Sequence[float]
    step_seconds: Mapping[str, Sequence[float]]  # of a pass over ROWS, by model
    acceptance: Mapping[tuple[Rule, Tree], Figures]
    speed: Mapping[int, Mapping[Way, Figures]]  # by streams
    delay_seconds: float
    pools: Mapping[int, Pools]  # by streams
    concurrent: int | None

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "draft": self.draft,
            "texts": self.texts,
            "temperatures": list(self.temperatures),
            "step_seconds": {
                name: dict(zip(map(str, ROWS), seconds, strict=True)) for name, seconds in self.step_seconds.items()
            },
            "acceptance": [
                {"rule": rule.value, "tree": tree.name, **_told(figures)}
                for (rule, tree), figures in self.acceptance.items()
            ],
            "predicted": [
                {"streams": streams, "way": way.name, **_told(figures)}
                for streams, ways in self.speed.items()
                for way, figures in ways.items()
            ],
            "delay_seconds": self.delay_seconds,
            "pools": {str(streams): asdict(pools) for streams, pools in self.pools.items()},
        }

    def lines(self) -> Iterator[str]:
        """Yield the report as text."""
        yield f"target  {self.target}"
        yield f"draft   {self.draft}"
        warm = ", ".join(f"{each:g}" for each in self.temperatures)
        yield f"texts   {self.texts}, temperature {warm}"
        yield ""
        yield "Milliseconds of a pass on this device, by its rows"
        yield from _table(
            ["", *map(str, ROWS)],
            [[name, *(f"{1000 * each:.2f}" for each in seconds)] for name, seconds in self.step_seconds.items()],
        )
        yield ""
        yield "Acceptance, with a draft that is always in time"
        yield from _table(
            ["rule", "candidates", "accepted", "tokens a step"],
            [
                [rule.value, tree.name, f"{each.acceptance:.0%}", f"{each.tokens_a_step:.2f}"]
                for (rule, tree), each in self.acceptance.items()
            ],
        )
        yield ""
        yield "Predicted tokens a second of one verifier, and how many times plain decoding"
        yield from _table(
            ["streams", *(way.name for way in (PLAIN, ABSENT, LOCAL, REMOTE_DRAFT))],
            [[str(streams), *_speeds(ways)] for streams, ways in self.speed.items()],
        )
        yield (
            f"A remote draft has a device like this one to itself, {1000 * self.delay_seconds:g} ms from the verifier. "
            "Each way speculates where it pays."
        )
        yield ""
        for streams, pools in self.pools.items():
            yield from self._pool_lines(streams, pools)

    def _pool_lines(self, streams: int, pools: Pools) -> Iterator[str]:
        ways = self.speed[streams]
        best = max(ways, key=lambda way: ways[way].rate)
        many = f"{streams} stream{'s' * (streams != 1)} a verifier"
        if best is not REMOTE_DRAFT:
            yield f"{many}: {best.name} is fastest; a draft service brings nothing."
            return
        verifiers, drafts = pools.replicas(streams, self.concurrent or streams * pools.verifiers)
        yield (
            f"{many}: {_count(pools.drafts, 'draft pod')} for {_count(pools.verifiers, 'verifier')} "
            f"({pools.rate / pools.best:.0%} of the speed with more). "
            f"{_count(verifiers * streams if self.concurrent is None else self.concurrent, 'text')} at a time take "
            f"{_count(verifiers, 'verifier')} and {_count(drafts, 'draft')}; in the chart's values:"
        )
        yield f"  verifiers: {{main: {{replicas: {verifiers}}}}}"
        yield f"  drafts: {{main: {{replicas: {drafts}}}}}"


def _told(figures: Figures) -> dict[str, Any]:
    return asdict(figures) | {
        "tokens_per_second": figures.rate,
        "acceptance": figures.acceptance,
        "tokens_per_step": figures.tokens_a_step,
    }


def _speeds(ways: Mapping[Way, Figures]) -> Iterator[str]:
    plain = ways[PLAIN].rate
    for way in (PLAIN, ABSENT, LOCAL, REMOTE_DRAFT):
        rate = ways[way].rate
        yield f"{rate:.0f}" if way is PLAIN else f"{rate:.0f} ({rate / plain:.2f})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield aligned rows: the first column to the left, all others to the right."""
    all = [head, *rows]
    widths = [max(len(row[column]) for row in all) for column in range(len(head))]
    for row in all:
        cells = [
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "   ".join(cells)).rstrip()
