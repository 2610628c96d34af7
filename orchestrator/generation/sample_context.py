"""The context of one sample: what its verification and its drafting share."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

from orchestrator.generation.granted import GrantedLimits
from orchestrator.models.grammar_check import GrammarWatch
from orchestrator.pods.peers import Peers
from orchestrator.requests.model import ServedModel
from orchestrator.requests.sample import Sample
from orchestrator.text.committed_text import CommittedText
from orchestrator.text.failover_events import FailoverEvents
from orchestrator.text.request_timeline import SampleTimeline


@dataclass(frozen=True)
class SampleContext:
    """A sample, its model and peers, its text, and the records of its events."""

    sample: Sample
    model: ServedModel
    peers: Peers
    deadline: float | None  # the caller's, in monotonic time
    text: CommittedText
    events: FailoverEvents
    granted: GrantedLimits
    timeline: SampleTimeline
    grammar_watch: GrammarWatch | None = None  # None: it has no grammar, or grammars are not tried
    fallback_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds for which texts have continued without the draft they wanted, by reason; shared by all samples."""

    @property
    def timeout(self) -> float | None:
        """Seconds left until the caller's deadline, which gRPC does not propagate by itself."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
