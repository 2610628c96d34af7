"""One session at a draft: its stream, the flow control of its candidates, and the reasons to abandon it.

A draft sends candidates a few times a step, and stops at the number its verifier has granted. A draft that never
stopped would starve the verifier's steps and the orchestrator's other streams, so a token bucket, refilled by commits,
limits its messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from orchestrator.generation.draft_control import DraftControl
from orchestrator.generation.peer_stream import PeerStream
from orchestrator.generation.sample_context import SampleContext
from orchestrator.generation.speculation_policy import SpeculationState
from orchestrator.pods.errors import LostError, check_fit
from orchestrator.pods.pods import Pod
from specdec.decoding import contrastive
from specdec.decoding.proposal import DistributionSizes
from specdec.decoding.sampling import Rule
from specdec.serving.messages import distribution_from, query_from, rule_message
from specdec.serving.mux.stream import MAX_BYTES
from specdec.serving.target_logprobs import MAX_TOP
from specdec.serving.validation import MAX_NODES_A_MESSAGE
from specdec.v2 import draft_pb2, draft_pb2_grpc, model_pb2, verifier_pb2

MAX_UNWRITTEN_FEATURES = 16 << 20
"""Maximum bytes of a text's features that wait for its draft to read: twice the largest window that a verifier
keeps."""

MESSAGES_A_COMMIT = 16
"""Messages added to the bucket by each commit: four times `EXTENDS_A_STEP`. One more is added for every four candidates
granted: under CONTRASTIVE, a draft sends a message as soon as it holds four distributions over the whole vocabulary."""

MAX_EXTEND_BYTES = MAX_BYTES - 64
"""Largest message in bytes. It is relayed to the verifier inside another, slightly longer message."""

MAX_IDS_A_MESSAGE = 1 << 18
"""Maximum token ids of the partial distributions in a message: twice as many as our own drafts send."""

NODES_FOR_ONE = 64
BYTES_FOR_ONE = 1 << 20
"""A message costs 1, plus 1 for every 64 candidates (ancestors included) and 1 for every MiB. A message of
`MAX_NODES_A_MESSAGE` candidates and `MAX_EXTEND_BYTES` bytes costs 32. A distribution over a vocabulary of 262,144
tokens has 512 KiB."""


class CandidateFlow:
    """The token bucket for the messages of one session's draft. `max_nodes`: limit on the draft's live candidates. In
    the worst case, each candidate takes one message, and its distribution another."""

    def __init__(self, max_nodes: int) -> None:
        self._refill = MESSAGES_A_COMMIT + max_nodes // 4
        self._most = 2 * max_nodes + self._refill
        self._left = self._most

    def committed(self) -> None:
        """Refill the bucket: the text has grown, so there are new candidates to send."""
        self._left = min(self._most, self._left + self._refill)

    def violation(self, extend: model_pb2.Extend) -> str:
        """Count a message. Return the rule that it violates, empty if none."""
        ids = sum(len(distribution.id_gaps) for distribution in extend.distributions)
        if ids > MAX_IDS_A_MESSAGE:
            return f"it sends {ids} token ids of distributions in a message, at most {MAX_IDS_A_MESSAGE} are allowed"
        # The committed prefix has a distribution too, so distributions may outnumber candidates by one.
        nodes, size = max(len(extend.tokens), len(extend.parents), len(extend.distributions) - 1), extend.ByteSize()
        self._left -= 1 + nodes // NODES_FOR_ONE + size // BYTES_FOR_ONE
        if self._left < 0:
            return (
                f"it sends too many messages: at most {self._most} in a burst and {self._refill} per commit are allowed"
            )
        if nodes > MAX_NODES_A_MESSAGE:
            return f"it sends {nodes} candidates in a message, at most {MAX_NODES_A_MESSAGE} are allowed"
        if size > MAX_EXTEND_BYTES:
            return f"it sends a message of {size} bytes, at most {MAX_EXTEND_BYTES} are allowed"
        return ""


USELESS_AFTER_STEPS = 128
"""A draft is abandoned after this many steps in which its candidates were wanted and none was accepted: it lags, or
guesses at random. If a draft helps in one step of twenty, such a run has a probability of 0.14 %."""


LATE_SHARE = 0.5
"""Share of `failover_seconds` to wait for one draft if no token can be chosen without it. The rest is enough to try
another."""


class UselessError(LostError):
    """Candidates arrive in time, but all are wrong: this text would do as well without a draft."""


class LaggingError(LostError):
    """No candidate arrives in time: this text would do as well without a draft. `waiting_since`: start of the wait
    (monotonic). If the pod has sent no candidates to other texts since then, the pod is at fault."""

    def __init__(self, message: str, waiting_since: float) -> None:
        super().__init__(message)
        self.waiting_since = waiting_since


class UnfedError(LostError):
    """The draft reads features that the text's verifier does not send."""


