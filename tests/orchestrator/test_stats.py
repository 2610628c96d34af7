"""Samples count as goodput if and only if their texts were completed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.models.stats import OrchestratorStats
from orchestrator.text.transcript import Statistics
from specdec.serving.errors import DeadlineError
from specdec.v2 import generation_pb2, model_pb2


def transcript(tokens: int) -> Any:
    """Return a transcript that began with two tokens and now has `tokens`."""
    return SimpleNamespace(
        usage=generation_pb2.Usage(prompt_tokens=5, completion_tokens=tokens),
        statistics=Statistics(),
        resumed_tokens=2,
        finish_reason=model_pb2.FINISH_REASON_UNSPECIFIED,
    )


def test_a_complete_text_is_goodput_even_if_its_caller_leaves_with_the_last_token() -> None:
    stats, text = OrchestratorStats(), transcript(12)
    text.finish_reason = model_pb2.FINISH_REASON_LENGTH
    with pytest.raises(GeneratorExit), stats.sample(text):
        raise GeneratorExit
    assert (stats.generated_tokens, stats.finished_tokens) == (10, 10)
    assert stats.finished == {"length": 1}


@pytest.mark.parametrize("error", [asyncio.CancelledError(), DeadlineError("late"), GeneratorExit()])
def test_a_text_that_breaks_off_is_not(error: BaseException) -> None:
    stats = OrchestratorStats()
    with pytest.raises(type(error)), stats.sample(transcript(12)):
        raise error
    assert (stats.generated_tokens, stats.finished_tokens) == (10, 0)
    assert not stats.finished
