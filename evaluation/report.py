"""The report of an evaluation, as JSON for scripts and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evaluation.measurements import PLAIN, Figures, Tree, Way
from evaluation.pace import MAX_SPREAD
from evaluation.pools import PoolSizing
from specdec.decoding.sampling import Rule

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows of the reported passes."""


@dataclass(frozen=True)
class Distance:
    """Latency from one service to another, in seconds."""

    hop: float  # services and gRPC, as measured here
    network: float  # as given in the options


@dataclass(frozen=True)
class EvaluationReport:
    """All results for a pair."""

    target: str  # directory, dtype and device
    draft: str
    texts: int
    temperatures: Sequence[float]
    step_seconds: Mapping[str, Sequence[float]]  # mean of a pass over ROWS, by model
    spread: float  # slowest measurement of pass times divided by the fastest
    acceptance: Mapping[tuple[Rule, Tree], Figures]
    speed: Mapping[int, Mapping[Way, Figures]]  # by streams
    distance: Distance
    draft_speed: float  # of a remote draft's device, relative to this machine's
    pools: Mapping[int, PoolSizing]  # by streams, where a remote draft is fastest
    concurrent: int | None

    @property
    def usable(self) -> bool:
        """False if pass times varied too much: the predictions then compare different speeds of the machine."""
        return self.spread <= MAX_SPREAD

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "draft": self.draft,
            "texts": self.texts,
            "temperatures": list(self.temperatures),
            "step_seconds": {
                name: dict(zip(map(str, ROWS), seconds, strict=True)) for name, seconds in self.step_seconds.items()
            },
            "pass_time_spread": self.spread,
            "usable": self.usable,
            "acceptance": [
                {"rule": rule.value, "tree": tree.name, **_counts(figures)}
                for (rule, tree), figures in self.acceptance.items()
            ],
            "predicted": [
                {"streams": streams, "way": way.name, **_figures_json(figures)}
                for streams, ways in self.speed.items()
                for way, figures in ways.items()
            ],
            "hop_seconds": self.distance.hop,
            "network_seconds": self.distance.network,
            "concurrent": self.concurrent,
            "pools": {str(streams): self._pools_json(streams) for streams in self.pools if self.usable},
        }

    def lines(self) -> Iterator[str]:
        """Yield the report as text."""
        yield f"target  {self.target}"
        yield f"draft   {self.draft}"
        warm = ", ".join(f"{temperature:g}" for temperature in self.temperatures)
        yield f"texts   {self.texts}, temperature {warm}"
        yield ""
        yield "Milliseconds of a pass on this device, by its rows"
        yield from _table(
            ["", *map(str, ROWS)],
            [
                [name, *(f"{1000 * duration:.2f}" for duration in seconds)]
                for name, seconds in self.step_seconds.items()
            ],
        )
        if self.usable:  # otherwise it is the last line
            yield f"Pass times varied by a factor of {self.spread:.1f} during the evaluation."
        yield ""
        yield "Acceptance, with a draft that is always in time"
        yield from _table(
            ["rule", "candidates", "accepted", "tokens a step"],
            [
                [rule.value, tree.name, f"{figures.acceptance:.0%}", f"{figures.tokens_a_step:.2f}"]
                for (rule, tree), figures in self.acceptance.items()
            ],
        )
        yield ""
        yield "Predicted tokens a second of one verifier, and the ratio to plain decoding"
        yield from _table(
            ["streams", *(way.name for way in next(iter(self.speed.values())))],
            [[str(streams), *_speeds(ways)] for streams, ways in self.speed.items()],
        )
        fast = "" if self.draft_speed == 1 else f", {self.draft_speed:g} times as fast"
        hop, network = 1000 * self.distance.hop, 1000 * self.distance.network
        yield (
            f"A remote draft has its own device, like the one above{fast}. A message from one service to another "
            f"takes {hop:.2f} ms, as measured here, and {network:g} ms of network. Each way speculates when it pays."
        )
        yield ""
        if not self.usable:
            yield (
                f"pass times varied by a factor of {self.spread:.1f} during the evaluation: the predictions are not "
                "usable; free the cores or lower --threads"
            )
            return
        for streams in self.speed:
            yield from self._pool_lines(streams)

    def _pools_json(self, streams: int) -> dict[str, Any]:
        verifiers, drafts = self._replicas(streams)
        return asdict(self.pools[streams]) | {"verifier_pods": verifiers, "draft_pods": drafts}

    def _replicas(self, streams: int) -> tuple[int, int]:
        """Return the numbers of verifiers and drafts for `concurrent` texts, or for one draft pod if it is None."""
        pools = self.pools[streams]
        return pools.replicas(streams, self.concurrent or streams * pools.verifiers)

    def _pool_lines(self, streams: int) -> Iterator[str]:
        many = f"{streams} stream{'s' * (streams != 1)} a verifier"
        if (pools := self.pools.get(streams)) is None:
            yield f"{many}: {fastest(self.speed[streams]).name} is fastest; a draft service does not help."
            return
        verifiers, drafts = self._replicas(streams)
        yield (
            f"{many}: a draft pod for {_count(pools.verifiers, 'verifier')} ({pools.rate / pools.best:.0%} of the "
            f"speed with one for each). {_count(self.concurrent or verifiers * streams, 'text')} at a time take "
            f"{_count(verifiers, 'verifier')} and {_count(drafts, 'draft')}; in the chart's values:"
        )
        yield f"  verifiers: {{main: {{replicas: {verifiers}}}}}"
        yield f"  drafts: {{main: {{replicas: {drafts}}}}}"


def fastest(ways: Mapping[Way, Figures]) -> Way:
    """Return the way with the most tokens a second."""
    return max(ways, key=lambda way: ways[way].rate)


def _counts(figures: Figures) -> dict[str, Any]:
    return {
        "tokens": figures.tokens,
        "steps": figures.steps,
        "offered": figures.offered,
        "accepted": figures.accepted,
        "acceptance": figures.acceptance,
        "tokens_per_step": figures.tokens_a_step,
    }


def _figures_json(figures: Figures) -> dict[str, Any]:
    return asdict(figures) | _counts(figures) | {"tokens_per_second": figures.rate}


def _speeds(ways: Mapping[Way, Figures]) -> Iterator[str]:
    plain = ways[PLAIN].rate
    for way, figures in ways.items():
        rate = figures.rate
        yield f"{rate:.0f}" if way is PLAIN else f"{rate:.0f} ({rate / plain:.2f})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield aligned rows: the first column to the left, all others to the right."""
    lines = [head, *rows]
    widths = [max(len(row[column]) for row in lines) for column in range(len(head))]
    for row in lines:
        cells = [
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "   ".join(cells)).rstrip()
