"""A draft within its limits is never given up, and a flooding one soon is."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.generation.draft_session import MESSAGES_A_COMMIT, CandidateFlow
from specdec.serving.validation import MAX_NODES_A_MESSAGE
from specdec.v2 import model_pb2

NODES = 16


def extend(nodes: int, **fields: Any) -> model_pb2.Extend:
    return model_pb2.Extend(**{"tokens": [1] * nodes, "parents": range(nodes), "logprob_bytes": bytes(nodes)} | fields)


ONE = extend(1)

REFILL = MESSAGES_A_COMMIT + NODES // 4


@given(st.lists(st.integers(0, REFILL), max_size=200))
def test_a_draft_that_answers_commits_is_never_given_up(answers: list[int]) -> None:
    """Even if it sent its whole allowance before the first commit."""
    flow = CandidateFlow(NODES)
    assert not any(flow.violation(ONE) for _ in range(2 * NODES))
    for messages in answers:
        flow.committed()
        assert not any(flow.violation(ONE) for _ in range(messages))


def test_a_draft_that_talks_without_end_is_given_up() -> None:
    flow = CandidateFlow(NODES)
    flow.committed()
    sent = next(sent for sent in range(10_000) if flow.violation(ONE))
    assert sent == 2 * NODES + REFILL


def test_commits_make_no_reserve() -> None:
    flow = CandidateFlow(NODES)
    for _ in range(1000):
        flow.committed()
    assert any(flow.violation(ONE) for _ in range(2 * NODES + REFILL + 1))


def test_a_message_holds_only_so_many() -> None:
    flow = CandidateFlow(NODES)
    assert not flow.violation(extend(MAX_NODES_A_MESSAGE))
    assert flow.violation(extend(MAX_NODES_A_MESSAGE + 1))


def test_a_message_has_only_so_many_ids_of_distributions() -> None:
    rows = [model_pb2.DraftDistribution(id_gaps=[1] * 4096, values=bytes(8192), vocabulary_size=128_000)] * 1000
    assert "token ids of distributions" in CandidateFlow(256).violation(model_pb2.Extend(distributions=rows))


def test_a_draft_that_talks_at_length_is_given_up_sooner() -> None:
    flow = CandidateFlow(256)
    long = extend(MAX_NODES_A_MESSAGE)
    sent = next(sent for sent in range(10_000) if flow.violation(long))
    assert sent < 40


def test_so_is_one_that_sends_megabytes() -> None:
    flow = CandidateFlow(256)
    large = extend(1, distributions=[model_pb2.DraftDistribution(values=bytes(15 << 20))])
    sent = next(sent for sent in range(10_000) if flow.violation(large))
    assert sent < 40


def test_what_belongs_to_candidates_counts_like_them() -> None:
    """Empty distributions cost the sender two bytes each, and the receiver far more."""
    for most, fields in (
        (MAX_NODES_A_MESSAGE + 1, {"distributions": [model_pb2.DraftDistribution()]}),
        (MAX_NODES_A_MESSAGE, {"parents": [0]}),
    ):
        assert not CandidateFlow(NODES).violation(extend(1, **{name: most * each for name, each in fields.items()}))
        assert CandidateFlow(NODES).violation(extend(1, **{name: (most + 1) * each for name, each in fields.items()}))
