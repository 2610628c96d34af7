"""Commits: decides when to send a session's verify results, and adds the commit's other fields."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specdec.decoding.contrastive import DraftQuery
from specdec.decoding.speculation import Outlook
from specdec.serving.response_queue import ResponseQueue
from verifier_service.backend.result import CommitDetails, PromptScores, StepSeconds, VerifyResult
from verifier_service.scheduling.run_queue import RunQueue
from verifier_service.sessions.running_session import RunningSession
from verifier_service.settings.tuning import CommitTuning
from verifier_service.speculation.controller import Controllers
from verifier_service.speculation.eligibility import Eligibility

if TYPE_CHECKING:  # imports torch
    from verifier_service.proposers.feature_source import FeatureSource


class CommitPublisher:
    """Sends commits to the response queues of sessions."""

    def __init__(
        self, queue: RunQueue, controllers: Controllers, eligibility: Eligibility, tuning: CommitTuning, *, on_cpu: bool
    ) -> None:
        """Create a publisher; `on_cpu`: the engine computes on CPU cores, which commits need too."""
        self._queue = queue
        self._controllers = controllers
        self._eligibility = eligibility
        self._tuning = tuning
        self._messages_a_second = tuning.messages_a_second if on_cpu else tuning.device_messages_a_second
        self._drafted_sessions = 0  # running sessions that use a remote draft

    def send_before(self, step_seconds: float, sitting_out: Sequence[RunningSession]) -> None:
        """Before a step of `step_seconds`, send pending results of sessions sitting it out, if due by the step's
        end."""
        due = self._due(time.monotonic() + step_seconds)
        pending = [entry for entry in sitting_out if entry.pending_result is not None and due(entry)]
        ResponseQueue.send_all([self._message(entry, StepSeconds()) for entry in pending])

    def publish(self, results: Sequence[tuple[RunningSession, VerifyResult]], seconds: StepSeconds) -> None:
        """Add a step's results to the pending ones, and send those that are due, awaited, or the last of a text."""
        running, eligibility = self._queue.running, self._eligibility
        self._drafted_sessions = sum(eligibility.uses_remote_draft(entry.session) for entry in running)
        is_due = self._due(time.monotonic())
        messages = []
        for entry, result in results:
            if entry.pending_result is None:
                entry.pending_result = result
            else:
                entry.pending_result.join(result)
            if result.finish or is_due(entry) or self._is_awaited(entry):
                messages.append(self._message(entry, seconds))
        ResponseQueue.send_all(messages)

    def send_scores(self, scores: Iterable[tuple[RunningSession, PromptScores]]) -> None:
        """Send the log-probabilities of prompt tokens."""
        ResponseQueue.send_all(
            [
                (entry.responses, partial(entry.response_maker.scores, part))
                for entry, of_session in scores
                for part in of_session.parts()
            ]
        )

    def send_features(self, results: Iterable[tuple[RunningSession, VerifyResult]], source: FeatureSource) -> None:
        """Send features to the drafts now in use, before the commit of the token after them. If a caller reads too
        slowly, its features are sent later, if they are still kept."""
        messages: list[tuple[ResponseQueue[Any], Callable[[], Any]]] = []
        for entry, result in results:
            session = entry.session
            if result.finish or entry.responses.full or not self._eligibility.uses_remote_draft(session):
                continue
            if (rows := source.unsent(session)) is not None:
                messages += [(entry.responses, partial(entry.response_maker.features, part)) for part in rows.parts()]
        ResponseQueue.send_all(messages)

    def send_queries(self, queries: Iterable[tuple[RunningSession, DraftQuery]]) -> None:
        """Send queries to drafts, each after the commits of its text."""
        for entry, query in queries:
            self.send_pending(entry)
            ResponseQueue.send_all([(entry.responses, partial(entry.response_maker.query, query))])

    def _due(self, when: float) -> Callable[[RunningSession], bool]:
        """Return a predicate: whether a session's pending result is due at the time `when`, even if not awaited."""
        tuning = self._tuning
        spacing = self._spacing()

        def is_due(entry: RunningSession) -> bool:
            pause = max(tuning.coalesce_seconds, spacing.get(entry.tenant, 0.0))
            if entry.session.request.coalesce_commits:
                pause = max(tuning.relaxed_coalesce_seconds, pause)
            return when - entry.last_sent_at >= pause

        return is_due

    def _spacing(self) -> dict[str, float]:
        """Return the minimum seconds between two messages of a session, by tenant. Tenants share the message rate by
        weight, so that many streams of one do not delay another's."""
        running, a_second = self._queue.running, self._messages_a_second
        if self._queue.memory_shares.tenants <= 1:  # the common case
            return {entry.tenant: len(running) / a_second for entry in running[:1]}
        sessions = Counter(entry.tenant for entry in running)
        weights = {entry.tenant: entry.weight for entry in running}
        total = sum(weights.values())
        return {tenant: count * total / (weights[tenant] * a_second) for tenant, count in sessions.items()}

    def send_pending(self, entry: RunningSession) -> None:
        """Send a session's pending result immediately, outside of any step."""
        if entry.pending_result is not None:
            ResponseQueue.send_all([self._message(entry, StepSeconds())])

    def _is_awaited(self, entry: RunningSession) -> bool:
        """Return True if something waits for the session's verify result: its draft, to continue; the next step, if it
        needs that draft; or the reader of a throttled session."""
        # Its draft works now, or its last commit asked for candidates.
        drafted = entry.drafting_wanted or self._eligibility.uses_remote_draft(entry.session)
        return drafted or not entry.session.computable or self._queue.throttled(entry)

    def _message(self, entry: RunningSession, seconds: StepSeconds) -> tuple[ResponseQueue[Any], Callable[[], Any]]:
        """Return a session's response queue and a function to make the commit of its pending result."""
        session = entry.session
        cached, session.cached_tokens = session.cached_tokens, 0
        entry.drafting_wanted = self._eligibility.uses_remote_draft(session)
        rates = self._controllers.of(session).rates
        changed, entry.sent_rates = rates is not entry.sent_rates, rates
        details = CommitDetails(
            *seconds,
            queued=entry.queued,
            cached=cached,
            preemptions=entry.preemptions,
            outlook=Outlook(entry.drafting_wanted, self._eligibility.break_even),
            drafted_sessions=self._drafted_sessions,
            round_trip=session.draft_timing.round_trip,
            rates=rates if changed else None,
        )
        result, entry.pending_result = entry.pending_result, None
        entry.queued, entry.last_sent_at = 0.0, time.monotonic()
        assert result is not None
        return entry.responses, partial(entry.response_maker.commit, result, details)
