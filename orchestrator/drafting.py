"""Drafting: keeps a draft at work beside a text, for as long as one can be had.

The draft receives what the target decides, and its candidates go to the verifier. A draft that is missing, unfit,
useless or lost costs speed, nothing else: another replica takes over, and while there is none, the text goes on without
a draft. Only the CONTRASTIVE rule cannot do without one.
"""

from __future__ import annotations

import asyncio
import math
import time
from types import TracebackType
from typing import Protocol, Self

import structlog

from orchestrator.backoff import Backoff
from orchestrator.candidate_flow import CandidateFlow
from orchestrator.draft_control import DraftControl, first_min_probability
from orchestrator.draft_stream import DraftStream
from orchestrator.failover_events import FailoverReason
from orchestrator.peer_stream import LostError, OtherTokenizerError
from orchestrator.pods import Pod
from orchestrator.sample_context import SampleContext
from specdec.decoding.sampling import Rule
from specdec.decoding.speculation import Drafter
from specdec.serving.errors import InvalidRequestError, ModelFailureError, PeerLostError, ServiceError
from specdec.serving.messages import lookahead_message
from specdec.v2 import draft_pb2, model_pb2, verifier_pb2

log = structlog.get_logger()

FRUITLESS_STEPS = 128
"""Steps in a row in which candidates were wanted and none was accepted, after which a draft is left: it lags, or
guesses at random."""

USELESS_SECONDS = 60.0
"""Seconds in which a text does not ask a draft again that was of no use to it."""

LONGEST_PAUSE = 1.0
"""Seconds between two rounds of asking for a draft."""


class UselessError(LostError):
    """Candidates come in time, and none is right: this text would do as well without a draft."""


class LaggingError(LostError):
    """No candidate comes in time: any text would do as well without a draft."""


class FloodError(LostError):
    """The draft sends candidates without end."""


class CandidateSink(Protocol):
    """Takes what drafting has for the verifier of its text, whichever that is."""

    async def extend(self, extend: model_pb2.Extend) -> None:
        """Take candidates."""

    async def set_policy(self, policy: verifier_pb2.VerifyPolicy) -> None:
        """Take the policy by which the verifier should speculate from now on."""

    def abort(self, error: ServiceError) -> None:
        """Take the error with which the request ends, since it needs a draft and none can be had."""


