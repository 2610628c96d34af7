"""Verifier choice: the next verifier for a text, the limit on retries, and the error that ends the request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

import structlog

from orchestrator.generation.sample_context import SampleContext
from orchestrator.pods.admission import LeftAloneError
from orchestrator.pods.backoff import Backoff
from orchestrator.pods.errors import LostError
from orchestrator.pods.pods import Pod
from orchestrator.pods.prefix_routing import cached_tokens, preferred
from specdec.serving.errors import (
    DeadlineError,
    GrammarPendingError,
    OverloadedError,
    PeerLostError,
    PromptTooLongError,
    ServiceError,
)

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
        self._left: Pod | None = None  # the last pod to lose the text

    async def next(self, *, numerics: str, resumed: bool) -> Pod:
        """Return the next pod to try, after a pause if all were tried; raise the client's error once nothing is left to
        try. Pods with these numerics are preferred. A `resumed` text avoids pods that have failed recently, if there
        are others: its client has seen one pause already."""
        sample = self._context.sample
        longest = min(len(sample.prompt) + sample.max_tokens, self._context.model.context)
        while True:
            cached = await self._cached()
            pod = self._pods.choose(
                but=self._tried.keys() | self._unfit.keys(),
                rather_not=() if self._left is None else (self._left,),
                numerics=numerics,
                tokens=longest,
                no_trial=resumed,
                cached=cached,
            )
            if pod is not None:
                return pod
            self._backoff.failed()
            self._despair(resumed)
            await self._pause()
            self._tried.clear()

    async def _cached(self) -> Mapping[Pod, int]:
        """Return the verifiers preferred for the text, and how many of its tokens they have cached."""
        sample, text = self._context.sample, self._context.text
        known = (pod for pod in self._pods.willing if pod.breaker.state == "closed")
        asked = [pod for pod in known if pod not in self._tried and pod not in self._unfit]
        if len(asked) < 2:
            return {}
        tokens, left = [*sample.prompt, *text.generated], self._context.timeout
        cached = await cached_tokens(asked, tokens, sample.tenant, math.inf if left is None else left)
        return preferred(cached, len(tokens), sample.tenant, self._pods.willing)

    def _despair(self, resumed: bool) -> None:
        """Raise the error that ends the request, if nothing is left to try."""
        unfit = {pod: why for pod in self._pods if isinstance(why := pod.unfit, ServiceError)} | self._unfit
        too_long = any(isinstance(why, PromptTooLongError) for why in unfit.values())
        # A pod with enough memory may be down. A text that has begun waits for it, a new request fails at once.
        begun = resumed or bool(self._context.text.generated)
        pods = self._pods.willing if too_long and not begun else self._pods
        if unfit and (self._backoff.exhausted or all(pod in unfit for pod in pods)):
            raise next(reversed(unfit.values())).with_traceback(None)  # other texts may raise the same object
        full = [error for error in self._tried.values() if isinstance(error, OverloadedError)]
        soon = any(isinstance(error, GrammarPendingError) for error in full) and not self._backoff.exhausted
        if full and not resumed and not soon:
            raise min(full, key=lambda error: error.retry_after)
        if self._backoff.exhausted:
            tried = {str(pod): str(self._answers.get(pod, "its circuit breaker is open")) for pod in self._pods}
            log.warning("no_verifier", tried=tried)
            # The client gets the addresses, set by the operator, but no words of pods: these are only logged.
            told = ", ".join(f"{pod} ({_kind(self._answers.get(pod))})" for pod in self._pods) or "no address is known"
            raise PeerLostError(
                f"verifier: none available within {self._backoff.budget:g} s; tried {told}", "VERIFIER_LOST"
            )

    async def _pause(self) -> None:
        pause, left = self._backoff.pause(), self._context.timeout
        await asyncio.sleep(pause if left is None else min(pause, left))
        if left is not None and left <= pause:
            raise DeadlineError("verifier: none available before the deadline")

    def longest_step(self, pod: Pod) -> float:
        """Return the seconds a step of this pod may always take. If no other pod could take the text, waiting for a
        long step is best: this pod has the whole text in memory, and any retry would prefill it again."""
        elsewhere = any(other is not pod and other not in self._unfit for other in self._pods.willing)
        return self._context.peers.stuck_seconds if elsewhere else self._backoff.budget

    def progressed(self) -> None:
        """Note that the text has grown: every fit pod may be asked again."""
        self._backoff.progressed()
        self._tried.clear()
        self._answers.clear()

    def refused(self, pod: Pod, error: Exception) -> None:
        """Skip this pod until the next pause."""
        self._tried[pod] = self._answers[pod] = error

    def lost(self, pod: Pod, error: Exception) -> None:
        """Skip this pod until the next pause, and rank it last afterwards."""
        self._left = pod
        self._tried[pod] = self._answers[pod] = error

    def unfit(self, pod: Pod, error: ServiceError) -> None:
        """Never ask this pod again; if no other is available, `error` ends the request."""
        self._unfit[pod] = error

    def failed(self, pod: Pod, error: ServiceError) -> None:
        """Never ask this pod again: it had the text and cannot continue it."""
        self._left = pod
        self._unfit[pod] = error


def _kind(answer: Exception | None) -> str:
    """Describe a pod's answer without repeating the pod's words."""
    match answer:
        case None | LeftAloneError():
            return "avoided after failures"
        case GrammarPendingError():
            return "compiles the grammar"
        case OverloadedError():
            return "no room"
        case LostError(conclusive=True):
            return "not reachable"
        case _:
            return "session lost"
