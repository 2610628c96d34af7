"""How many candidates each step has brought, of steps that are told together too."""

from __future__ import annotations

from specdec.client.sources import accepted_by_step
from specdec.client.tally import Tally
from specdec.v1 import generation_pb2, model_pb2

DRAFT, NGRAM = model_pb2.TOKEN_SOURCE_DRAFT, model_pb2.TOKEN_SOURCE_NGRAM
BONUS, PLAIN = model_pb2.TOKEN_SOURCE_BONUS, model_pb2.TOKEN_SOURCE_PLAIN


def test_each_step_counts_for_itself() -> None:
    assert accepted_by_step([DRAFT, DRAFT, BONUS, PLAIN, NGRAM, BONUS], 3) == [2, 0, 1]


def test_a_text_may_end_with_a_candidate() -> None:
    assert accepted_by_step([PLAIN, DRAFT, DRAFT], 2) == [0, 2]


def test_steps_behind_its_end_brought_none_of_it() -> None:
    assert accepted_by_step([DRAFT, BONUS], 3) == [1, 0, 0]
    assert accepted_by_step([], 1) == [0]


def test_the_client_counts_a_stream_that_broke_off_likewise() -> None:
    tally = Tally()
    tally.take(generation_pb2.GenerateResponse(sources=[DRAFT, DRAFT, BONUS, PLAIN, NGRAM, BONUS], steps=3, drafted=9))
    tally.broke_off()
    last = generation_pb2.GenerateResponse()
    last.finish.speculation.steps = 1
    last.finish.speculation.accepted_histogram[:] = [1]
    tally.take(last)
    total = last.finish.speculation
    assert (total.steps, total.accepted, list(total.accepted_histogram)) == (4, 3, [2, 1, 1])
