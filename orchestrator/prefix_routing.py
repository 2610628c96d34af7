"""Prefix-aware routing: which verifiers have a text in their prefix cache, and are free enough to be preferred for it.

Verifiers are asked, each time anew: orchestrators share nothing, and what a cache holds is known where it is. A
verifier that is much busier than others is not preferred, as in consistent hashing with bounded loads (Mirrokni,
Thorup and Zadimoghaddam, 2018).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import grpc

from orchestrator.pod_errors import LostError
from orchestrator.pods import Pod
from orchestrator.unary import answer_of
from specdec.decoding.block_hashes import block_hashes
from specdec.v2 import verifier_pb2, verifier_pb2_grpc

ASK_SECONDS = 0.25
"""Seconds that verifiers get to answer, which takes a millisecond unless they are very busy. One that does not answer
in time counts as having nothing cached."""

LEAST_SHARE = 0.5
"""Share of a text that must be cached at a verifier for this to count. A short beginning that many texts share, such as
a system prompt, must not bring all of them to the verifier that happened to see it first."""

LOAD_FACTOR = 1.25
SPARE_SESSIONS = 2
"""A preferred verifier has at most so many times as many sessions as verifiers have on average, and so many more: with
few sessions, one more makes no step much longer."""


async def cached_tokens(
    pods: Collection[Pod], tokens: Sequence[int], tenant: str, most_seconds: float = math.inf
) -> dict[Pod, int]:
    """Ask verifiers how many leading tokens of a text they have cached. What they report of their capacity is noted."""
    hashes = block_hashes(tokens, tenant)
    if not hashes:
        return {}
    request = verifier_pb2.FindPrefixRequest(block_hashes=hashes)
    answers = await asyncio.gather(*(_ask(pod, request, min(most_seconds, ASK_SECONDS)) for pod in pods))
    return {pod: min(cached, len(tokens)) for pod, cached in zip(pods, answers, strict=True)}


async def _ask(pod: Pod, request: verifier_pb2.FindPrefixRequest, seconds: float) -> int:
    stub: Any = verifier_pb2_grpc.VerifierServiceStub(pod.channel)
    try:
        found = await answer_of(stub.FindPrefix, request, seconds)
    except (grpc.aio.AioRpcError, LostError):  # the session that is opened next finds out why
        return 0
    if found.HasField("capacity"):
        pod.load.report(found.capacity)
    return int(found.cached_tokens)


def preferred(cached: Mapping[Pod, int], tokens: int, tenant: str, pods: Collection[Pod]) -> dict[Pod, int]:
    """Return the verifiers that a tenant's text of so many tokens should rather go to, and what they have cached of it:
    those that have enough of it, have room, and are not much busier than all `pods` are on average."""
    sessions = 1 + sum(pod.load.sessions for pod in pods)
    most = LOAD_FACTOR * sessions / max(1, len(pods)) + SPARE_SESSIONS
    return {
        pod: known
        for pod, known in cached.items()
        if known >= LEAST_SHARE * tokens and pod.load.sessions < most and pod.admission.refusal(tenant) is None
    }
