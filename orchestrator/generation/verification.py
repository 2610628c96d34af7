"""Verification: yields the commits of one text, from any verifier available.

When a verifier is lost, the text is resumed from its committed tokens, on another pod or on the same one once it is
back. Tokens are a function of the text and its sampling, so the client does not see the change.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import structlog

from orchestrator.generation.sample_context import SampleContext
from orchestrator.generation.verifier_choice import VerifierChoice
from orchestrator.generation.verifier_stream import VerifierStream
from orchestrator.pods.admission import LeftAloneError
from orchestrator.pods.errors import ForeignPodError, LostError, UnfitError
from orchestrator.pods.pods import Pod
from orchestrator.text.commit_check import CommitCheck
from specdec.serving.errors import (
    InvalidRequestError,
    ModelFailureError,
    OverloadedError,
    PromptTooLongError,
    ServiceError,
    TooLateError,
)
from specdec.v2 import model_pb2, verifier_pb2

log = structlog.get_logger()

Message = verifier_pb2.VerifyOpened | verifier_pb2.Commit | model_pb2.Heartbeat


class Verification:
    """The verification of one sample. `policy`: how its verifier speculates, until `set_policy` replaces it."""

    def __init__(self, context: SampleContext, policy: verifier_pb2.VerifyPolicy) -> None:
        self._context = context
        self._policy = policy
        self._choice = VerifierChoice(context)
        self._stream: VerifierStream | None = None  # of the verifier that has the text; None while none has it
        self._not_opened: dict[Pod, str] = {}  # why a verifier does not take the text, as last logged
        self._asked: tuple[Pod, float] | None = None  # the last verifier asked, and when
        self._begun = False  # a verifier has accepted the request and committed tokens
        self._preemptions: list[int] = []  # by session at a verifier
        self.identity = model_pb2.ModelIdentity()  # of the last one
        self.revision = context.sample.revision  # of the model; empty until the text is begun
        self.numerics_changed = False

    @property
    def preemptions(self) -> int:
        """Number of times the text was preempted, over all verifiers that had it."""
        return sum(self._preemptions)

    async def messages(self) -> AsyncGenerator[Message, None]:
        """Yield the opening answer of every verifier that takes the text; the commits in order, each once, until the
        last; and heartbeats while the text waits for its draft. A commit's tokens are in the committed text before the
        commit is yielded."""
        context, choice = self._context, self._choice
        while True:
            if context.grammar_watch is not None:
                await context.grammar_watch.clear()
            pod = await choice.next(numerics=self.identity.numerics_fingerprint, resumed=self._resumed)
            async with VerifierStream(pod, context, partial(choice.longest_step, pod)) as stream:
                try:
                    opened = await self._open(stream)
                    with pod.load.session(), pod.admission.session(context.sample.tenant):
                        yield opened
                        check = CommitCheck(context.sample, context.model, opened.identity.context_tokens)
                        async with aclosing(stream.messages()) as messages:
                            async for message in messages:
                                if isinstance(message, verifier_pb2.Commit):
                                    if problem := check.violation(message, len(context.text.generated)):
                                        raise LostError(f"invalid commit: {problem}")
                                    self._take(pod, message)
                                yield message
                    return
                except LostError as lost:
                    self._note_lost(stream, lost)
                except (OverloadedError, LeftAloneError) as error:
                    if isinstance(error, TooLateError) and stream.opened:
                        raise  # it has waited for memory in vain; another verifier would start the wait again
                    choice.refused(pod, error)
                except UnfitError as unfit:
                    if isinstance(unfit, ForeignPodError):
                        pod.found_unfit(unfit.reason, unfit.error)
                    choice.unfit(pod, unfit.error)
                except (ModelFailureError, InvalidRequestError) as error:
                    self._note_failed(pod, error)
                finally:
                    self._stream = None

    def cancelled(self) -> None:
        """Note the caller's cancellation before the text was complete."""
        if self._asked is not None:
            pod, since = self._asked
            pod.admission.cancelled.add(self._context.sample.tenant, since)

    # --- to the verifier that has the text; no-ops while none has it --------------------------------

    async def extend(self, extend: model_pb2.Extend) -> None:
        """Send candidates."""
        if self._stream is not None:
            await self._stream.extend(extend)

    async def set_policy(self, policy: verifier_pb2.VerifyPolicy) -> None:
        """Set the policy of this verifier and of all later ones."""
        self._policy = policy
        if self._stream is not None:
            await self._stream.set_policy(policy)

    async def consumed(self, tokens: int) -> None:
        """Report the number of generated tokens the client has read."""
        if self._stream is not None:
            await self._stream.consumed(tokens)

    def abort(self, error: ServiceError) -> None:
        """End the session, and the request, with this error."""
        if self._stream is not None:
            self._stream.abort(error)

    # --- sessions -----------------------------------------------------------------------------------

    @property
    def _resumed(self) -> bool:
        """True if a verifier has had the text before."""
        return self._attempt > 1

    @property
    def _pinned(self) -> str:
        """The revision that must continue the text; empty while it has no token."""
        return self.revision if self._context.text.generated else self._context.sample.revision

    @property
    def _attempt(self) -> int:
        """The number of the text's next session."""
        return len(self._preemptions) + 1

    async def _open(self, stream: VerifierStream) -> verifier_pb2.VerifyOpened:
        pod = stream.pod
        async with pod.admission.opening(self._context.sample.tenant, again=self._resumed):
            pod.breaker.attempt()
            self._asked = pod, time.monotonic()
            opened = await stream.open(self._policy, attempt=self._attempt, revision=self._pinned)
        before = self.identity.numerics_fingerprint if self._context.text.generated else ""
        self.identity = opened.identity
        self.revision = self.identity.model_fingerprint
        if before and self.identity.numerics_fingerprint != before:
            self.numerics_changed = True
            why = f"{before}, then {self.identity.numerics_fingerprint}"
            self._context.events.record("numerics_changed", pod, why)
        self._preemptions.append(0)
        self._not_opened.pop(pod, None)
        self._context.timeline.event("verifier_opened", pod=str(pod))
        self._stream = stream
        await stream.set_first_policy(self._policy)  # it may have changed since the session was opened
        return opened

    def _take(self, pod: Pod, commit: verifier_pb2.Commit) -> None:
        """Add a commit to the text."""
        self._context.text.add(commit.committed.tokens)
        self._begun = True
        self._preemptions[-1] = commit.preemptions
        self._choice.progressed()
        pod.breaker.succeeded()

    def _note_lost(self, stream: VerifierStream, lost: LostError) -> None:
        pod, why = stream.pod, str(lost)
        self._choice.lost(pod, lost)
        if lost.died:
            self._context.peers.verifiers.died(pod)
        if self._context.grammar_watch is not None:
            self._context.grammar_watch.lost(pod, lost)
        pod.breaker.failed(conclusive=lost.conclusive)
        if stream.opened:
            self._context.events.record("verifier_lost", pod, why)
        elif self._not_opened.get(pod) != why:  # retried while there is no other: log each reason once
            self._not_opened[pod] = why
            log.info("verifier_not_opened", pod=str(pod), why=why)
            self._context.timeline.event("verifier_not_opened", pod=str(pod))

    def _note_failed(self, pod: Pod, error: ServiceError) -> None:
        """Note that a verifier's model has failed on this text, or that it rejects a text begun by another one: other
        verifiers may take it. If none has begun the text, the request may really be invalid: raise the error to the
        caller."""
        if isinstance(error, InvalidRequestError) and not self._begun:
            if not isinstance(error, PromptTooLongError):
                raise error
            told = [("prompt" if field == "prompt_tokens" else field, why) for field, why in error.violations]
            self._choice.unfit(pod, PromptTooLongError(told))  # another one may have more memory
            return
        self._choice.failed(pod, error)
        self._context.events.record("verifier_lost", pod, str(error))
