"""Token sources: the drafter or target that each token of a text comes from, and acceptance statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from specdec.v2.model_pb2 import (
    TOKEN_SOURCE_GRAMMAR,
    TOKEN_SOURCE_HEADS,
    TOKEN_SOURCE_LOCAL_MODEL,
    TOKEN_SOURCE_LOOKAHEAD,
    TOKEN_SOURCE_NGRAM,
    TOKEN_SOURCE_REMOTE_DRAFT,
    TokenSource,
)

ACCEPTED = (
    TOKEN_SOURCE_REMOTE_DRAFT,
    TOKEN_SOURCE_NGRAM,
    TOKEN_SOURCE_LOOKAHEAD,
    TOKEN_SOURCE_LOCAL_MODEL,
    TOKEN_SOURCE_GRAMMAR,
    TOKEN_SOURCE_HEADS,
)
"""Sources of accepted candidates. A token from any other source is the target's own and the last of its step."""


_NAMES: dict[int, str] = {number: name.removeprefix("TOKEN_SOURCE_").lower() for name, number in TokenSource.items()}


def source_name(source: int) -> str:
    """Return the name of a source; "unspecified" for one that a newer server added."""
    return _NAMES.get(source, "unspecified")


def accepted_histogram(sources: Iterable[TokenSource.ValueType], steps: int) -> Counter[int]:
    """Count the `steps` by number of accepted candidates, from the sources of the kept tokens. A text may end with a
    candidate; steps beyond its end count as steps without accepted candidates."""
    histogram: Counter[int] = Counter()
    count = 0
    for source in sources:
        if source in ACCEPTED:
            count += 1
        else:
            histogram[count] += 1
            count = 0
    if count:
        histogram[count] += 1
    if steps > (seen := histogram.total()):
        histogram[0] += steps - seen
    return histogram


def accepted_candidates(histogram: Counter[int]) -> int:
    """Return the total number of candidates accepted in the steps of a histogram."""
    return sum(count * steps for count, steps in histogram.items())


def histogram_entries(histogram: Counter[int]) -> list[int]:
    """Return a histogram in the form of messages: entry i is the number of steps with i accepted candidates."""
    return [histogram[count] for count in range(max(histogram, default=-1) + 1)]
