"""The context of one sample: what its verification and its drafting both need to know."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

from orchestrator.committed_text import CommittedText
from orchestrator.failover_events import FailoverEvents
from orchestrator.grammar_check import GrammarWatch
from orchestrator.granted import GrantedLimits
from orchestrator.model import Model
from orchestrator.peers import Peers
from orchestrator.request_timeline import SampleTimeline
from orchestrator.sample import Sample


@dataclass(frozen=True)
class SampleContext:
    """A sample, the model and the peers that serve it, its text, and what happens to it."""

    sample: Sample
    model: Model
    peers: Peers
    deadline: float | None  # the caller's, in monotonic time
    text: CommittedText
    events: FailoverEvents
    granted: GrantedLimits
    timeline: SampleTimeline
    grammar_watch: GrammarWatch | None = None  # None: it has no grammar, or nobody tries it
    fallback_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds for which texts have gone on without a draft that they wanted, by reason: those of all samples."""

    @property
    def timeout(self) -> float | None:
        """Seconds left of the caller's deadline, which gRPC does not pass on by itself."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
