"""The context of one sample, shared by its verification and its drafting."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

from orchestrator.models.grammar_check import GrammarWatch
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pod
from orchestrator.pods.prefix_routing import PrefixAnswers
from orchestrator.requests.model import ServedModel
from orchestrator.requests.sample import CommittedText, Sample
from orchestrator.text.request_timeline import SampleTimeline
from specdec.decoding.speculation import SpeculationOptions
from specdec.v2 import draft_pb2, generation_pb2, verifier_pb2


class GrantedLimits:
    """The granted limits of one sample."""

    def __init__(self, speculation: SpeculationOptions) -> None:
        asked = {
            "max_candidates": speculation.max_candidates,
            "max_depth": speculation.max_depth,
            "max_branches": speculation.max_branches,
            "max_nodes": speculation.max_nodes,
        }
        self._least = {name: limit for name, limit in asked.items() if limit}  # 0: left to the services

    def by_verifier(self, opened: verifier_pb2.VerifyOpened) -> None:
        self._grant("max_candidates", opened.max_candidates)
        self._grant("max_branches", opened.max_branches)
        self._grant("max_nodes", opened.max_nodes)

    def by_draft(self, opened: draft_pb2.DraftOpened) -> None:
        self._grant("max_depth", opened.max_depth)
        self._grant("max_branches", opened.max_branches)
        self._grant("max_nodes", opened.max_nodes)

    def message(self) -> generation_pb2.SpeculationLimits:
        """Return the smallest grants; limits that the request left open are unset."""
        return generation_pb2.SpeculationLimits(**self._least)

    def _grant(self, name: str, limit: int) -> None:
        if limit and name in self._least:  # 0: not reported by the pod
            self._least[name] = min(limit, self._least[name])


@dataclass(frozen=True)
class SampleContext:
    """A sample, its model and peers, its text, and the record of its events."""

    sample: Sample
    model: ServedModel
    peers: Peers
    deadline: float | None  # the caller's, in monotonic time
    text: CommittedText
    granted: GrantedLimits
    timeline: SampleTimeline
    grammar_watch: GrammarWatch | None = None  # None: the sample has no grammar, or grammars are not tried
    fallback_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds that texts continued without the draft they asked for, by reason; shared by all texts of the revision."""
    prefixes: PrefixAnswers = field(default_factory=PrefixAnswers)
    """The verifiers' answers about cached prefixes of the request's texts; shared by its samples."""
    keepers: set[Pod] = field(default_factory=set)
    """Drafts that keep the text to learn from it."""

    @property
    def timeout(self) -> float | None:
        """Seconds left until the caller's deadline, which gRPC does not propagate."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
