"""The pods' own statistics, for operators: fetched from all pods concurrently, and cached briefly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc

from orchestrator.pods.errors import LostError
from orchestrator.pods.pods import Pod
from orchestrator.pods.unary import answer_of
from specdec.v2 import draft_pb2, draft_pb2_grpc, generation_pb2, verifier_pb2, verifier_pb2_grpc

ASK_SECONDS = 1.0
"""Timeout in seconds for a pod."""

KNOWN_SECONDS = 0.5
"""Lifetime of a cached answer in seconds: without the cache, a caller could flood all pods with calls."""

MAX_BYTES = 1 << 16
"""Maximum bytes of an answer; larger ones are dropped, since a pod may send anything."""

Stats = verifier_pb2.GetStatsResponse | draft_pb2.DraftServiceGetStatsResponse


class Peer(NamedTuple):
    """A pod, and what it serves."""

    pod: Pod
    drafts: bool  # whether it is a draft service
    model: str  # its revision, as named in requests; empty: the revision has no name


class PodStatsCache:
    """The cache of all pods' last answers."""

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        self._known: dict[Pod, Stats] = {}
        self._known_until = float("-inf")

    async def enter(self, views: Sequence[tuple[Peer, generation_pb2.PodView]]) -> None:
        """Add the statistics of each answering pod to its view; `views` has all pods known now."""
        async with self._asking:
            if time.monotonic() > self._known_until:
                answers = await asyncio.gather(*(_ask(peer) for peer, _ in views))
                found = zip(views, answers, strict=True)
                self._known = {peer.pod: answer for (peer, _), answer in found if answer is not None}
                self._known_until = time.monotonic() + KNOWN_SECONDS
        for peer, view in views:
            match self._known.get(peer.pod):
                case verifier_pb2.GetStatsResponse() as stats:
                    view.verifier.CopyFrom(stats)
                case draft_pb2.DraftServiceGetStatsResponse() as stats:
                    view.draft.CopyFrom(stats)


async def _ask(peer: Peer) -> Stats | None:
    """Return a pod's statistics; None if it does not answer, or if its answer exceeds `MAX_BYTES`."""
    verifier: Any = verifier_pb2_grpc.VerifierServiceStub(peer.pod.channel)
    draft: Any = draft_pb2_grpc.DraftServiceStub(peer.pod.channel)
    try:
        stats: Stats = await (
            answer_of(draft.GetStats, draft_pb2.DraftServiceGetStatsRequest(), ASK_SECONDS)
            if peer.drafts
            else answer_of(verifier.GetStats, verifier_pb2.GetStatsRequest(), ASK_SECONDS)
        )
    except (grpc.aio.AioRpcError, LostError):
        return None
    return stats if stats.ByteSize() <= MAX_BYTES else None
