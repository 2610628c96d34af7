"""The answer to GetStats: the statistics of the orchestrator, its models, their revisions and their pods.

The pods' own statistics are added on request: they are fetched from all pods concurrently, and cached briefly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grpc

from orchestrator.models.catalog import Catalog, largest
from orchestrator.models.revision import Revision
from orchestrator.models.stats import OrchestratorStats
from orchestrator.pods.errors import LostError
from orchestrator.pods.pods import Pod
from orchestrator.pods.unary import answer_of
from specdec.serving.identity import pod_info
from specdec.v2 import draft_pb2, draft_pb2_grpc, generation_pb2, verifier_pb2, verifier_pb2_grpc

ASK_SECONDS = 1.0
"""Timeout in seconds for a pod."""

KNOWN_SECONDS = 0.5
"""Lifetime of a cached answer in seconds: without the cache, a caller could flood all pods with calls."""

MAX_BYTES = 1 << 16
"""Maximum bytes of an answer; larger ones are dropped, since a pod may send anything."""

BREAKER_STATES = {
    "closed": generation_pb2.BREAKER_STATE_CLOSED,
    "open": generation_pb2.BREAKER_STATE_OPEN,
    "half-open": generation_pb2.BREAKER_STATE_HALF_OPEN,
}

Response = generation_pb2.GenerationServiceGetStatsResponse

Stats = verifier_pb2.GetStatsResponse | draft_pb2.DraftServiceGetStatsResponse


class Peer(NamedTuple):
    """A pod, and what it serves."""

    pod: Pod
    drafts: bool  # whether it is a draft service
    model: str  # its revision, as named in requests; empty: the revision has no name


PodViews = Sequence[tuple[Peer, generation_pb2.PodView]]
"""All pods known now, each with its view in a response."""


def stats_response(
    catalog: Catalog, *, up_seconds: float, serving: bool, waiting_prompts: int
) -> tuple[Response, PodViews]:
    """Return the statistics, without those of the pods themselves, and the pods' views in them."""
    stats = OrchestratorStats.summed(catalog.counts().values())
    response = Response(
        pod=pod_info(),
        up_us=int(1e6 * up_seconds),
        models=served_models(catalog),
        running_requests=stats.running_requests,
        waiting_prompts=waiting_prompts,
        requests=stats.by_class.total(),
        failed_requests=stats.failed_by_reason,
        cancelled_requests=stats.cancelled,
        running_samples=len(stats.running),
        ended_samples=stats.ended_samples,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        generated_tokens=stats.generated_tokens,
        steps=stats.steps,
        offered_candidates=stats.offered,
        accepted_candidates=stats.accepted,
        failover_events=stats.failover_events,
        sources=stats.sources,
        decisions=stats.decisions,
        all_samples=stats.all_samples,
        serving=serving,
        revisions=[
            *(_revision_view(revision) for revision in catalog),
            *(_revision_view(revision, leaving=True) for revision in catalog.leaving),
        ],
    )
    return response, [(peer, _add_pod(response, peer)) for peer in peers_of(catalog)]


def served_models(catalog: Catalog) -> Iterator[generation_pb2.ServedModel]:
    """Yield the served models, as in ListModels."""
    for name, revisions in catalog.models.items():
        model = largest(revisions).model
        yield generation_pb2.ServedModel(
            name=name,
            context_tokens=model.context,
            vocabulary_size=model.vocabulary,
            chat=model.tokenizer.chat_templates is not None,
            text_fingerprint=model.text_fingerprint,
            tool_format="" if model.tool_format is None else model.tool_format.name,
            reasons=model.reasoning_marks is not None,
            revisions=[revision.name for revision in revisions if revision.name],
            aliases=model.aliases,
        )


def peers_of(catalog: Catalog) -> Iterator[Peer]:
    """Yield all pods known now."""
    for revision in catalog.all:
        peers, model = revision.peers, revision.asked_as
        yield from (Peer(pod, drafts=False, model=model) for pod in peers.verifiers)
        yield from (Peer(pod, drafts=True, model=model) for pod in peers.drafts or ())


def _revision_view(revision: Revision, *, leaving: bool = False) -> generation_pb2.RevisionView:
    """Return the state of a revision; `leaving`: it is no longer served, and only finishes its last requests."""
    stats = revision.stats
    return generation_pb2.RevisionView(
        model=revision.model.name,
        revision=revision.name,
        share=revision.share,
        serving=revision.ready,
        running_requests=stats.running_requests,
        requests=stats.by_class.total(),
        failed_requests=stats.failed_by_reason,
        generated_tokens=stats.generated_tokens,
        leaving=leaving,
    )


def _add_pod(response: Response, peer: Peer) -> generation_pb2.PodView:
    """Add a pod's state to the statistics and return it."""
    pod = peer.pod
    return (response.drafts if peer.drafts else response.verifiers).add(
        address=pod.address,
        breaker=BREAKER_STATES[pod.breaker.state],
        unfit_reason="" if pod.unfit is None else pod.unfit_reason,
        sessions=pod.load.ours,
        capacity=pod.load.now,
        numerics_fingerprint=pod.numerics,
        model=peer.model,
    )


class PodStatsCache:
    """The cache of all pods' last answers."""

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        self._known: dict[Pod, Stats] = {}
        self._known_until = float("-inf")

    async def enter(self, views: PodViews) -> None:
        """Add the statistics of each answering pod to its view."""
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