class FloodError(LostError):
    """The draft sends more candidates than its flow control allows."""


class InvalidDistributionError(LostError):
    """The draft sends log-probabilities that no verifier can use, or that the query did not ask for (CONTRASTIVE)."""


class DraftSession(PeerStream):
    """A session at a draft. Commits and queries are queued until it is open."""

    peer = "draft"

    def __init__(self, pod: Pod, context: SampleContext, state: SpeculationState) -> None:
        """Prepare a session; `state` decides its first policy."""
        super().__init__(pod, context)
        sample = context.sample
        self._control = DraftControl(state.draft_policy(sample), sample.speculation, needed=sample.needs_draft)
        self._flow = CandidateFlow(state.max_nodes)
        self.at_work = False  # True once the draft has sent candidates
        self.overruled_logprobs = 0  # number of the target's likeliest tokens that the draft learns from; 0: none
        self.features: draft_pb2.FeatureFormat | None = None  # format of the features that the draft reads, if any
        self._outgoing: asyncio.Queue[draft_pb2.DraftRequest] = asyncio.Queue()
        self._unwritten = 0  # bytes of features in `_outgoing`
        self._fed_at = 0.0  # when features for the draft last arrived; monotonic
        self._feeding: asyncio.Task[None] | None = None
        self._fruitless = 0  # steps since a candidate of the draft was last accepted
        self._fruitless_since = 0.0  # when the first of them ended; monotonic
        self._in_time = False  # the draft had candidates in some of these steps
        self._awaited_since: float | None = None  # when the text became blocked on the draft; monotonic
        self._wanted_since: float | None = None  # when the draft's first candidates became wanted; monotonic
        self._query: model_pb2.DraftQuery | None = None  # unanswered (CONTRASTIVE)
        self._vocabulary: int | None = None  # number of the draft's token ids, from its first distribution
        self._former_query: int | None = None  # base of a former verifier's query, whose answer may still arrive

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._feeding is not None:
                self._feeding.cancel()
                await asyncio.wait([self._feeding])  # a plain await could not tell the task's cancellation from ours
        finally:
            await super().__aexit__(kind, error, trace)

    async def open(self) -> None:
        """Open the session with the current text; UnfitError if the pod has another protocol or tokenizer."""
        sample = self._context.sample
        # Do not learn from resumed texts, whose start is unknown, nor under TYPICAL, where many tokens are the draft's
        # choice, not the target's.
        learn = sample.learn and not sample.generated and sample.rule is not Rule.TYPICAL
        message = draft_pb2.DraftOpen(
            prompt_tokens=sample.prompt,
            generated_tokens=self._context.text.generated,
            sampling=sample.sampling_message,
            rule=rule_message(sample.draft_rule),
            contrast=sample.contrast if sample.rule is Rule.CONTRASTIVE else None,
            max_tokens=sample.max_tokens,
            end_tokens=sorted(sample.end_tokens),
            min_tokens=sample.min_tokens,
            grammar=sample.grammar,
            policy=self._control.policy,
            vocabulary_size=self._context.model.vocabulary,
            tenant=sample.tenant,
            tenant_weight=sample.weight,
            learn=learn,
            age_us=int(1e6 * (time.monotonic() - self._context.timeline.began)),
        )
        message.sampling.seed = sample.sampling.seed
        stub = draft_pb2_grpc.DraftServiceStub(self.pod.channel)
        opened: draft_pb2.DraftOpened = await self._begin(stub.Draft, draft_pb2.DraftRequest(open=message))
        check_fit(opened.identity, self._context.model, self.peer)
        self._context.granted.by_draft(opened)
        if opened.keeps_text:
            self._context.keepers.add(self.pod)
            if learn:
                self.overruled_logprobs = min(opened.overruled_logprobs, MAX_TOP)
        if opened.HasField("features"):
            self.features = opened.features
        self.opened = True
        self._feeding = asyncio.create_task(self._feed())

    async def _feed(self) -> None:
        while True:
            message = await self._outgoing.get()
            await self._write(message)
            self._unwritten -= len(message.features.values)

    # --- candidates from the draft ----------------------------------------------------------------

    async def candidates(self) -> AsyncIterator[model_pb2.Extend]:
        """Yield messages of candidates until the session ends."""
        while True:
            response = await self._read()
            match response.WhichOneof("message"):
                case "extend":
                    self.at_work = True
                    self.pod.candidates_at = time.monotonic()
                    yield response.extend
                case _:
                    self._count_heartbeat()
                    if response.heartbeat.HasField("capacity"):
                        self.pod.load.report(response.heartbeat.capacity)

    def check(self, extend: model_pb2.Extend) -> None:
        """Count the candidates of a message; FloodError if the draft has sent too many, InvalidDistributionError if a
        distribution is invalid (CONTRASTIVE)."""
        if problem := self._flow.violation(extend):
            raise FloodError(problem)
        if self._context.sample.needs_draft:
            for distribution in extend.distributions:
                # Whole rows that answer no query are left to the verifier, which drops unusable ones: with a large
                # vocabulary, reading one here would take longer than handling a commit.
                if distribution.id_gaps or distribution.answer:
                    self._check_row(distribution, extend.base)

    def _check_row(self, distribution: model_pb2.DraftDistribution, base: int) -> None:
        """Check a distribution from a message based on the text's first `base` tokens. An answer about an earlier base
        is too late, and is not compared with the query."""
        vocabulary = self._context.model.vocabulary
        try:
            row = distribution_from(distribution, DistributionSizes.of(Rule.CONTRASTIVE, vocabulary))
        except ValueError as error:
            raise InvalidDistributionError(f"it sends an invalid distribution: {error}") from None
        if problem := row.contrast_violation(vocabulary):
            raise InvalidDistributionError(f"it sends an invalid distribution: {problem}")
        if self._vocabulary not in (None, row.size):  # each growth could make the verifier ask again
            raise InvalidDistributionError(f"its vocabulary has {row.size} tokens, it had {self._vocabulary}")
        self._vocabulary = row.size
        if not row.answer or self._query is None or base != self._query.base or distribution.parent:
            return
        if base != self._former_query:
            asked = query_from(self._query, vocabulary).ids
            expected = contrastive.answered_ids(asked, row.size)
            same = row.ids is None if expected is None else np.array_equal(() if row.ids is None else row.ids, expected)
            if not same:
                raise InvalidDistributionError(
                    f"it answers with {_count(row.ids)}, the query is about {_count(expected)}"
                )
        self._query = None

    # --- to the draft -----------------------------------------------------------------------------

    def send(self, message: draft_pb2.DraftRequest) -> None:
        """Queue a message: a draft that does not read must not block the caller."""
        self._outgoing.put_nowait(message)

    def on_query(self, query: model_pb2.DraftQuery) -> None:
        self._query, self._awaited_since = query, None
        self.send(draft_pb2.DraftRequest(query=query))

    def on_opened(self, state: SpeculationState) -> None:
        """Make the draft resend its candidates: the new verifier has none. Abort the session if the verifier sends
        other features than the draft reads."""
        if (error := self.unfed(state.features)) is not None:
            self.abort(error)
        self._awaited_since = None
        if self._query is not None:
            self._former_query = self._query.base
        self._query = None
        self._flow = CandidateFlow(state.max_nodes)
        for message in self._control.another_verifier(state):
            self.send(message)

    def on_awaited(self) -> None:
        """Note that the text is blocked on the draft; abort the session if that lasts too long."""
        now = time.monotonic()
        if self._awaited_since is None:
            self._awaited_since = now
        elif now - self._awaited_since >= LATE_SHARE * self._context.peers.failover_seconds:
            if self._query is None:
                self._abort_silent(self._awaited_since, now)
            else:
                problem = f"it has not answered a query for {now - self._awaited_since:.1f} s"
                self.abort(LaggingError(problem, self._awaited_since))

    def on_commit(self, commit: verifier_pb2.Commit) -> bool:
        """Forward the target's decisions. Return True if the draft has sent candidates before and the commit does not
        count against it."""
        self._awaited_since = self._query = None
        self._flow.committed()
        paused = self._control.paused
        for message in self._control.messages(commit, learns=self.overruled_logprobs > 0):
            self.send(message)
        if not self.at_work:
            self._await_first(wanted=commit.drafting_wanted and not self._control.paused)
            return False
        if self._control.paused is not paused:
            self._context.timeline.failover_event("draft_resumed" if paused else "draft_paused", self.pod)
        return self._evaluate(commit)

    def on_finish(self) -> None:
        """Send a draft that keeps the text the tokens held back during a pause: it keeps what it has received."""
        if self.pod in self._context.keepers:
            for message in self._control.held_back():
                self.send(message)

    def on_features(self, features: model_pb2.Features) -> None:
        """Queue features for a draft that reads them. Features are dropped if the draft does not keep up or a row is
        cut short; the draft then guesses from later features."""
        size = len(features.values)
        if self.features is None or not size or size % (2 * max(1, self.features.width)):
            return
        self._fed_at = time.monotonic()
        if self._unwritten + size <= MAX_UNWRITTEN_FEATURES:
            self._unwritten += size
            self.send(draft_pb2.DraftRequest(features=features))

    def unfed(self, fingerprint: str) -> UnfedError | None:
        """Return an error if the draft reads features with another fingerprint than this one, the verifier's (empty:
        the verifier sends none)."""
        if self.features is None or self.features.fingerprint == fingerprint:
            return None
        return UnfedError(f"it reads features {self.features.fingerprint[:16]}, which the verifier does not send")

    def starved_since(self, since: float) -> bool:
        """Return True if the draft reads features and has received none since this monotonic time."""
        return self.features is not None and self._fed_at < since

    # --- reasons to abandon it --------------------------------------------------------------------

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
        self.abort(LaggingError(f"it has sent nothing for {now - since:.1f} s", since))

    def _evaluate(self, commit: verifier_pb2.Commit) -> bool:
        """Return False if candidates were wanted and none of the draft's was accepted; abort the session after too many
        such steps. A draft counts as useful if no token can be chosen without it. Steps in which other proposers were
        right do not count: the draft may have guessed the same."""
        helped = self._context.sample.needs_draft or model_pb2.TOKEN_SOURCE_REMOTE_DRAFT in commit.sources
        if helped:
            self._fruitless, self._in_time = 0, False
            self.pod.breaker.succeeded()
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
                self.abort(UselessError(f"none of its candidates was accepted in {self._fruitless} steps"))
            else:
                problem = f"none of its candidates came in time for {self._fruitless} steps"
                self.abort(LaggingError(problem, self._fruitless_since))
        return False


def _count(ids: NDArray[np.int64] | None) -> str:
    return "the whole vocabulary" if ids is None else f"{len(ids)} tokens from {ids[0]} to {ids[-1]}"
