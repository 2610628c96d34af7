"""Verification: yields the commits of one text, from whichever verifier is there to make them.

A verifier that is lost is replaced: the text is resumed from its committed tokens, on another pod or on the same one
when it comes back. Tokens are a function of the text and its sampling, so the change does not show in them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial

import structlog

from orchestrator.admission import LeftAloneError
from orchestrator.backoff import Backoff
from orchestrator.commit_check import CommitCheck
from orchestrator.drafting import Drafting
from orchestrator.failover_events import FailoverEvents
from orchestrator.peer_stream import LostError, UnfitError
from orchestrator.peers import Peers
from orchestrator.pods import Pod
from orchestrator.request import Model, Sample
from orchestrator.transcript import Transcript
from orchestrator.verifier_stream import VerifierStream
from specdec.serving.errors import (
    DeadlineError,
    InvalidRequestError,
    ModelFailureError,
    OverloadedError,
    PeerLostError,
    ServiceError,
)
from specdec.v2 import model_pb2, verifier_pb2

log = structlog.get_logger()

CONSUMED_EVERY = 64
"""Tokens between two reports to the verifier of how far the client has read."""


class Verification:
    """The verification of one sample."""

    def __init__(
        self,
        sample: Sample,
        model: Model,
        peers: Peers,
        transcript: Transcript,
        drafting: Drafting,
        events: FailoverEvents,
        deadline: float | None,
    ) -> None:
        self._sample = sample
        self._model = model
        self._pods = peers.verifiers
        self._silence = peers.silence_seconds
        self._stuck_seconds = peers.stuck_seconds
        self._transcript = transcript
        self._drafting = drafting
        self._events = events
        self._deadline = deadline
        self._backoff = Backoff(peers.failover_seconds)
        self._attempt = 1  # number of the text's next session
        self._tried: dict[Pod, Exception] = {}  # pods tried since the last progress or pause
        self._unfit: dict[Pod, ServiceError] = {}  # pods that serve something else, or have failed on this text
        self._begun = False  # a verifier has found the text valid, and committed tokens
        self._lost: Pod | None = None  # the last pod that was lost
        self.identity = model_pb2.ModelIdentity()  # of the verifier that has the text
        self.revision = sample.revision  # of the model; empty until the text is begun
        self.numerics_changed = False
        self._preemptions = [0]  # by each verifier

    async def commits(self) -> AsyncGenerator[verifier_pb2.Commit, None]:
        """Yield commits in order, each once, until the last. Asking for the next one says that the client has read this
        one, or will read it with the next."""
        while True:
            pod = await self._next_pod()
            longest_step = partial(self._longest_step, pod)
            async with VerifierStream(pod, self._timeout(), self._silence, longest_step) as stream:
                try:
                    await self._open(stream)
                    with pod.load.session():
                        reported = self._transcript.base
                        check = CommitCheck(self._sample, self._model, stream.identity.context_tokens)
                        async for commit in stream.commits():
                            if problem := check.violation(commit, len(self._transcript.generated)):
                                raise LostError(f"a commit makes no sense: {problem}")
                            self._progressed(pod, commit)
                            yield commit
                            if self._transcript.base - reported >= CONSUMED_EVERY:
                                reported = self._transcript.base
                                await stream.consumed(len(self._transcript.generated))
                    return
                except LostError as lost:
                    self._note_lost(stream, lost)
                except (OverloadedError, LeftAloneError) as error:
                    self._tried[pod] = error
                except UnfitError as unfit:
                    self._unfit[pod] = unfit.error
                except (ModelFailureError, InvalidRequestError) as error:
                    self._note_failed(stream, error)

    def _longest_step(self, pod: Pod) -> float:
        """Return the seconds that a step may last in any case. Where no other pod could take the text, it is better to
        wait for a long step: the verifier has all of the text in memory, and would have to begin anew."""
        elsewhere = any(other is not pod and other not in self._unfit for other in self._pods.willing)
        return self._stuck_seconds if elsewhere else self._backoff.budget

    async def _next_pod(self) -> Pod:
        """Return the next pod: at once if there is one that was not tried, else after a pause. Raise the client's error
        if there is no hope."""
        while True:
            rather_not = () if self._lost is None else (self._lost,)
            pod = self._pods.choose(
                but=self._tried.keys() | self._unfit.keys(),
                rather_not=rather_not,
                numerics=self.identity.numerics_fingerprint,
                no_trial=self._attempt > 1,  # the client has seen one pause: that is enough
            )
            if pod is not None:
                return pod
            self._backoff.failed()
            self._despair()
            await self._pause()
            self._tried.clear()

    def _despair(self) -> None:
        """Raise the error that ends the request, if nothing is left to be tried."""
        if self._unfit and (self._backoff.exhausted or all(pod in self._unfit for pod in self._pods)):
            raise next(reversed(self._unfit.values()))
        full = [error for error in self._tried.values() if isinstance(error, OverloadedError)]
        if full and self._attempt == 1:
            raise min(full, key=lambda error: error.retry_after)
        if self._backoff.exhausted:
            tried = {str(pod): str(self._tried.get(pod, "left alone after failures")) for pod in self._pods}
            log.warning("no_verifier", tried=tried)
            raise PeerLostError(f"verifier: none within {self._backoff.budget:g} s", "VERIFIER_LOST")

    async def _pause(self) -> None:
        pause, left = self._backoff.pause(), self._timeout()
        await asyncio.sleep(pause if left is None else min(pause, left))
        if left is not None and left <= pause:
            raise DeadlineError("verifier: none before the deadline")

    async def _open(self, stream: VerifierStream) -> None:
        pod = stream.pod
        async with pod.admission.opening(again=self._attempt > 1):
            pod.breaker.attempt()
            await stream.open(
                self._sample,
                self._transcript.generated,
                self._model,
                self._drafting.policy,
                attempt=self._attempt,
                revision=self.revision,
            )
        before, self.identity = self.identity.numerics_fingerprint, stream.identity
        self.revision = stream.identity.model_fingerprint
        if before and stream.identity.numerics_fingerprint != before:
            self.numerics_changed = True
            self._events.record("numerics_changed", pod, f"{before}, then {stream.identity.numerics_fingerprint}")
        self._attempt += 1
        self._preemptions.append(0)
        await self._drafting.serve(stream)

    @property
    def preemptions(self) -> int:
        """Times the text lost its memory to another, over all verifiers that had it."""
        return sum(self._preemptions)

    def _progressed(self, pod: Pod, commit: verifier_pb2.Commit) -> None:
        self._begun = True
        self._preemptions[-1] = commit.preemptions
        pod.breaker.succeeded()
        self._backoff.progressed()
        self._tried.clear()

    def _note_lost(self, stream: VerifierStream, lost: LostError) -> None:
        pod = self._lost = stream.pod
        self._tried[pod] = lost
        pod.breaker.failed(conclusive=lost.conclusive)
        if stream.opened:
            self._events.record("verifier_lost", pod, str(lost))
        else:
            log.info("verifier_not_opened", pod=str(pod), why=str(lost))

    def _note_failed(self, stream: VerifierStream, error: ServiceError) -> None:
        """Note that a verifier's model has failed on this text, or that it finds invalid what another one has begun:
        other verifiers may not. A request that no verifier has begun may really be invalid: its caller gets the
        error."""
        if isinstance(error, InvalidRequestError) and not self._begun:
            raise error
        self._lost = stream.pod
        self._unfit[stream.pod] = error
        self._events.record("verifier_lost", stream.pod, str(error))

    def _timeout(self) -> float | None:
        """Return the seconds left of the caller's deadline, which gRPC does not pass on by itself."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
