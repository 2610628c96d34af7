"""What speculation did in the parts of a stream that were interrupted.

A server counts from where it took the text up, and tells at the end. Of a part that broke off, what its pieces
said is all there is to know.
"""

from __future__ import annotations

from specdec.v1.generation_pb2 import GenerateResponse, SpeculationStatistics
from specdec.v1.model_pb2 import TOKEN_SOURCE_DRAFT, TOKEN_SOURCE_LOOKAHEAD, TOKEN_SOURCE_NGRAM, TokenSource

_ACCEPTED = (TOKEN_SOURCE_DRAFT, TOKEN_SOURCE_NGRAM, TOKEN_SOURCE_LOOKAHEAD)


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
    statistics = SpeculationStatistics(steps=response.steps, drafted=response.drafted)
    for source in response.sources:
        statistics.accepted += source in _ACCEPTED
        statistics.sources[TokenSource.Name(source).removeprefix("TOKEN_SOURCE_").lower()] += 1
    statistics.accepted_histogram.extend([0] * statistics.accepted + [response.steps])
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
