"""One session at a draft: forwards the target's decisions, and gives the draft up if its candidates are of no use."""

from __future__ import annotations

import time

from orchestrator.generation.candidate_flow import CandidateFlow
from orchestrator.generation.draft_control import DraftControl
from orchestrator.generation.draft_stream import DraftStream
from orchestrator.generation.sample_context import SampleContext
from orchestrator.generation.speculation_state import SpeculationState
from orchestrator.pods.errors import LostError
from specdec.v2 import model_pb2, verifier_pb2

USELESS_AFTER_STEPS = 128
"""Steps that wanted candidates and accepted none, after which a draft is given up: it lags, or guesses at random. If a
draft helps in one step of twenty, such a run has a probability of 0.14 %."""


LATE_SHARE = 0.5
"""Share of `failover_seconds` to wait for one draft if no token can be chosen without it. The rest is enough to try
another."""


class UselessError(LostError):
    """Candidates come in time, but all are wrong: this text would do as well without a draft."""


class LaggingError(LostError):
    """No candidate comes in time: this text would do as well without a draft. `waiting_since`: start of the wait
    (monotonic). The pod is at fault if no other text has had candidates since either."""

    def __init__(self, message: str, waiting_since: float) -> None:
        super().__init__(message)
        self.waiting_since = waiting_since


class FloodError(LostError):
    """The draft sends more candidates than its flow control allows."""


class DraftSession:
    """A session at a draft. Commits are queued until it is open."""

    def __init__(self, stream: DraftStream, context: SampleContext, state: SpeculationState) -> None:
        """Prepare a session; `state` decides its first policy."""
        self._stream = stream
        self._context = context
        self._policy = state.draft_policy(context.sample)
        self._control = DraftControl(self._policy, needed=context.sample.needs_draft)
        self._flow = CandidateFlow(state.max_nodes)
        self._fruitless = 0  # steps since a candidate of the draft was last accepted
        self._fruitless_since = 0.0  # when the first of them ended; monotonic
        self._in_time = False  # in some of them it had candidates
        self._awaited_since: float | None = None  # since when the text has been blocked on the draft; monotonic
        self._wanted_since: float | None = None  # since when its first candidates have been wanted; monotonic

    async def open(self) -> None:
        """Open the session with the text as it is now."""
        await self._stream.open(self._policy)

    def check(self, extend: model_pb2.Extend) -> None:
        """Count the candidates of a message; FloodError if the draft has sent too many."""
        if problem := self._flow.violation(extend):
            raise FloodError(problem)

    def on_opened(self, state: SpeculationState) -> None:
        """Make the draft resend its candidates: another verifier has none of them."""
        self._awaited_since = None
        self._flow = CandidateFlow(state.max_nodes)
        for message in self._control.another_verifier(state.max_nodes):
            self._stream.send(message)

    def on_awaited(self) -> None:
        """Note that the text is blocked on the draft; abort the session if it stays so for too long."""
        now = time.monotonic()
        if self._awaited_since is None:
            self._awaited_since = now
        elif now - self._awaited_since >= LATE_SHARE * self._context.peers.failover_seconds:
            self._abort_silent(self._awaited_since, now)

    def on_commit(self, commit: verifier_pb2.Commit) -> bool:
        """Forward the target's decisions; return True if they speak for the draft."""
        self._awaited_since = None
        self._flow.committed()
        paused = self._control.paused
        for message in self._control.messages(commit):
            self._stream.send(message)
        if not self._stream.at_work:
            self._await_first(wanted=commit.drafting_wanted and not self._control.paused)
            return False
        if self._control.paused is not paused:
            self._context.events.record("draft_resumed" if paused else "draft_paused", self._stream.pod)
        return self._evaluate(commit)

    def _await_first(self, *, wanted: bool) -> None:
        """Abort the session if the draft has sent nothing yet and candidates have been wanted for too long: its device
        may be stuck although its service answers."""
        now = time.monotonic()
        if not wanted:
            self._wanted_since = None
        elif self._wanted_since is None:
            self._wanted_since = now
        elif now - self._wanted_since >= self._context.peers.failover_seconds:
            self._abort_silent(self._wanted_since, now)

    def _abort_silent(self, since: float, now: float) -> None:
        self._stream.abort(LaggingError(f"it has sent nothing for {now - since:.1f} s", since))

    def _evaluate(self, commit: verifier_pb2.Commit) -> bool:
        """Return False if candidates were wanted and none of the draft's was accepted; abort the session after too many
        such steps. A draft counts as useful if no token can be chosen without it. Steps in which other proposers were
        right do not count: the draft may have guessed the same."""
        helped = self._context.sample.needs_draft or model_pb2.TOKEN_SOURCE_REMOTE_DRAFT in commit.sources
        if helped:
            self._fruitless, self._in_time = 0, False
            self._stream.pod.breaker.succeeded()
            return True
        if not commit.drafting_wanted:  # drafting does not pay at the moment
            return True
        if commit.accepted:
            return False
        if not self._fruitless:
            self._fruitless_since = time.monotonic()
        self._fruitless += commit.steps
        self._in_time |= commit.undrafted_tokens < len(commit.committed.tokens)
        if self._fruitless >= USELESS_AFTER_STEPS:
            if self._in_time:
                self._stream.abort(UselessError(f"none of its candidates was accepted in {self._fruitless} steps"))
            else:
                problem = f"none of its candidates came in time for {self._fruitless} steps"
                self._stream.abort(LaggingError(problem, self._fruitless_since))
        return False
