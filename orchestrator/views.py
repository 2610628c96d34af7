"""Views of revisions and pods for GetStats."""

from __future__ import annotations

from orchestrator.models.revision import Revision
from orchestrator.pod_stats import Peer
from specdec.v2 import generation_pb2

BREAKER_STATES = {
    "closed": generation_pb2.BREAKER_STATE_CLOSED,
    "open": generation_pb2.BREAKER_STATE_OPEN,
    "half-open": generation_pb2.BREAKER_STATE_HALF_OPEN,
}


def add_pod(response: generation_pb2.GenerationServiceGetStatsResponse, peer: Peer) -> generation_pb2.PodView:
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


def revision_view(revision: Revision, *, leaving: bool = False) -> generation_pb2.RevisionView:
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
