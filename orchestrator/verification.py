"""Verification: yields the commits of one text, from whichever verifier is there to make them.

A verifier that is lost is replaced: the text is resumed from its committed tokens, on another pod or on the same one
when it comes back. Tokens are a function of the text and its sampling, so the change does not show in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

import structlog

from orchestrator.admission import LeftAloneError
from orchestrator.backoff import Backoff
from orchestrator.commit_check import CommitCheck
from orchestrator.peer_stream import LostError, UnfitError
from orchestrator.pods import Pod
from orchestrator.sample_context import SampleContext
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

Message = verifier_pb2.VerifyOpened | verifier_pb2.Commit


class Verification:
    """The verification of one sample. `policy`: how its verifier speculates, until `set_policy` says otherwise."""

    def __init__(self, context: SampleContext, policy: verifier_pb2.VerifyPolicy) -> None:
        self._context = context
        self._pods = context.peers.verifiers
        self._policy = policy
        self._stream: VerifierStream | None = None  # of the verifier that has the text; None while none has it
        self._backoff = Backoff(context.peers.failover_seconds)
        self._attempt = 1  # number of the text's next session
        self._tried: dict[Pod, Exception] = {}  # pods tried since the last progress or pause
        self._unfit: dict[Pod, ServiceError] = {}  # pods that serve something else, or have failed on this text
        self._begun = False  # a verifier has found the text valid, and committed tokens
        self._lost: Pod | None = None  # the last pod that was lost
        self.identity = model_pb2.ModelIdentity()  # of the verifier that has the text
        self.revision = context.sample.revision  # of the model; empty until the text is begun
        self.numerics_changed = False
        self._preemptions: list[int] = []  # by each verifier

    async def messages(self) -> AsyncGenerator[Message, None]:
        """Yield the answer of every verifier that takes the text, and commits in order, each once, until the last. What
        a commit adds is in the committed text when the commit is yielded."""
        while True:
            pod = await self._next_pod()
            async with VerifierStream(pod, self._context, partial(self._longest_step, pod)) as stream:
                try:
                    opened = await self._open(stream)
                    with pod.load.session():
                        yield opened
                        check = CommitCheck(self._context.sample, self._context.model, opened.identity.context_tokens)
                        async for commit in stream.commits():
                            if problem := check.violation(commit, len(self._context.text.generated)):
                                raise LostError(f"a commit makes no sense: {problem}")
                            self._take(pod, commit)
                            yield commit
                    return
                except LostError as lost:
                    self._note_lost(stream, lost)
                except (OverloadedError, LeftAloneError) as error:
                    self._tried[pod] = error
                except UnfitError as unfit:
                    self._unfit[pod] = unfit.error
                except (ModelFailureError, InvalidRequestError) as error:
                    self._note_failed(stream, error)
                finally:
                    self._stream = None

    # --- for whichever verifier has the text; nothing happens while none has it ---------------------

    async def extend(self, extend: model_pb2.Extend) -> None:
        """Send it candidates."""
        if self._stream is not None:
            await self._stream.extend(extend)

    async def set_policy(self, policy: verifier_pb2.VerifyPolicy) -> None:
        """Have it speculate by this policy from now on, and all that come after it."""
        self._policy = policy
        if self._stream is not None:
            await self._stream.set_policy(policy)

    async def consumed(self, tokens: int) -> None:
        """Let it know that the client has read so many generated tokens."""
        if self._stream is not None:
            await self._stream.consumed(tokens)

    def abort(self, error: ServiceError) -> None:
        """End its session, and with this error the request."""
        if self._stream is not None:
            self._stream.abort(error)

    # --- finding one --------------------------------------------------------------------------------

    def _longest_step(self, pod: Pod) -> float:
        """Return the seconds that a step may last in any case. Where no other pod could take the text, it is better to
        wait for a long step: the verifier has all of the text in memory, and would have to begin anew."""
        elsewhere = any(other is not pod and other not in self._unfit for other in self._pods.willing)
        return self._context.peers.stuck_seconds if elsewhere else self._backoff.budget

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
        pause, left = self._backoff.pause(), self._context.timeout
        await asyncio.sleep(pause if left is None else min(pause, left))
        if left is not None and left <= pause:
            raise DeadlineError("verifier: none before the deadline")

    async def _open(self, stream: VerifierStream) -> verifier_pb2.VerifyOpened:
        pod = stream.pod
        async with pod.admission.opening(again=self._attempt > 1):
            pod.breaker.attempt()
            opened = await stream.open(self._policy, attempt=self._attempt, revision=self.revision)
        before, self.identity = self.identity.numerics_fingerprint, opened.identity
        self.revision = self.identity.model_fingerprint
        if before and self.identity.numerics_fingerprint != before:
            self.numerics_changed = True
            why = f"{before}, then {self.identity.numerics_fingerprint}"
            self._context.events.record("numerics_changed", pod, why)
        self._attempt += 1
        self._preemptions.append(0)
        self._stream = stream
        await stream.set_policy(self._policy)  # it may have changed since the session was opened
        return opened

    @property
    def preemptions(self) -> int:
        """Times the text lost its memory to another, over all verifiers that had it."""
        return sum(self._preemptions)

    def _take(self, pod: Pod, commit: verifier_pb2.Commit) -> None:
        """Add a commit to the text."""
        self._context.text.add(commit.committed.tokens)
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
            self._context.events.record("verifier_lost", pod, str(lost))
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
        self._context.events.record("verifier_lost", stream.pod, str(error))
