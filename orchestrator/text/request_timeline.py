"""The timeline of a request: its parameters, the events of each sample, and changes of the pods that serve its text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import structlog

from orchestrator.requests.sample import Request, Sample
from orchestrator.text.transcript import SampleTranscript
from specdec.serving.messages import finish_name
from specdec.serving.timeline import Timeline, Value
from specdec.v2 import generation_pb2
from specdec.wire.decisions import DRAFTING_EVENTS, explained

log = structlog.get_logger()

MAX_EXPLANATION = 512
"""Maximum characters of the explanation of a sample's speculation; a faulty verifier may cause longer ones."""


def operation(request: generation_pb2.GenerateRequest) -> str:
    """Return the operation of a request in OpenTelemetry's words (`gen_ai.operation.name`)."""
    return "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"


def record_parsed(timeline: Timeline, request: Request) -> None:
    sample = request.samples[0]  # samples differ only in their seeds
    timeline.texts = len(request.samples)
    timeline.set(
        max_tokens=sample.max_tokens,
        temperature=sample.sampling.temperature,
        samples=len(request.samples),
        prompt_tokens=len(sample.prompt),
        rule=sample.rule.name.lower(),
    )
    timeline.event("parsed")


FailoverReason = Literal[
    "verifier_lost", "numerics_changed", "draft_lost", "draft_useless", "draft_back", "draft_paused", "draft_resumed"
]


class SampleTimeline:
    """The part of one sample in the timeline of its request, and the sample's failover events."""

    def __init__(self, timeline: Timeline, all_failover_events: Counter[str], sample: Sample | None = None) -> None:
        """`all_failover_events`: the counts over all samples of the revision, by reason; `sample`: the sample to name
        in events, if the request has several."""
        self.failover_events: Counter[str] = Counter()  # by reason
        self._all_failover_events = all_failover_events
        self._timeline = timeline
        self._which: dict[str, Value] = {} if sample is None else {"sample": sample.index}

    @property
    def began(self) -> float:
        """When the request arrived: time.monotonic."""
        return self._timeline.began

    def event(self, name: str, **attributes: Value) -> None:
        self._timeline.event(name, **self._which, **attributes)

    def first_commit(self) -> None:
        """Record the first tokens of the sample. The first sample to get any sets the request's time to first token."""
        self.event("first_commit")
        self._timeline.attributes.setdefault("time_to_first_token", time.monotonic() - self._timeline.began)

    def failover_event(self, reason: FailoverReason, pod: object, why: str = "") -> None:
        """Count, record and log a failover event. One of `DRAFTING_EVENTS`, such as a pause of the draft, is counted as
        a failover event too, but recorded as "drafting": no pod has failed."""
        self.failover_events[reason] += 1
        self._all_failover_events[reason] += 1
        if reason in DRAFTING_EVENTS:
            self.event("drafting", reason=reason, pod=str(pod))
            self._timeline.add(**{f"drafting.{reason}": 1})
            log.info("drafting", reason=reason, pod=str(pod), why=why)
            return
        self.event("failover", reason=reason, pod=str(pod))
        self._timeline.add(**{f"failovers.{reason}": 1})
        tell = log.info if reason == "draft_back" else log.warning
        tell("failover", reason=reason, pod=str(pod), why=why)

    def finish(self, finish: generation_pb2.Finish) -> None:
        reason, speculation = finish_name(finish.reason), finish.speculation
        self.event("finish", reason=reason)
        self._list("finish_reasons").append(reason)
        if speculation.undrafted_tokens:
            self._timeline.add(**{f"undrafted_tokens.{speculation.undrafted_reason}": speculation.undrafted_tokens})

    def _list(self, name: str) -> list[str]:
        """Return this attribute, a list with an entry per sample."""
        entries = self._timeline.attributes.setdefault(name, [])
        assert isinstance(entries, list)
        return entries

    @contextmanager
    def figures(self, transcript: SampleTranscript) -> Iterator[None]:
        """Add the sample's figures to the timeline when the sample ends, for any reason."""
        try:
            yield
        finally:
            usage, statistics = transcript.usage, transcript.statistics
            self._timeline.add(
                cached_tokens=0 if self._which.get("sample") else usage.cached_tokens,  # once, as the prompt's tokens
                generated_tokens=transcript.generated_tokens,
                steps=statistics.steps,
                offered=statistics.offered,
                accepted=statistics.accepted,
                **{f"tokens.{source}": count for source, count in statistics.sources.items()},
                **{f"steps.{mode}": count for mode, count in statistics.decisions.modes.items()},
                **{f"without_candidates.{why}": count for why, count in statistics.decisions.without.items()},
            )
            if why := explained(statistics.decisions):
                self._list("speculation").append(why[:MAX_EXPLANATION])
