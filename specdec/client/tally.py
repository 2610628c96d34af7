"""The tally: speculation statistics across the interrupted parts of a stream.

A server counts from the position where it resumed the text, and reports at the end. For an interrupted part, only the
statistics in its chunks are known.
"""

from __future__ import annotations

from specdec.v2.generation_pb2 import GenerateResponse, SpeculationStatistics
from specdec.wire.decisions import add_decisions
from specdec.wire.sources import accepted_candidates, accepted_histogram, histogram_entries, source_name


class Tally:
    """The tally of one sample."""

    def __init__(self) -> None:
        self._broken = SpeculationStatistics()  # of the interrupted parts
        self._part = SpeculationStatistics()  # of the current part
        self._begun = False  # the current part has responses

    def take(self, response: GenerateResponse) -> None:
        """Count a response. The last one is changed: its statistics get those of the interrupted parts added, and then
        cover the whole stream."""
        if response.HasField("finish"):
            _add(response.finish.speculation, self._broken)
        else:
            self._begun = True
            _add(self._part, _of(response))

    def broke_off(self) -> None:
        """Note that the stream broke and will be resumed. An attempt without responses is not counted."""
        if not self._begun:
            return
        self._begun = False
        self._part.failover_events["resumed"] += 1
        _add(self._broken, self._part)
        self._part.Clear()


def _of(response: GenerateResponse) -> SpeculationStatistics:
    histogram = accepted_histogram(response.sources, response.steps)
    statistics = SpeculationStatistics(
        steps=response.steps,
        offered=response.offered,
        accepted=accepted_candidates(histogram),
        accepted_histogram=histogram_entries(histogram),
    )
    for source in response.sources:
        statistics.sources[source_name(source)] += 1
    return statistics


def _add(total: SpeculationStatistics, part: SpeculationStatistics) -> None:
    """Add a part of a stream to a total, saturating, since a server may send any number."""
    total.steps = _sum(total.steps, part.steps)
    total.offered = _sum(total.offered, part.offered)
    total.accepted = _sum(total.accepted, part.accepted)
    for name, count in part.sources.items():
        total.sources[name] = _sum(total.sources[name], count)
    for name, count in part.failover_events.items():
        total.failover_events[name] = _sum(total.failover_events[name], count)
    add_decisions(total.decisions, part.decisions)
    total.accepted_histogram.extend([0] * (len(part.accepted_histogram) - len(total.accepted_histogram)))
    for accepted, steps in enumerate(part.accepted_histogram):
        total.accepted_histogram[accepted] = _sum(total.accepted_histogram[accepted], steps)


def _sum(one: int, other: int) -> int:
    """Return the sum, at most the largest uint32."""
    return min(one + other, (1 << 32) - 1)
