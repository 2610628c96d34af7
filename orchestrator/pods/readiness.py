"""Readiness: requests can be served here if a verifier is reachable.

Sessions report on their pods while they run. Otherwise the last verifier to answer is polled every second, and all
others only if it fails.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.pods.errors import LostError, UnfitError, check_verifier
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pod
from orchestrator.pods.unary import answer_of
from orchestrator.requests.model import ServedModel
from specdec.serving.periodic import Periodic
from specdec.v2 import verifier_pb2, verifier_pb2_grpc

log = structlog.get_logger()

LOOK_SECONDS = 1.0
"""Interval in seconds between polls: soon enough for waiting clients, at a negligible cost to the verifier."""

MAX_FINGERPRINTS = 64
"""Number of remembered fingerprints: a revision's verifiers share one, which changes with an update."""

VERIFIER = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name


class Readiness:
    """The readiness of one revision: true from the first reachable verifier until none has been reachable for
    `failover_seconds`. In a shorter outage requests wait, and are served afterwards."""

    def __init__(
        self,
        peers: Peers,
        model: ServedModel,
        *,
        look_seconds: float = LOOK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers = peers
        self._model = model
        self._clock = clock
        self._reached: Pod | None = None  # found by the last poll
        self._lost_at: float | None = None  # time of the first poll without a reachable verifier
        self._fit: set[Pod] = set()  # verifiers that serve our model, as of their last answer
        self._fingerprints: OrderedDict[str, None] = OrderedDict()  # of models recently seen at verifiers
        self._tried: dict[str, str] | None = None  # problem of each verifier, as last logged
        self._watching = Periodic(self._look, look_seconds, "look_failed")

    @property
    def ready(self) -> bool:
        """True while requests can be served, and for `failover_seconds` after an outage began."""
        if self._reached is not None:
            return True
        return self._lost_at is not None and self._clock() - self._lost_at < self._peers.failover_seconds

    @property
    def reaches_verifier(self) -> bool:
        return self._reached is not None

    def served(self, fingerprint: str) -> None:
        """Note that a verifier serves a model with this fingerprint."""
        self._fingerprints[fingerprint] = None
        self._fingerprints.move_to_end(fingerprint)
        if len(self._fingerprints) > MAX_FINGERPRINTS:
            self._fingerprints.popitem(last=False)

    def knows(self, fingerprint: str) -> bool:
        """Return True if a verifier has recently served a model with this fingerprint."""
        return fingerprint in self._fingerprints

    async def start(self) -> None:
        """Poll once, then start polling in the background."""
        await self._look()
        self._watching.start()

    async def close(self) -> None:
        await self._watching.close()

    async def _look(self) -> None:
        before, tried = self._reached, dict[str, str]()
        self._reached = await self._reachable(tried)
        self._fit &= set(self._peers.verifiers)
        if self._reached is not None:
            if before is None:
                log.info("verifier_reached", pod=str(self._reached))
            self._tried = None
            return
        if before is not None:
            self._lost_at = self._clock()
        if tried != self._tried:
            self._tried = tried
            log.warning("no_verifier_reached", tried=tried)

    async def _reachable(self, tried: dict[str, str]) -> Pod | None:
        """Return a reachable verifier; put the problems of those that were asked in vain into `tried`, by address."""
        pods = list(self._peers.verifiers)
        for pod in pods:
            if pod in self._fit and pod.load.reported is not None:  # heard from just now, by a session or for a prefix
                return pod
        last = [pod for pod in pods if pod is self._reached]
        for asked in (last, [pod for pod in pods if pod not in last]):
            refusals = await asyncio.gather(*map(self._refusal, asked))
            for pod, refusal in zip(asked, refusals, strict=True):
                if refusal is None:
                    return pod
                tried[str(pod)] = refusal
        return None

    async def _refusal(self, pod: Pod) -> str | None:
        """Ask a verifier whether it is serving. The first time, and after each failure, also check its model. Return
        the problem; None if there is none."""
        try:
            await self._check(pod)
        except grpc.aio.AioRpcError as error:
            no_verifier = error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)
            why = f"is not a verifier of {VERIFIER.rpartition('.')[0]}" if no_verifier else error.code().name
        except (LostError, UnfitError) as error:
            why = str(error)
        else:
            return None
        self._fit.discard(pod)
        return why

    async def _check(self, pod: Pod) -> None:
        seconds = self._peers.silence_seconds
        asked = health_pb2.HealthCheckRequest(service=VERIFIER)
        answer = await answer_of(health_pb2_grpc.HealthStub(pod.channel).Check, asked, seconds)
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise LostError("is NOT_SERVING")
        if pod not in self._fit:
            stub: Any = verifier_pb2_grpc.VerifierServiceStub(pod.channel)
            stats = await answer_of(stub.GetStats, verifier_pb2.GetStatsRequest(), seconds)
            check_verifier(stats.identity, self._model)
            self._fit.add(pod)
            pod.context_tokens = stats.identity.context_tokens
            self.served(stats.identity.model_fingerprint)
