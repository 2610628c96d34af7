"""Prefix-aware routing: finds verifiers that have a text in their prefix cache and are free enough to be preferred.

Verifiers are queried for every request: orchestrators share no state, and only a verifier knows its cache. A verifier
much busier than the others is not preferred, as in consistent hashing with bounded loads (Mirrokni, Thorup and
Zadimoghaddam, 2018).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import grpc

from orchestrator.pods.errors import LostError
from orchestrator.pods.pods import Pod
from orchestrator.pods.unary import answer_of
from specdec.decoding.block_hashes import HASHED_TOKENS
from specdec.v2 import verifier_pb2, verifier_pb2_grpc

ASK_SECONDS = 0.25
"""Timeout in seconds for an answer, which usually takes a millisecond unless the verifier is very busy. After a
timeout, nothing counts as cached."""

KNOWN_SECONDS = 1.0
"""Lifetime of an answer in seconds, for the samples of one request and their retries."""

MIN_SHARE = 0.5
"""Minimum cached share of a text that counts. A short shared prefix, such as a system prompt, must not route every text
to the verifier that saw it first."""

LOAD_FACTOR = 1.25
SPARE_SESSIONS = 2
"""Bounded load: a preferred verifier has fewer than LOAD_FACTOR x mean + SPARE_SESSIONS sessions. With few sessions,
one more hardly lengthens a step."""


class PrefixAnswers:
    """The answers of verifiers about the texts of one request. Its samples begin at the same time with the same prompt:
    one of them asks, and all use the answers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By the hash of a text's last full block, which identifies the text up to there.
        self._asking: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._known: defaultdict[int, dict[Pod, tuple[float, int]]] = defaultdict(dict)  # time and cached tokens

    async def cached_tokens(
        self, pods: Collection[Pod], hashes: Sequence[int], most_seconds: float = math.inf
    ) -> dict[Pod, int]:
        """Return the number of leading tokens that each verifier has cached of the text with these block hashes.
        Verifiers without a recent answer are asked; the capacities that they report are recorded."""
        if not hashes:
            return {}
        known = self._known[hashes[-1]]
        async with self._asking[hashes[-1]]:
            recent = self._clock() - KNOWN_SECONDS
            unknown = [pod for pod in pods if known.get(pod, (-math.inf, 0))[0] < recent]
            request = verifier_pb2.FindPrefixRequest(block_hashes=hashes)
            answers = await asyncio.gather(*(_ask(pod, request, min(most_seconds, ASK_SECONDS)) for pod in unknown))
            known |= {pod: (self._clock(), cached) for pod, cached in zip(unknown, answers, strict=True)}
        return {pod: min(known[pod][1], HASHED_TOKENS * len(hashes)) for pod in pods}


async def _ask(pod: Pod, request: verifier_pb2.FindPrefixRequest, seconds: float) -> int:
    stub: Any = verifier_pb2_grpc.VerifierServiceStub(pod.channel)
    try:
        found = await answer_of(stub.FindPrefix, request, seconds)
    except (grpc.aio.AioRpcError, LostError):  # if the pod has failed, opening a session reports why
        return 0
    if found.HasField("capacity"):
        pod.load.report(found.capacity)
    return int(found.cached_tokens)


def preferred(cached: Mapping[Pod, int], tokens: int, tenant: str, pods: Collection[Pod]) -> dict[Pod, int]:
    """Return the verifiers preferred for a tenant's text of `tokens` tokens, with their cached tokens. A preferred
    verifier has enough cached tokens, room for the tenant, and bounded load relative to the mean over `pods`."""
    sessions = 1 + sum(pod.load.sessions for pod in pods)
    most = LOAD_FACTOR * sessions / max(1, len(pods)) + SPARE_SESSIONS
    return {
        pod: known
        for pod, known in cached.items()
        if known >= MIN_SHARE * tokens and pod.load.sessions < most and pod.admission.refusal(tenant) is None
    }
