"""Drafting: keeps one draft at a time working for a text, and replaces it when it fails.

A draft that is missing, unfit, useless or lost costs only speed: another replica takes over, and until one does, the
text continues without a draft. Only the CONTRASTIVE rule needs a draft.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

import structlog

from orchestrator.generation.draft_session import (
    DraftSession,
    FloodError,
    InvalidDistributionError,
    LaggingError,
    UnfedError,
    UselessError,
)
from orchestrator.generation.sample_context import SampleContext
from orchestrator.generation.speculation_policy import SpeculationState
from orchestrator.pods.backoff import Backoff
from orchestrator.pods.errors import ForeignPodError, LostError, UnfitError
from orchestrator.pods.pods import Pod, Pods
from orchestrator.text.request_timeline import FailoverReason
from specdec.serving.errors import (
    InvalidRequestError,
    ModelFailureError,
    OverloadedError,
    PeerLostError,
    ServiceError,
)
from specdec.v2 import model_pb2, verifier_pb2

log = structlog.get_logger()

USELESS_SECONDS = 60.0
"""Seconds before a text retries a useless draft. A retry prefills the whole text again, and can only pay once the text
has changed."""

MAX_FULL_SECONDS = 10.0
"""Maximum seconds for which a text avoids a draft without room. By then sessions may have ended, or another pod may
have the draft's address."""

LAPSE_SECONDS = 3.0
"""Seconds without a failure after which earlier ones no longer count. While a text waits for a draft, it fails every
second. Afterwards it may be preempted or move to another verifier, which is not the drafts' fault."""

MAX_ROUND_PAUSE_SECONDS = 1.0
"""Longest pause in seconds between two rounds over all drafts. It may be longer than for verifiers, since the text
continues meanwhile."""


class CandidateSink(Protocol):
    """Receives the output of drafting, for the text's current verifier."""

    async def extend(self, extend: model_pb2.Extend) -> None:
        """Send candidates."""

    async def set_policy(self, policy: verifier_pb2.VerifyPolicy) -> None:
        """Set the verifier's speculation policy."""

    def abort(self, error: ServiceError) -> None:
        """End the request with this error: it needs a draft and none is available, or its grammar was refused."""


