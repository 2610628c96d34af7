"""What speculation did in the parts of a stream that were interrupted.

A server counts from where it took the text up, and tells at the end. Of a part that broke off, what its pieces
said is all there is to know.
"""

from __future__ import annotations

from specdec.client.sources import accepted_by_step, source_name
from specdec.v1.generation_pb2 import GenerateResponse, SpeculationStatistics


class Tally:
    """Of one sample."""

    def __init__(self) -> None:
        self._broken = SpeculationStatistics()  # of the parts that broke off
        self._part = SpeculationStatistics()  # of the part under way

    def take(self, response: GenerateResponse) -> None:
        """Count a piece; the last one's statistics become those of the whole stream."""
        if response.HasField("finish"):
            _add(response.finish.speculation, self._broken)
        else:
            _add(self._part, _of(response))

    def broke_off(self) -> None:
        """The stream is going to be taken up elsewhere. A try that brought nothing is no part of it."""
        if not self._part.ByteSize():
            return
        self._part.switches["resumed"] += 1
        _add(self._broken, self._part)
        self._part.Clear()


def _of(response: GenerateResponse) -> SpeculationStatistics:
    accepted = accepted_by_step(response.sources, response.steps)
    statistics = SpeculationStatistics(steps=response.steps, drafted=response.drafted, accepted=sum(accepted))
    statistics.accepted_histogram.extend(accepted.count(count) for count in range(max(accepted, default=-1) + 1))
    for source in response.sources:
        statistics.sources[source_name(source)] += 1
    return statistics


def _add(total: SpeculationStatistics, part: SpeculationStatistics) -> None:
    total.steps += part.steps
    total.drafted += part.drafted
    total.accepted += part.accepted
    for name, count in part.sources.items():
        total.sources[name] += count
    for name, count in part.switches.items():
        total.switches[name] += count
    total.accepted_histogram.extend([0] * (len(part.accepted_histogram) - len(total.accepted_histogram)))
    for accepted, steps in enumerate(part.accepted_histogram):
        total.accepted_histogram[accepted] += steps
