"""Granted limits: what pods grant of the speculation limits of a request.

A text may move to a pod with smaller grants. It continues there, and its `finish` reports the smallest.
"""

from __future__ import annotations

from specdec.decoding.speculation import SpeculationOptions
from specdec.v2 import draft_pb2, generation_pb2, verifier_pb2


class GrantedLimits:
    """The granted limits of one sample."""

    def __init__(self, speculation: SpeculationOptions) -> None:
        asked = {
            "max_candidates": speculation.max_candidates,
            "max_depth": speculation.max_depth,
            "max_branches": speculation.max_branches,
        }
        self._least = {name: limit for name, limit in asked.items() if limit}  # 0: left to the services

    def by_verifier(self, opened: verifier_pb2.VerifyOpened) -> None:
        """Record a verifier's grants."""
        self._grant("max_candidates", opened.max_candidates)
        self._grant("max_branches", opened.max_branches)

    def by_draft(self, opened: draft_pb2.DraftOpened) -> None:
        """Record a draft's grants."""
        self._grant("max_depth", opened.max_depth)
        self._grant("max_branches", opened.max_branches)

    def message(self) -> generation_pb2.SpeculationLimits:
        """Return the smallest grants; limits the request leaves open are unset."""
        return generation_pb2.SpeculationLimits(**self._least)

    def _grant(self, name: str, limit: int) -> None:
        if limit and name in self._least:  # 0: not reported by the pod
            self._least[name] = min(limit, self._least[name])