class Drafting:
    """The drafting of one sample. Used as a context manager: leaving it ends the draft's session."""

    def __init__(self, context: SampleContext, sink: CandidateSink) -> None:
        sample, peers = context.sample, context.peers
        self._context = context
        self._sink = sink
        self._sample = sample
        self._pods = peers.drafts if sample.speculation.remote else None
        self._required = sample.rule is Rule.CONTRASTIVE
        self._backoff = Backoff(peers.failover_seconds, longest=LONGEST_PAUSE)
        self._working: asyncio.Task[None] | None = None
        self._forced = self._required or sample.speculation.forced  # drafting is on, whether or not it pays
        self._drafting_wanted = False  # as last received from the verifier
        self._min_candidate_probability = 1.0  # likewise
        self._wanted = asyncio.Event()  # set once candidates may pay
        self._max_nodes = 1  # that the verifier grants
        self._draft: DraftStream | None = None  # sends them
        self._draft_control: DraftControl | None = None  # of its session
        self._flow: CandidateFlow | None = None  # likewise
        self._fruitless = self._offered = 0  # steps in a row, and candidates verified in them
        self._undrafted = False  # there is no draft now
        self._useless_until: dict[Pod, float] = {}  # monotonic times; for this text
        self._last_failure = "no_draft", "no pod"  # (reason, why) of the last draft that failed
        self._given_up: ServiceError | None = None
        self.undrafted_reason = "" if self._pods is not None else "no_draft" if sample.speculation.remote else "off"
        self._patience_us = int(1e6 * peers.patience_seconds)
        # The verifier may wait for the first candidates only if there is hope of a draft.
        self._drafted = self._pods is not None and bool(self._pods.willing)
        if self._required and self._pods is None:
            self._given_up = _draft_required("there is none")

    @property
    def policy(self) -> verifier_pb2.VerifyPolicy:
        """The verifier's policy as it should be now: a new message."""
        wanted = self._sample.speculation
        return verifier_pb2.VerifyPolicy(
            drafters=sorted(wanted.drafters if self._drafted else wanted.drafters - {Drafter.REMOTE}),  # type: ignore[arg-type]
            forced=wanted.forced,
            max_candidates=wanted.max_candidates,
            patience_us=self._patience_us,
            lookahead=None if wanted.lookahead is None else lookahead_message(wanted.lookahead),
        )

    async def __aenter__(self) -> Self:
        if self._pods is not None:
            self._working = asyncio.create_task(self._work())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])  # awaiting it directly could not tell its cancellation from ours

    # --- events of the text -------------------------------------------------------------------------

    def on_opened(self, opened: verifier_pb2.VerifyOpened) -> None:
        """Draft for the verifier that has taken the text. It has none of the candidates that another one had."""
        self._max_nodes = max(1, opened.max_nodes)
        self._on_outlook(opened.drafting_wanted, opened.min_candidate_probability)
        if self._given_up is not None:
            self._sink.abort(self._given_up)
        elif self._draft is not None and self._draft_control is not None and self._flow is not None:
            self._flow = CandidateFlow(self._max_nodes)
            for message in self._draft_control.another_verifier(self._max_nodes):
                self._draft.send(message)

    def on_commit(self, commit: verifier_pb2.Commit) -> None:
        """Send the draft what the target decided, and judge the draft by it."""
        self._on_outlook(commit.drafting_wanted, commit.min_candidate_probability)
        draft, draft_control, flow = self._draft, self._draft_control, self._flow
        if draft is None or draft_control is None or flow is None:
            return
        flow.committed()
        rested = draft_control.paused
        for message in draft_control.messages(commit):
            draft.send(message)
        if draft.at_work and draft_control.paused is not rested:
            self._context.events.record("draft_resumed" if rested else "draft_paused", draft.pod)
        self._evaluate(draft, commit)

    def _on_outlook(self, wanted: bool, probability: float) -> None:
        """Note whether a draft pays now, and from which probability on a candidate does. For a session that the
        verifier believes to have no draft, this says nothing, and a draft is tried."""
        self._drafting_wanted, self._min_candidate_probability = wanted, probability
        if wanted or self._forced or not self._drafted:
            self._wanted.set()

    def _evaluate(self, draft: DraftStream, commit: verifier_pb2.Commit) -> None:
        """Abort the draft's session if candidates were wanted and none was accepted for too long."""
        if not draft.at_work:
            return
        if commit.accepted or not commit.drafting_wanted or self._required:
            self._fruitless = self._offered = 0
            self._backoff.progressed()
            draft.pod.breaker.succeeded()
            return
        self._fruitless += commit.steps
        self._offered += commit.offered
        if self._fruitless >= FRUITLESS_STEPS:
            kind = UselessError if self._offered else LaggingError
            draft.abort(kind(f"of {self._offered} candidates in {self._fruitless} steps none was accepted"))

    # --- sessions at drafts -------------------------------------------------------------------------

    async def _work(self) -> None:
        """Keep one draft after another at work, beginning when one may pay: even a paused session costs its opening,
        and has the draft read the prompt. Whatever goes wrong here ends no request, except one that needs a draft."""
        assert self._pods is not None
        await self._wanted.wait()
        tried: set[Pod] = set()  # since a draft was at work, or the last pause
        while True:
            now = time.monotonic()
            useless = {pod for pod, until in self._useless_until.items() if until > now}
            pod = self._pods.choose(but=tried | useless)
            if pod is not None:
                was_at_work = await self._draft_at(pod)
                tried = {pod} if was_at_work else {*tried, pod}
                continue
            await self._go_without()
            if self._given_up is not None:
                return
            await asyncio.sleep(self._backoff.pause())
            tried.clear()

    async def _draft_at(self, pod: Pod) -> bool:
        """Have this pod draft until it fails; return True if it ever sent candidates."""
        pod.breaker.attempt()
        async with DraftStream(pod, self._context) as stream:
            try:
                with pod.load.session():
                    await self._relay(stream)
            except OtherTokenizerError as unfit:
                pod.found_unfit("tokenizer_mismatch", str(unfit))
            except UselessError as useless:  # for this text only: the pod goes on with others
                self._useless_until[pod] = time.monotonic() + USELESS_SECONDS
                self._record_end(stream, "draft_useless", useless)
            except LaggingError as lagging:
                pod.breaker.failed()
                self._record_end(stream, "draft_useless", lagging)
            except FloodError as flood:
                pod.found_unfit("draft_lost", str(flood))
                self._record_end(stream, "draft_lost", flood)
            except LostError as lost:
                pod.breaker.failed(conclusive=lost.conclusive)
                self._record_end(stream, "draft_lost", lost)
            except Exception as error:  # the pod is full, or refuses the session
                if isinstance(error, ModelFailureError | InvalidRequestError):
                    self._useless_until[pod] = math.inf
                self._last_failure = "no_draft", f"{pod}: {error}"
            finally:
                self._draft = self._draft_control = self._flow = None
        return stream.at_work

    def _record_end(self, stream: DraftStream, reason: FailoverReason, why: LostError) -> None:
        """Record the end of a draft's session; a session that was never open counts as having no draft."""
        if stream.opened:
            self._context.events.record(reason, stream.pod, str(why))
        self._last_failure = reason if stream.opened else "no_draft", f"{stream.pod}: {why}"

    async def _relay(self, stream: DraftStream) -> None:
        """Open a session, and send its candidates on to the verifier."""
        policy = draft_pb2.DraftPolicy(
            max_nodes=self._max_nodes,
            max_depth=self._sample.speculation.max_depth,
            max_branches=self._sample.speculation.max_branches,
        )
        if not self._forced:
            policy.paused = not self._drafting_wanted
            policy.min_path_probability = first_min_probability(self._min_candidate_probability)
        # The session opens with the text as it is now: commits from here on are queued for it.
        self._draft, self._draft_control = stream, DraftControl(policy, needed=self._required)
        self._flow = CandidateFlow(self._max_nodes)
        self._fruitless = self._offered = 0
        await stream.open(policy)
        await self._speculate(True)
        async for extend in stream.candidates():
            if problem := self._flow.violation(extend):
                raise FloodError(problem)
            if self._undrafted:
                self._undrafted = False
                self._context.events.record("draft_back", stream.pod)
            await self._sink.extend(extend)

    async def _go_without(self) -> None:
        """Go on without a draft, since none can be had now; end the request if it needs one and the time is up."""
        assert self._pods is not None
        if self._pods and all(pod.unfit for pod in self._pods):
            pods = list(self._pods)
            self._last_failure = pods[0].unfit_reason, "; ".join(f"{pod}: {pod.unfit}" for pod in pods)
        self._backoff.failed()
        if self._required:
            if self._backoff.exhausted:
                log.warning("no_draft", reason=self._last_failure[0], why=self._last_failure[1])
                self._given_up = _draft_required("none can be had")
                self._sink.abort(self._given_up)
            return
        if not self._undrafted:
            self._undrafted = True
            self.undrafted_reason, why = self._last_failure
            log.info("undrafted", reason=self.undrafted_reason, why=why)
        await self._speculate(False)

    async def _speculate(self, on: bool) -> None:
        self._drafted = on
        await self._sink.set_policy(self.policy)


def _draft_required(why: str) -> ServiceError:
    return PeerLostError(f"the CONTRASTIVE rule needs a draft: {why}", "DRAFT_REQUIRED")
