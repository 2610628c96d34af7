"""The measurements of a comparison, and queries for reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.report import Report


@dataclass(frozen=True)
class Measurement:
    """The measurement of one configuration in one cell and round."""

    configuration: str
    kind: str
    streams: int
    temperature: float
    round: int
    tokens_per_second: float
    first: list[float]  # seconds to each stream's first token
    pauses: list[float]  # seconds between arrivals
    tokens_per_step: float | None
    acceptance: float | None  # of verified candidates
    sources: dict[str, int]
    ideal: float | None  # tokens a second
    cores: dict[str, float]  # used by its own processes
    waiting_cores: float  # used by the other systems under test, which should be idle
    foreign_cores: float  # used by processes outside the benchmark
    text: int | None  # for specdec: equal numbers mean equal texts


Column = tuple[str, int]
"""Kind of prompts, and streams."""


def configurations(report: Report) -> list[str]:
    return list(dict.fromkeys(each["configuration"] for each in report["measurements"]))


def columns(report: Report) -> list[Column]:
    return list(dict.fromkeys((each["kind"], each["streams"]) for each in report["measurements"]))


def found(report: Report, **what: Any) -> list[Report]:
    """Return the measurements with these properties."""
    return [each for each in report["measurements"] if all(each[name] == value for name, value in what.items())]


def ratios(of: list[Report], over: list[Report]) -> list[float]:
    """Return the ratios of rates within a round and kind."""
    base = {(each["round"], each["kind"]): each["tokens_per_second"] for each in over}
    return [e["tokens_per_second"] / base[k] for e in of if (k := (e["round"], e["kind"])) in base]


def streams_label(count: int) -> str:
    return f"{count} stream{'s' * (count > 1)}"
