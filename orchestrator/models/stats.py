"""Statistics of an orchestrator: its requests and their outcomes.

Texts are counted when they end, for any reason; nothing is counted per token.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Self

from orchestrator.text.transcript import SampleTranscript
from specdec.serving.errors import as_service_error
from specdec.serving.histogram import Histogram
from specdec.v2 import generation_pb2, model_pb2
from specdec.wire.decisions import add_decisions

FINISH_REASONS = {
    model_pb2.FINISH_REASON_STOP: "stop",
    model_pb2.FINISH_REASON_LENGTH: "length",
    model_pb2.FINISH_REASON_CONTEXT: "context",
}


@dataclass
class OrchestratorStats:
    """Counters and gauges of the requests for one revision of a model; used by the event loop only."""

    running_requests: int = 0
    by_class: Counter[str] = field(default_factory=Counter)  # requests, by the class of their tenants
    failed: Counter[tuple[str, str]] = field(default_factory=Counter)  # requests, by error reason and tenant class
    cancelled: int = 0  # requests cancelled by their callers
    running: set[SampleTranscript] = field(default_factory=set)  # of samples in flight
    ended_samples: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # samples with complete texts, by finish reason
    finished_tokens: int = 0  # tokens generated in these samples
    steps: int = 0
    offered: int = 0  # candidates
    accepted: int = 0
    sources: Counter[str] = field(default_factory=Counter)  # tokens, by source
    decisions: model_pb2.SpeculationDecisions = field(default_factory=model_pb2.SpeculationDecisions)
    failover_events: Counter[str] = field(default_factory=Counter)  # by reason
    fallback_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds that texts continued without the draft they asked for, by reason."""
    first_token: Histogram = field(default_factory=Histogram)  # seconds from a sample's start to its first token
    between_tokens: Histogram = field(default_factory=Histogram)  # seconds; shared by tokens that arrive together
    whole: Histogram = field(default_factory=Histogram)  # seconds from a sample's start to its end

    @classmethod
    def summed(cls, all: Iterable[Self]) -> Self:
        """Return the sum of these statistics."""
        found = cls()
        for stats in all:
            for name in (one.name for one in fields(cls)):
                match getattr(found, name), getattr(stats, name):
                    case dict() as sums, more:
                        for key, count in more.items():
                            sums[key] += count
                    case Histogram() as sums, more:
                        sums.merge(more)
                    case set() as sums, more:
                        sums |= more
                    case model_pb2.SpeculationDecisions() as sums, more:
                        add_decisions(sums, more)
                    case count, more:
                        setattr(found, name, count + more)
        return found

    @property
    def all_samples(self) -> generation_pb2.SampleCounts:
        """The counts of all samples, ended or not."""
        counts = generation_pb2.SampleCounts(
            tokens=self.generated_tokens,
            steps=self.steps,
            offered_candidates=self.offered,
            accepted_candidates=self.accepted,
        )
        for transcript in self.running:
            counts.tokens += transcript.generated_tokens
            counts.steps += transcript.statistics.steps
            counts.offered_candidates += transcript.statistics.offered
            counts.accepted_candidates += transcript.statistics.accepted
        return counts

    @property
    def failed_by_reason(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (reason, _), count in self.failed.items():
            found[reason] += count
        return found

    @contextmanager
    def request(self, tenant_class: str) -> Iterator[None]:
        """Count a request of this tenant class, and its outcome."""
        self.by_class[tenant_class] += 1
        self.running_requests += 1
        try:
            yield
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        except Exception as error:
            self.failed[as_service_error(error).reason, tenant_class] += 1
            raise
        finally:
            self.running_requests -= 1

    @contextmanager
    def sample(self, transcript: SampleTranscript) -> Iterator[Callable[[int], None]]:
        """Count a sample, and add its transcript's figures at its end. Yield a function to be called with the number of
        new tokens as they arrive."""
        self.running.add(transcript)
        begin, last = time.monotonic(), None

        def tokens_arrived(tokens: int) -> None:
            nonlocal last
            now = time.monotonic()
            if last is None:
                self.first_token.observe(now - begin)
            elif tokens:  # 0 if all were cut off by a stop string
                self.between_tokens.observe((now - last) / tokens, tokens)
            last = now

        try:
            yield tokens_arrived
        finally:
            self.whole.observe(time.monotonic() - begin)
            self.running.remove(transcript)
            self.ended_samples += 1
            usage, statistics = transcript.usage, transcript.statistics
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
            generated = transcript.generated_tokens
            self.generated_tokens += generated
            if transcript.finish_reason:
                self.finished[FINISH_REASONS[transcript.finish_reason]] += 1
                self.finished_tokens += generated
            self.steps += statistics.steps
            self.offered += statistics.offered
            self.accepted += statistics.accepted
            self.sources += statistics.sources
            add_decisions(self.decisions, statistics.decisions)
