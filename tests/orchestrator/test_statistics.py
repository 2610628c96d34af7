"""What is counted of commits that a verifier has joined."""

from __future__ import annotations

from orchestrator.transcript import _accepted
from specdec.v1 import model_pb2

DRAFT, NGRAM = model_pb2.TOKEN_SOURCE_DRAFT, model_pb2.TOKEN_SOURCE_NGRAM
BONUS, PLAIN = model_pb2.TOKEN_SOURCE_BONUS, model_pb2.TOKEN_SOURCE_PLAIN


def test_each_step_counts_for_itself() -> None:
    assert list(_accepted([DRAFT, DRAFT, BONUS, PLAIN, NGRAM, BONUS])) == [2, 0, 1]


def test_a_text_may_end_with_a_candidate() -> None:
    assert list(_accepted([PLAIN, DRAFT, DRAFT])) == [0, 2]
