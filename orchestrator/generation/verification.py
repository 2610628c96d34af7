"""Verification: yields the commits of one text, from any verifier available.

When a verifier is lost, the text is resumed from its committed tokens, on another pod or on the same one once it is
back. Under COUPLED, on verifiers with equal numerics, the client gets the same tokens as without the change.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial

import structlog

from orchestrator.generation.sample_context import SampleContext
from orchestrator.generation.speculation_policy import SpeculationState
from orchestrator.generation.verifier_stream import VerifierStream
from orchestrator.pods.admission import LeftAloneError
from orchestrator.pods.backoff import Backoff
from orchestrator.pods.errors import ForeignPodError, LostError, UnfitError
from orchestrator.pods.pods import Pod
from orchestrator.pods.prefix_routing import preferred
from orchestrator.text.message_check import MessageCheck
from specdec.serving.errors import (
    DeadlineError,
    GrammarPendingError,
    InvalidRequestError,
    ModelFailureError,
    OverloadedError,
    PeerLostError,
    PromptTooLongError,
    ServiceError,
    TooLateError,
)
from specdec.v2 import model_pb2, verifier_pb2

log = structlog.get_logger()


class VerifierChoice:
    """The choice of verifiers for one sample."""

    def __init__(self, context: SampleContext) -> None:
        self._context = context
        self._pods = context.peers.verifiers
        self._backoff = Backoff(context.peers.failover_seconds)
        self._tried: dict[Pod, Exception] = {}  # pods tried since the last progress or pause
        self._answers: dict[Pod, Exception] = {}  # latest answer of each pod tried since the last progress
        self._unfit: dict[Pod, ServiceError] = {}  # pods that serve something else, or have failed on this text
        self._last_lost: Pod | None = None  # the last pod to lose the text

    async def next(self, *, numerics: str, resumed: bool) -> Pod:
        """Return the next pod to try, after a pause if all were tried; raise the error for the client once no pod is
        left. Pods with these numerics are preferred. A `resumed` text avoids pods that have failed recently, if there
        are others: its client has seen one pause already."""
        sample = self._context.sample
        longest = min(len(sample.prompt) + sample.max_tokens, self._context.model.context)
        while True:
            cached = await self._cached()
            pod = self._pods.choose(
                exclude=self._tried.keys() | self._unfit.keys(),
                avoid=() if self._last_lost is None else (self._last_lost,),
                numerics=numerics,
                tokens=longest,
                no_trial=resumed,
                cached=cached,
            )
            if pod is not None:
                return pod
            self._backoff.failed()
            self._raise_if_nothing_left(resumed)
            await self._pause()
            self._tried.clear()

    async def _cached(self) -> Mapping[Pod, int]:
        """Return the verifiers preferred for the text, and how many of its tokens they have cached."""
        sample, text = self._context.sample, self._context.text
        known = (pod for pod in self._pods.willing if pod.breaker.state == "closed")
        asked = [pod for pod in known if pod not in self._tried and pod not in self._unfit]
        if len(asked) < 2 or text.unscored:  # a prompt is scored without the cache
            return {}
        left = self._context.timeout
        prefixes = self._context.prefixes
        cached = await prefixes.cached_tokens(asked, text.block_hashes, math.inf if left is None else left)
        tokens = len(sample.prompt) + len(text.generated)
        return preferred(cached, tokens, sample.tenant, self._pods.willing)

    def _raise_if_nothing_left(self, resumed: bool) -> None:
        """Raise the error that ends the request, if every pod is unfit, if a pod is full and the text is new, or if the
        back-off budget is used up."""
        unfit = {pod: why for pod in self._pods if isinstance(why := pod.unfit, ServiceError)} | self._unfit
        too_long = any(isinstance(why, PromptTooLongError) for why in unfit.values())
        # A pod with enough memory may be down. A text that has begun waits for it, a new request fails immediately.
        begun = resumed or self._context.text.begun
        pods = self._pods.willing if too_long and not begun else self._pods
        if unfit and all(pod in unfit for pod in pods):
            raise next(reversed(unfit.values())).with_traceback(None)  # other texts may raise the same object
        # These refusals are permanent: another orchestrator would get them, too.
        permanent = [why for why in self._unfit.values() if isinstance(why, PromptTooLongError | PeerLostError)]
        if permanent and self._backoff.exhausted:
            raise permanent[-1]
        full = [error for error in self._tried.values() if isinstance(error, OverloadedError)]
        soon = any(isinstance(error, GrammarPendingError) for error in full) and not self._backoff.exhausted
        if full and not resumed and not soon:
            raise min(full, key=lambda error: error.retry_after)
        if self._backoff.exhausted:
            answers = {pod: unfit.get(pod) or self._answers.get(pod) for pod in self._pods}
            tried = {str(pod): str(answer or "its circuit breaker is open") for pod, answer in answers.items()}
            log.warning("no_verifier", tried=tried)
            # The client gets the addresses, which the operator chose, but no text from pods: that is only logged.
            told = ", ".join(f"{pod} ({_kind(answer)})" for pod, answer in answers.items()) or "no address is known"
            raise PeerLostError(
                f"verifier: none available within {self._backoff.budget:g} s; tried {told}", "VERIFIER_LOST"
            )

    async def _pause(self) -> None:
        pause, left = self._backoff.pause(), self._context.timeout
        await asyncio.sleep(pause if left is None else min(pause, left))
        if left is not None and left <= pause:
            raise DeadlineError("verifier: none available before the deadline")

    def longest_step(self, pod: Pod) -> float:
        """Return the minimum age in seconds of a step that counts as stuck at this pod. If no other pod could take the
        text, waiting is best: this pod has the whole text in memory, and any retry would prefill it again."""
        elsewhere = any(other is not pod and other not in self._unfit for other in self._pods.willing)
        return self._context.peers.stuck_seconds if elsewhere else self._backoff.budget

    def progressed(self) -> None:
        """Note that the text has grown: every fit pod may be asked again."""
        self._backoff.progressed()
        self._tried.clear()
        self._answers.clear()

    def skip(self, pod: Pod, error: Exception, *, lost: bool = False) -> None:
        """Skip this pod until the next pause, and rank it last afterwards if it has `lost` the text."""
        self._tried[pod] = self._answers[pod] = error
        if lost:
            self._last_lost = pod

    def exclude(self, pod: Pod, error: ServiceError) -> None:
        """Never ask this pod again; if no other is available, `error` ends the request."""
        self._unfit[pod] = error


def _kind(answer: Exception | None) -> str:
    """Describe a pod's answer without repeating the pod's words."""
    match answer:
        case None | LeftAloneError():
            return "avoided after failures"
        case GrammarPendingError():
            return "compiling the grammar"
        case OverloadedError():
            return "no room"
        case LostError(conclusive=True):
            return "not reachable"
        case ServiceError():
            return "cannot take the text"
        case _:
            return "session lost"


Message = (
    verifier_pb2.VerifyOpened
    | verifier_pb2.PromptLogprobs
    | verifier_pb2.Commit
    | model_pb2.DraftQuery
    | model_pb2.Features
    | model_pb2.Heartbeat
)


class Verification:
    """The verification of one sample, and the sink of its drafting."""

    def __init__(self, context: SampleContext) -> None:
        self._context = context
        self._policy = SpeculationState.initial(context).verify_policy(context)  # until `Drafting` sets another
        self._choice = VerifierChoice(context)
        self._stream: VerifierStream | None = None  # of the verifier that has the text; None while none has it
        self._not_opened: dict[Pod, str] = {}  # last logged reason why a verifier does not take the text
        self._asked: tuple[Pod, float] | None = None  # the last verifier asked, and when
        self._abort_error: ServiceError | None = None  # passed to `abort`
        self._begun = False  # a verifier has accepted the request and sent results
        self._refused = False  # a verifier has called the request invalid
        self._preemptions: list[int] = []  # number of preemptions in each session at a verifier
        self.identity = model_pb2.ModelIdentity()  # of the last verifier
        self.model_fingerprint = context.sample.model_fingerprint  # the request's, then the last verifier's
        self._numerics = ""  # fingerprint, of the text so far; empty before its first token
        self.numerics_changed = False

    @property
    def preemptions(self) -> int:
        """Number of times the text was preempted, over all verifiers that had it."""
        return sum(self._preemptions)

    async def messages(self) -> AsyncGenerator[Message, None]:
        """Yield the opening answer of every verifier that takes the text, the prompt's log-probabilities if requested,
        then all commits. Log-probabilities and commits come in order, each once. If the text needs a draft, also yield
        queries to the draft, and heartbeats while the text waits for it. If its draft reads features, also yield
        these. A commit's tokens are in the committed text before the commit is yielded."""
        context, choice = self._context, self._choice
        while True:
            if context.grammar_watch is not None:
                await context.grammar_watch.retry_if_suspect()
            pod = await choice.next(numerics=self._numerics, resumed=self._resumed)
            async with VerifierStream(pod, context, partial(choice.longest_step, pod)) as stream:
                try:
                    opened = await self._open(stream)
                    with pod.load.session(), pod.admission.session(context.sample.tenant):
                        yield opened
                        if context.text.unscored == 1 and not context.text.scored:  # a single token has no logprob
                            context.text.scored = 1
                            yield verifier_pb2.PromptLogprobs(first=1)
                        check = MessageCheck(
                            context.sample, context.model, opened.identity.context_tokens, context.keepers
                        )
                        async with aclosing(stream.messages()) as messages:
                            async for message in messages:
                                if problem := check.problem(message, context.text):
                                    raise LostError(problem)
                                if isinstance(message, verifier_pb2.Commit):
                                    self._add_commit(pod, message)
                                elif isinstance(message, verifier_pb2.PromptLogprobs):
                                    self._add_scores(pod, message)
                                yield message
                    return
                except Exception as error:
                    self._note_end(stream, error)
                finally:
                    self._stream = None

    def cancelled(self) -> None:
        """Note that the caller has cancelled before the text was complete."""
        if self._asked is not None:
            pod, since = self._asked
            pod.admission.cancelled.add(self._context.sample.tenant, since)

    # --- to the verifier that has the text, if any --------------------------------------------------

    async def extend(self, extend: model_pb2.Extend) -> None:
        if self._stream is not None:
            await self._stream.extend(extend)

    async def set_policy(self, policy: verifier_pb2.VerifyPolicy) -> None:
        """Set the policy of this verifier and of all later ones."""
        self._policy = policy
        if self._stream is not None:
            await self._stream.set_policy(policy)

    async def consumed(self) -> None:
        """Report that the client has read the text so far."""
        if self._stream is not None:
            await self._stream.consumed()

    def abort(self, error: ServiceError) -> None:
        """End the session, and the request, with this error."""
        if self._stream is not None:
            self._abort_error = error
            self._stream.abort(error)

    # --- sessions -----------------------------------------------------------------------------------

    @property
    def _resumed(self) -> bool:
        """True if a verifier has had the text before."""
        return self._attempt > 1

    @property
    def _pinned(self) -> str:
        """Fingerprint of the model that must continue the text. Before the text is begun: the request's, or empty."""
        return self.model_fingerprint if self._context.text.begun else self._context.sample.model_fingerprint

    @property
    def _attempt(self) -> int:
        """The number of the text's next session."""
        return len(self._preemptions) + 1

    async def _open(self, stream: VerifierStream) -> verifier_pb2.VerifyOpened:
        pod = stream.pod
        async with pod.admission.opening(self._context.sample.tenant, again=self._resumed):
            pod.breaker.attempt()
            self._asked = pod, time.monotonic()
            try:
                opened = await stream.open(self._policy, attempt=self._attempt, model_fingerprint=self._pinned)
            except (OverloadedError, InvalidRequestError, UnfitError):
                pod.breaker.answered()
                raise
        self.identity = opened.identity
        self.model_fingerprint = self.identity.model_fingerprint
        self._preemptions.append(0)
        self._not_opened.pop(pod, None)
        self._context.timeline.event("verifier_opened", pod=str(pod))
        self._stream = stream
        await stream.set_first_policy(self._policy)  # it may have changed since the session was opened
        return opened

    def _add_commit(self, pod: Pod, commit: verifier_pb2.Commit) -> None:
        self._context.text.add(commit.committed.tokens)
        self._preemptions[-1] = commit.preemptions
        self._progressed(pod)

    def _add_scores(self, pod: Pod, scores: verifier_pb2.PromptLogprobs) -> None:
        """Note log-probabilities of further prompt tokens."""
        self._context.text.scored = scores.first + len(scores.logprobs)
        self._progressed(pod)

    def _progressed(self, pod: Pod) -> None:
        self._begun = True
        before, self._numerics = self._numerics, self.identity.numerics_fingerprint
        if before and self._numerics != before:
            self.numerics_changed = True
            self._context.timeline.failover_event("numerics_changed", pod, f"{before}, then {self._numerics}")
        self._choice.progressed()
        if self._stream is not None and self._stream.is_current:
            pod.breaker.succeeded()

    def _note_end(self, stream: VerifierStream, error: Exception) -> None:
        """Note why a session has ended before the text was complete. Also raise the error if it ends the request."""
        pod = stream.pod
        if error is self._abort_error:
            raise error
        match error:
            case LostError():
                self._note_lost(stream, error)
            case TooLateError() if stream.opened:
                raise error  # the text has waited for memory in vain; another verifier would start the wait again
            case OverloadedError() | LeftAloneError():
                self._choice.skip(pod, error)
            case UnfitError():
                if isinstance(error, ForeignPodError):
                    pod.found_unfit(error.reason, error.error)
                self._choice.exclude(pod, error.error)
            case ModelFailureError():
                self._note_failed(pod, error)
            case InvalidRequestError():
                self._note_failed(pod, self._as_of_request(error))
            case _:
                raise error

    def _note_lost(self, stream: VerifierStream, lost: LostError) -> None:
        pod, why = stream.pod, str(lost)
        self._choice.skip(pod, lost, lost=True)
        if self._context.grammar_watch is not None:
            self._context.grammar_watch.lost(pod, lost, verifier=True)
        if stream.is_current:  # otherwise the pod may have restarted since
            if lost.died:
                self._context.peers.verifiers.died(pod)
            pod.breaker.failed(conclusive=lost.conclusive)
        if stream.opened:
            self._context.timeline.failover_event("verifier_lost", pod, why)
        elif self._not_opened.get(pod) != why:  # the pod is retried while there is no other: log each reason once
            self._not_opened[pod] = why
            log.info("verifier_not_opened", pod=str(pod), why=why)
            self._context.timeline.event("verifier_not_opened", pod=str(pod))

    def _note_failed(self, pod: Pod, error: ServiceError) -> None:
        """Exclude a verifier that failed on this text or refused it: others may take it. But until a verifier has begun
        the text, the request itself may be invalid. The first such refusal is retried at any verifier, since the
        opening may have been corrupted in transit together with its checksum; the second is raised."""
        refused = isinstance(error, InvalidRequestError) and not self._begun
        if refused and not isinstance(error, PromptTooLongError):  # another verifier may have more memory
            if self._refused:
                raise error
            self._refused = True
            log.info("request_refused", pod=str(pod), why=str(error))
            return
        self._choice.exclude(pod, error)
        if not refused:
            self._context.timeline.failover_event("verifier_lost", pod, str(error))

    def _as_of_request(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return a verifier's error with the request's fields in place of those of the session's opening."""
        fields, sample = {"prompt_tokens": "prompt"}, self._context.sample
        if sample.grammar is not None:
            fields[f"grammar.{sample.grammar.WhichOneof('kind')}"] = sample.grammar_field
        return type(error)([(fields.get(field, field), problem) for field, problem in error.violations])
