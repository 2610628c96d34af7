"""The answer to Complete has what all responses say, sample by sample."""

from __future__ import annotations

import time

import pytest

from orchestrator.text.answer import CompleteAnswer
from specdec.serving.errors import InvalidRequestError
from specdec.v2 import generation_pb2, model_pb2


def response(index: int, **fields: object) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(index=index, **fields)  # type: ignore[arg-type]


def test_every_sample_has_its_own_text() -> None:
    answer = CompleteAnswer(7, 2)
    finish = generation_pb2.Finish(reason=model_pb2.FINISH_REASON_STOP)
    answer.add(response(1, text="on", tokens=[1], resolved=generation_pb2.ResolvedRequest(max_tokens=9)))
    answer.add(response(0, reasoning="h", reasoning_tokens=1, tokens=[2]))
    answer.add(response(0, reasoning="m", reasoning_tokens=1, text="a", tokens=[3, 4], finish=finish))
    answer.add(response(1, text="e", tokens=[5]))
    found = answer.message()
    assert (found.seed, found.resolved.max_tokens) == (7, 9)
    first, second = found.completions
    assert (first.reasoning, first.reasoning_tokens, first.text, list(first.tokens)) == ("hm", 2, "a", [2, 3, 4])
    assert (second.reasoning, second.text, list(second.tokens)) == ("", "one", [1, 5])
    assert (first.finish.reason, second.HasField("finish")) == (model_pb2.FINISH_REASON_STOP, False)


def test_a_long_text_is_collected_in_time_linear_in_its_length() -> None:
    """If each piece were appended to the message's string, this would take many seconds."""
    answer, piece = CompleteAnswer(0, 1), response(0, text="x" * 200, tokens=[1])
    begin = time.process_time()
    for _ in range(40_000):
        answer.add(piece)
    assert len(answer.message().completions[0].text) == 200 * 40_000
    assert time.process_time() - begin < 2


def test_what_does_not_fit_a_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.text.answer.MAX_ANSWER_BYTES", 1 << 20)
    answer = CompleteAnswer(0, 1)
    answer.add(response(0, text="x" * (1 << 19)))
    with pytest.raises(InvalidRequestError, match="max_tokens: the response is longer than 1 MiB"):
        answer.add(response(0, text="x" * (1 << 19)))