class Drafting:
    """The drafting of one sample. Used as a context manager: leaving it ends the draft's session."""

    def __init__(self, context: SampleContext, sink: CandidateSink) -> None:
        peers, remote = context.peers, context.sample.speculation.remote
        self._context = context
        self._sink = sink
        self._pods = peers.drafts if remote else None
        self._backoff = Backoff(peers.failover_seconds, longest=MAX_ROUND_PAUSE_SECONDS, lapse=LAPSE_SECONDS)
        self._working: asyncio.Task[None] | None = None
        self._state = SpeculationState.initial(context)
        self._wanted = asyncio.Event()  # set while a draft may pay
        self._session: DraftSession | None = None
        self._useless_until: dict[Pod, float] = {}  # monotonic times; for this text only
        self._last_failure = "no_draft", "no pod is available"  # (reason, why) of the last draft that failed
        self._undrafted = False  # the text continues without a draft
        self._last_commit: float | None = None  # monotonic time of arrival; None: none yet from the current verifier
        self._given_up: ServiceError | None = None  # the error with which drafting has ended the request, if it has
        if self._pods is None and context.sample.needs_draft:
            self._given_up = _draft_required("there is no draft service")
        self._why_undrafted = "" if self._pods is not None else "no_draft" if remote else "off"
        self._late = False  # candidates of the draft have missed a step
        self._query: model_pb2.DraftQuery | None = None  # the verifier waits for the draft's answer (CONTRASTIVE)
        self._fed = 0  # number of sessions so far at drafts that read features
        self.undrafted_tokens = 0  # from steps that lacked the candidates expected from a draft

    @property
    def undrafted_reason(self) -> str:
        """Why the text had no draft; "late" if a draft was available, but its candidates missed steps; else empty."""
        return self._why_undrafted or ("late" if self.undrafted_tokens else "")

    async def __aenter__(self) -> Self:
        if self._pods is not None:
            self._working = asyncio.create_task(self._work(self._pods))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])  # a plain await could not distinguish the task's cancellation from ours

    def on_opened(self, opened: verifier_pb2.VerifyOpened) -> None:
        """Begin to draft for a verifier that has just opened a session with the text."""
        self._last_commit = self._query = None
        self._update(self._state.after_opened(opened))
        if self._given_up is not None:
            self._sink.abort(self._given_up)
        elif self._session is not None:
            self._session.on_opened(self._state)

    def on_commit(self, commit: verifier_pb2.Commit) -> None:
        """Pass the target's decisions to the draft, and count undrafted tokens and fallback time."""
        self._query = None
        sample = self._context.sample
        if sample.speculation.remote and not sample.needs_draft:
            # While the policy names no remote draft, every token is undrafted, and the verifier does not count them.
            tokens = commit.undrafted_tokens if self._state.drafted else len(commit.committed.tokens)
            if tokens and self._state.drafted and not self._late:
                self._late = True
                self._context.timeline.event("draft_late")
            self.undrafted_tokens += tokens
        now = time.monotonic()
        if self._last_commit is not None and (reason := self._fallback_reason(commit)):
            self._context.fallback_seconds[reason] += now - self._last_commit
        self._last_commit = now
        self._update(self._state.after_commit(commit))
        if self._session is not None and self._session.on_commit(commit):
            self._backoff.progressed()

    def on_finish(self) -> None:
        """Note that the text is complete: with its last commit, or at a stop string."""
        if self._session is not None:
            self._session.on_finish()

    def _fallback_reason(self, commit: verifier_pb2.Commit) -> str:
        """Return why the steps of a commit had no draft although the text asked for one. Empty if they had one, if
        there is no draft service, or if the text needs a draft: such a text waits instead."""
        if self._pods is None or self._context.sample.needs_draft:
            return ""
        if not self._state.drafted:
            return self._last_failure[0]
        return "late" if commit.undrafted_tokens else ""

    def on_query(self, query: model_pb2.DraftQuery) -> None:
        """Forward a verifier's query to the draft. If the draft is lost before it answers, the next one gets the
        query."""
        self._query = query
        if self._session is not None:
            self._session.on_query(query)

    def on_awaited(self) -> None:
        """Note that the verifier waits for the draft's distribution. A draft that never sends one is abandoned; until
        then the wait counts against the back-off budget, like time without a draft."""
        self._backoff.failed()
        if self._session is not None:
            self._session.on_awaited()

    def _update(self, state: SpeculationState) -> None:
        self._state = state
        if state.worth_a_draft(self._context.sample):
            self._wanted.set()
        else:
            self._wanted.clear()

    def on_features(self, features: model_pb2.Features) -> None:
        """Forward features of the text to the draft session they are for; late features for an earlier session are
        dropped."""
        if self._session is not None and features.session == self._state.features_session:
            self._session.on_features(features)

    async def _set_drafted(self, drafted: bool, overruled_logprobs: int = 0, features_session: int = 0) -> None:
        self._state = replace(
            self._state, drafted=drafted, overruled_logprobs=overruled_logprobs, features_session=features_session
        )
        await self._sink.set_policy(self._state.verify_policy(self._context))

    async def _work(self, pods: Pods) -> None:
        """Run one draft after another, each started only when it may pay: even a paused session costs an opening and a
        prefill at the draft. No failure here ends the request, unless it needs a draft or its grammar is refused."""
        tried: set[Pod] = set()  # pods tried since the last working draft or the last pause
        while self._given_up is None:
            if not self._wanted.is_set():
                await self._wanted.wait()
                tried.clear()
            if self._context.sample.needs_draft and self._backoff.exhausted:  # one useless draft after another
                self._give_up()
                return
            now = time.monotonic()
            useless = {pod for pod, until in self._useless_until.items() if until > now}
            pod = pods.choose(exclude=tried | useless | self._full(pods))
            if pod is not None:
                was_at_work = await self._draft_at(pod)
                tried = {pod} if was_at_work else {*tried, pod}
            else:
                await self._go_without(pods)
                await asyncio.sleep(self._backoff.pause())
                tried.clear()

    def _full(self, pods: Pods) -> set[Pod]:
        """Return the pods whose latest report, to any text of this process, shows no room for sessions. Empty for a
        text that needs a draft: it tries these pods anyway."""
        if self._context.sample.needs_draft:
            return set()
        return {pod for pod in pods if (reported_load := pod.load.reported) is not None and not reported_load.room}

    async def _draft_at(self, pod: Pod) -> bool:
        """Draft at this pod until the session ends; return True if it ever sent candidates."""
        if self._context.grammar_watch is not None:
            try:
                await self._context.grammar_watch.retry_if_suspect()
            except ServiceError as error:
                if isinstance(error, OverloadedError) and not self._context.sample.needs_draft:
                    self._last_failure = "no_draft", str(error)
                    return False
                self._given_up = error
                self._sink.abort(error)
                return False
        pod.breaker.attempt()
        async with DraftSession(pod, self._context, self._state) as session:
            try:
                with pod.load.session():
                    await self._relay(session)
            except Exception as error:
                self._note_end(session, error)
            finally:
                self._session = None
        return session.at_work

    async def _relay(self, session: DraftSession) -> None:
        """Open a session, and forward its candidates to the verifier."""
        # `open` sends the text committed by then. Set `_session` first, so that later commits are queued.
        self._session = session
        if self._query is not None:
            session.on_query(self._query)
        await session.open()
        self._context.timeline.event("draft_opened", pod=str(session.pod))
        if (error := session.unfed(self._state.features)) is not None:
            raise error
        if session.features is not None:
            self._fed += 1
        await self._set_drafted(True, session.overruled_logprobs, 0 if session.features is None else self._fed)
        async for extend in session.candidates():
            session.check(extend)
            if self._undrafted:
                self._undrafted = False
                self._context.timeline.failover_event("draft_back", session.pod)
            await self._sink.extend(extend)

    def _note_end(self, session: DraftSession, error: Exception) -> None:
        """Note why a session has ended, and avoid its pod for a time: for this text only, or for all."""
        pod = session.pod
        reason: FailoverReason | None = None  # of the failover event, which is recorded if the session was open
        match error:
            case ForeignPodError():
                pod.found_unfit(error.reason, error)
                return
            case UnfedError():  # the text's verifier is not set up for this draft
                self._useless_until[pod] = time.monotonic() + USELESS_SECONDS
            case UselessError():  # for this text only: the pod serves others
                self._useless_until[pod] = time.monotonic() + USELESS_SECONDS
                reason = "draft_useless"
            case LaggingError():
                # If the pod has sent no candidates to any text since then, its device may be stuck. A draft without
                # features from the verifier has nothing to guess from, so its pod is not at fault.
                if pod.candidates_at < error.waiting_since and not session.starved_since(error.waiting_since):
                    pod.breaker.failed()
                if not (session.at_work and self._context.sample.needs_draft):
                    # The draft may be late for this text alone, or busy with a long prefill, which an immediate retry
                    # would restart.
                    self._useless_until[pod] = time.monotonic() + USELESS_SECONDS
                reason = "draft_useless"
            case FloodError() | InvalidDistributionError():
                pod.found_unfit("draft_lost", error)
                reason = "draft_lost"
            case LostError():
                pod.breaker.failed(conclusive=error.conclusive)
                if error.died and self._pods is not None:
                    self._pods.died(pod)
                if self._context.grammar_watch is not None:
                    self._context.grammar_watch.lost(pod, error, verifier=False)
                reason = "draft_lost"
            case ModelFailureError() | InvalidRequestError():
                self._useless_until[pod] = math.inf
            case OverloadedError() if not self._context.sample.needs_draft:
                # For this text only, since shorter texts may still fit. A retry sends the whole text, and makes
                # the verifier expect a draft.
                self._useless_until[pod] = time.monotonic() + min(error.retry_after, MAX_FULL_SECONDS)
            case UnfitError() | ServiceError():  # the pod refuses the session
                pass
            case _:  # a bug in this service
                log.error("drafting_failed", exc_info=error)
        if reason is None or not session.opened:
            self._last_failure = "no_draft", f"{pod}: {error}"
        else:
            self._last_failure = reason, f"{pod}: {error}"
            self._context.timeline.failover_event(reason, pod, str(error))

    def _give_up(self) -> None:
        """End the request: it needs a draft."""
        reason, why = self._last_failure
        log.warning("no_draft", reason=reason, why=why)
        self._given_up = _draft_required("none is available")
        self._sink.abort(self._given_up)

    async def _go_without(self, pods: Pods) -> None:
        """Continue without a draft while none is available, unless the text needs one."""
        if pods and all(pod.unfit for pod in pods):
            self._last_failure = next(iter(pods)).unfit_reason, "; ".join(f"{pod}: {pod.unfit}" for pod in pods)
        reason, why = self._last_failure
        self._backoff.failed()
        if self._context.sample.needs_draft:
            return
        if not self._undrafted:
            self._undrafted = True
            self._why_undrafted = reason
            log.info("undrafted", reason=reason, why=why)
            self._context.timeline.event("undrafted", reason=reason)
        await self._set_drafted(False)


def _draft_required(why: str) -> ServiceError:
    return PeerLostError(f"the CONTRASTIVE rule needs a draft: {why}", "DRAFT_REQUIRED")
