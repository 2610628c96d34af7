"""Histogram of accepted candidates per step, including steps reported together."""

from __future__ import annotations

import tracemalloc

from specdec.client.transcript import Tally
from specdec.v2 import generation_pb2, model_pb2
from specdec.wire.sources import accepted_candidates, accepted_histogram, histogram_entries

DRAFT, NGRAM = model_pb2.TOKEN_SOURCE_REMOTE_DRAFT, model_pb2.TOKEN_SOURCE_NGRAM
BONUS, PLAIN = model_pb2.TOKEN_SOURCE_BONUS, model_pb2.TOKEN_SOURCE_PLAIN


def test_each_step_counts_for_itself() -> None:
    histogram = accepted_histogram([DRAFT, DRAFT, BONUS, PLAIN, NGRAM, BONUS], 3)
    assert histogram == {2: 1, 0: 1, 1: 1}
    assert accepted_candidates(histogram) == 3
    assert histogram_entries(histogram) == [1, 1, 1]


def test_a_text_may_end_with_a_candidate() -> None:
    assert accepted_histogram([PLAIN, DRAFT, DRAFT], 2) == {0: 1, 2: 1}


def test_steps_behind_its_end_brought_none_of_it() -> None:
    assert accepted_histogram([DRAFT, BONUS], 3) == {1: 1, 0: 2}
    assert accepted_histogram([], 1) == {0: 1}


def test_a_number_of_steps_costs_no_memory() -> None:
    """A hostile peer may send any number: a list for 2^32 - 1 steps took 34 GB."""
    tracemalloc.start()
    assert accepted_histogram([DRAFT, BONUS], 2**32 - 1) == {1: 1, 0: 2**32 - 2}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_the_client_adds_up_whatever_a_server_says() -> None:
    tally = Tally()
    for _ in range(3):
        tally.count(generation_pb2.GenerateResponse(sources=[BONUS], steps=2**32 - 1, offered=2**32 - 1))
        tally.broke_off()
    last = generation_pb2.GenerateResponse()
    last.finish.SetInParent()
    tally.count(last)
    assert last.finish.speculation.steps == 2**32 - 1


def test_the_client_counts_a_stream_that_broke_off_likewise() -> None:
    tally = Tally()
    tally.count(generation_pb2.GenerateResponse(sources=[DRAFT, DRAFT, BONUS, PLAIN, NGRAM, BONUS], steps=3, offered=9))
    tally.broke_off()
    last = generation_pb2.GenerateResponse()
    last.finish.speculation.steps = 1
    last.finish.speculation.accepted_histogram[:] = [1]
    tally.count(last)
    total = last.finish.speculation
    assert (total.steps, total.accepted, list(total.accepted_histogram)) == (4, 3, [2, 1, 1])
