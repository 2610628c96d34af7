"""The timeline of a sample: pauses of a draft are no failovers, and its last event has what decided on candidates."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.requests.model import ServedModel
from orchestrator.requests.parsing import parse
from orchestrator.text.request_timeline import (
    MAX_EXPLANATION,
    FailoverReason,
    SampleTimeline,
    record_parsed,
)
from orchestrator.text.transcript import SampleTranscript, Statistics
from specdec.engine.model_directory import ModelDirectory
from specdec.serving.timeline import Timeline
from specdec.v2 import generation_pb2, model_pb2
from tests.captured_logs import captured_logs
from tests.models import make


@pytest.mark.parametrize(
    ("reason", "event", "level"),
    [
        ("draft_paused", "drafting", "info"),
        ("draft_resumed", "drafting", "info"),
        ("draft_useless", "drafting", "info"),
        ("draft_back", "failover", "info"),
        ("draft_lost", "failover", "warning"),
        ("verifier_lost", "failover", "warning"),
    ],
)
def test_a_pause_is_no_failover(reason: FailoverReason, event: str, level: str) -> None:
    timeline = Timeline()
    sample_timeline = SampleTimeline(timeline, Counter())
    with captured_logs() as logs:
        sample_timeline.failover_event(reason, "a:1", "because")
    assert [(logged["event"], logged["log_level"], logged["reason"]) for logged in logs] == [(event, level, reason)]
    assert [happened.name for happened in timeline.events] == [event]
    assert timeline.attributes == {f"{'failovers' if event == 'failover' else 'drafting'}.{reason}": 1}
    assert sample_timeline.failover_events == {reason: 1}


def transcript(**fields: Any) -> SampleTranscript:
    decisions = model_pb2.SpeculationDecisions(**fields)
    statistics = Statistics(steps=3, decisions=decisions)
    statistics.sources.update(ngram=2, plain=1)
    usage = generation_pb2.Usage(completion_tokens=3)
    return cast("SampleTranscript", SimpleNamespace(usage=usage, statistics=statistics, generated_tokens=3))


def test_the_end_says_who_proposed_and_what_decided() -> None:
    timeline = Timeline()
    with SampleTimeline(timeline, Counter()).figures(transcript(modes={"ngram": 3}, without={"row_cost": 2})):
        pass
    with SampleTimeline(timeline, Counter()).figures(transcript(modes={"ngram": 3}, without={"row_cost": 1})):
        pass
    found = timeline.attributes
    assert (found["tokens.ngram"], found["tokens.plain"]) == (4, 2)
    assert (found["steps.ngram"], found["without_candidates.row_cost"]) == (6, 3)
    assert found["speculation"] == [
        "n-grams: 1 of 3 steps had candidates; 2 had none: no candidate is worth its row",
        "n-grams: 2 of 3 steps had candidates; 1 had none: no candidate is worth its row",
    ]


def test_cached_tokens_of_a_prompt_count_once(tmp_path: Path) -> None:
    model = ServedModel.of(ModelDirectory(make("llama", tmp_path / "m")))
    request = parse(generation_pb2.GenerateRequest(text="abc", n=2), model)
    timeline, ended = Timeline(), transcript()
    record_parsed(timeline, request)
    ended.usage.cached_tokens = 1
    for sample in reversed(request.samples):
        with SampleTimeline(timeline, Counter(), sample).figures(ended):
            pass
    assert (timeline.texts, timeline.attributes["cached_tokens"]) == (2, 1)


def test_a_faulty_verifier_does_not_fill_a_timeline() -> None:
    timeline = Timeline()
    with SampleTimeline(timeline, Counter()).figures(transcript(modes={"m" * 5000: 3}, without={"w" * 5000: 3})):
        pass
    (told,) = cast("list[str]", timeline.attributes["speculation"])
    assert len(told) == MAX_EXPLANATION
