"""A draft receives the target's decisions, and is given up when useless."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orchestrator.generation.draft_session import (
    MAX_UNWRITTEN_FEATURES,
    MESSAGES_A_COMMIT,
    USELESS_AFTER_STEPS,
    DraftSession,
    FloodError,
    InvalidDistributionError,
    LaggingError,
    UselessError,
)
from orchestrator.generation.drafting import Drafting
from orchestrator.generation.sample_context import SampleContext
from orchestrator.generation.speculation_policy import SpeculationState
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pod, Pods
from specdec.decoding.contrastive import DraftQuery
from specdec.decoding.proposal import MAX_PARTIAL_IDS
from specdec.decoding.sampling import Rule
from specdec.decoding.speculation import Outlook
from specdec.serving.messages import query_message
from specdec.serving.pods.breaker import FAILURES
from specdec.v2 import draft_pb2, model_pb2, verifier_pb2
from tests.orchestrator.samples import VOCABULARY, context
from tests.orchestrator.test_drafting import Sink

NODES = 16
STATE = SpeculationState(True, NODES, Outlook(drafting_wanted=True, break_even=0.5))


class RecordingSession(DraftSession):
    """Records messages sent to a draft, and why it was given up."""

    def __init__(self, given: SampleContext | None = None, *, at_work: bool = True, pod: Pod | None = None) -> None:
        super().__init__(pod or draft_pod(), given or context(), STATE)
        self.at_work = self.opened = at_work
        self.sent: list[draft_pb2.DraftRequest] = []
        self.aborted_by: Exception | None = None
        self.starves = False  # the draft reads features but gets none

    def starved_since(self, since: float) -> bool:
        return self.starves

    def send(self, message: draft_pb2.DraftRequest) -> None:
        self.sent.append(message)

    def abort(self, error: Exception) -> None:
        self.aborted_by = error

    @property
    def kinds(self) -> list[str | None]:
        return [message.WhichOneof("message") for message in self.sent]


def draft_pod() -> Pod:
    return Pod("draft", SimpleNamespace())  # type: ignore[arg-type]


def is_closed(pod: Pod) -> bool:
    return pod.breaker.state == "closed"


def commit(**fields: Any) -> verifier_pb2.Commit:
    usual: dict[str, Any] = {"drafting_wanted": True, "min_candidate_probability": 0.5, "steps": 1}
    return verifier_pb2.Commit(committed=model_pb2.Committed(base=3, tokens=[5]), **(usual | fields))


ACCEPTED = {"offered": 4, "accepted": 1, "sources": [model_pb2.TOKEN_SOURCE_REMOTE_DRAFT, model_pb2.TOKEN_SOURCE_BONUS]}
OF_ANOTHER = {"offered": 4, "accepted": 1, "sources": [model_pb2.TOKEN_SOURCE_NGRAM, model_pb2.TOKEN_SOURCE_BONUS]}
"""Commits with one accepted candidate: the draft's, or another proposer's."""


@pytest.mark.parametrize(("late", "why"), [(0, UselessError), (1, LaggingError)])
def test_a_draft_without_an_accepted_candidate_is_given_up(late: int, why: type[Exception]) -> None:
    """Candidates of other proposers do not count for the draft."""
    session = RecordingSession()
    wrong = commit(offered=4, undrafted_tokens=late)
    assert not any(session.on_commit(wrong) for _ in range(USELESS_AFTER_STEPS - 1))
    assert session.aborted_by is None
    assert not session.on_commit(wrong)
    assert isinstance(session.aborted_by, why)


def test_steps_in_which_a_text_leaves_its_draft_alone_do_not_count() -> None:
    """The text retries its draft, for a few steps each time."""
    session = RecordingSession()
    wrong, resting = commit(offered=4), commit(drafting_wanted=False)
    for _ in range(USELESS_AFTER_STEPS - 1):
        session.on_commit(wrong)
        session.on_commit(resting)
    assert session.aborted_by is None
    session.on_commit(wrong)
    assert isinstance(session.aborted_by, UselessError)


@pytest.mark.parametrize(("others_have_some", "starves"), [(False, False), (True, False), (False, True)])
async def test_only_a_draft_that_sends_nothing_to_anybody_is_left_alone_by_all(
    others_have_some: bool, starves: bool
) -> None:
    """Unless its verifier does not send it the features that it reads."""
    pod = draft_pod()
    for _ in range(FAILURES):
        session = RecordingSession(context(Peers(Pods(), failover_seconds=0.0)), at_work=False, pod=pod)
        session.starves = starves
        session.on_commit(commit())
        if others_have_some:
            pod.candidates_at = time.monotonic()
        session.on_commit(commit())
        assert isinstance(session.aborted_by, LaggingError)
        Drafting(context(), Sink())._note_end(session, session.aborted_by)
    assert is_closed(pod) is (others_have_some or starves)


def test_an_accepted_candidate_speaks_for_the_draft() -> None:
    session = RecordingSession()
    for _ in range(3):
        assert not any(session.on_commit(commit(offered=4)) for _ in range(USELESS_AFTER_STEPS - 1))
        assert session.on_commit(commit(**ACCEPTED))
    assert session.aborted_by is None


def test_what_another_proposer_guesses_neither_speaks_for_a_draft_nor_against_it() -> None:
    session = RecordingSession()
    session.pod.breaker.failed(conclusive=True)
    for _ in range(USELESS_AFTER_STEPS - 1):
        session.on_commit(commit(**OF_ANOTHER))
        assert session.aborted_by is None
        session.on_commit(commit(offered=4))
    session.on_commit(commit(offered=4))
    assert isinstance(session.aborted_by, UselessError)
    assert not is_closed(session.pod)
    session.on_commit(commit(**ACCEPTED))
    assert is_closed(session.pod)


def test_a_verifier_that_wants_no_candidates_says_nothing_of_a_drafts_pod() -> None:
    session = RecordingSession()
    session.pod.breaker.failed(conclusive=True)
    assert session.on_commit(commit(drafting_wanted=False))
    assert not is_closed(session.pod)


@pytest.mark.parametrize(
    ("at_work", "fields", "rule"),
    [
        (False, {}, Rule.COUPLED),  # the draft has not begun
        (True, {"drafting_wanted": False}, Rule.COUPLED),
        (True, {}, Rule.CONTRASTIVE),  # its distributions are used even if nothing is accepted
    ],
)
def test_a_draft_that_cannot_be_judged_is_kept(at_work: bool, fields: dict[str, Any], rule: Rule) -> None:
    session = RecordingSession(context(rule=rule), at_work=at_work)
    for _ in range(2 * USELESS_AFTER_STEPS):
        session.on_commit(commit(**fields))
    assert session.aborted_by is None


@pytest.mark.parametrize("failover_seconds", [0.0, 3600.0])
def test_a_draft_that_never_begins_is_given_up_in_the_end(failover_seconds: float) -> None:
    """The draft service answers, but its device hangs."""
    session = RecordingSession(context(Peers(Pods(), failover_seconds=failover_seconds)), at_work=False)
    session.on_commit(commit(drafting_wanted=False))  # no step waits for it
    session.on_commit(commit(drafting_wanted=False))
    assert session.aborted_by is None
    session.on_commit(commit())
    session.on_commit(commit())
    assert isinstance(session.aborted_by, LaggingError) is (failover_seconds == 0.0)


def test_pauses_are_events_once_it_is_at_work() -> None:
    for at_work, counted in ((False, 0), (True, 1)):
        given = context()
        session = RecordingSession(given, at_work=at_work)
        for wanted in (True, False, False, True):
            session.on_commit(commit(drafting_wanted=wanted, accepted=1))
        counts = given.timeline.failover_events
        assert counts["draft_paused"] == counts["draft_resumed"] == counted


def test_another_verifier_gets_all_candidates_and_takes_as_many_as_it_grants() -> None:
    session = RecordingSession()
    spent = 2 * NODES + MESSAGES_A_COMMIT + NODES // 4
    for _ in range(2):
        for _ in range(spent):
            session.check(model_pb2.Extend(tokens=[5], parents=[0], logprob_bytes=b"0"))
        session.on_opened(STATE)
    assert session.kinds == ["resend", "resend"]
    for _ in range(spent):
        session.check(model_pb2.Extend(tokens=[5], parents=[0], logprob_bytes=b"0"))
    with pytest.raises(FloodError):
        session.check(model_pb2.Extend(tokens=[5], parents=[0], logprob_bytes=b"0"))


def partial(
    ids: Sequence[int], *, answer: bool = True, vocabulary: int = VOCABULARY, base: int = 3
) -> model_pb2.Extend:
    """Return a message with log-probabilities of some tokens after the text."""
    values = np.full(len(ids), -1.0, dtype="<f2").tobytes()
    gaps = np.diff(ids, prepend=0).tolist()
    row = model_pb2.DraftDistribution(id_gaps=gaps, values=values, vocabulary_size=vocabulary, answer=answer)
    return model_pb2.Extend(base=base, distributions=[row])


def contrasted(*asked: int) -> RecordingSession:
    """Return a session whose draft is asked about tokens, if any."""
    session = RecordingSession(context(rule=Rule.CONTRASTIVE))
    if asked:
        session.on_query(query_message(DraftQuery(3, np.array(asked))))
        assert session.kinds == ["query"]
    return session


def test_a_draft_answers_what_it_was_asked() -> None:
    session = contrasted(3, 9)
    session.check(partial([4, 5], answer=False))  # sent before the query arrived
    session.check(partial([3, 9]))
    session.check(partial([4, 5], answer=False))
    whole = contrasted()
    whole.on_query(query_message(DraftQuery(3, None)))
    values = np.full(VOCABULARY, -1.0, dtype="<f2").tobytes()
    whole.check(model_pb2.Extend(base=3, distributions=[model_pb2.DraftDistribution(values=values, answer=True)]))


def test_a_draft_with_a_smaller_vocabulary_answers_as_far_as_it_goes() -> None:
    contrasted(3, VOCABULARY - 1).check(partial([3], vocabulary=VOCABULARY - 1))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (partial([3, 8]), "it answers with 2 tokens from 3 to 8, the query is about 2 tokens from 3 to 9"),
        (partial([3]), "it answers with 1 tokens from 3 to 3"),
        (partial([3, 9, 10]), "it answers with 3 tokens from 3 to 10"),
        (partial([3, VOCABULARY]), f"it has token {VOCABULARY}, its vocabulary has {VOCABULARY} tokens"),
        (partial([3, 9], vocabulary=9999), "it is over a vocabulary of 9999 tokens"),
        (partial([3, 3], answer=False), "token ids: must ascend"),
        (partial(range(1, MAX_PARTIAL_IDS + 2), answer=False), f"id_gaps: has {MAX_PARTIAL_IDS + 1} tokens"),
    ],
)
def test_a_draft_with_invalid_rows_is_given_up(message: model_pb2.Extend, why: str) -> None:
    with pytest.raises(InvalidDistributionError, match=why):
        contrasted(3, 9).check(message)


def test_an_answer_for_another_verifier_is_a_row_like_others() -> None:
    """It may be in flight when the text moves, and arrive after the query of the next verifier."""
    session = contrasted(3, 9)
    session.on_opened(STATE)
    session.on_query(query_message(DraftQuery(3, np.array([3, 10]))))
    session.check(partial([3, 9]))
    session.on_query(query_message(DraftQuery(4, np.array([3, 10]))))
    with pytest.raises(InvalidDistributionError):
        session.check(partial([3, 9], base=4))


def test_an_answer_about_an_earlier_text_is_a_row_like_others() -> None:
    """The text goes on if a row that the draft resent suffices, while the draft's answer is in flight."""
    session = contrasted(3, 9)
    session.on_commit(verifier_pb2.Commit(committed=model_pb2.Committed(base=3, tokens=[5])))
    session.on_query(query_message(DraftQuery(4, np.array([2, 8]))))
    session.check(partial([3, 9]))
    session.check(partial([2, 8], base=4))


def test_a_drafts_vocabulary_does_not_change() -> None:
    session = contrasted()
    session.check(partial([3], answer=False, vocabulary=VOCABULARY - 1))
    session.check(partial([4], answer=False, vocabulary=VOCABULARY - 1))
    with pytest.raises(InvalidDistributionError, match=f"has {VOCABULARY} tokens, it had {VOCABULARY - 1}"):
        session.check(partial([5], answer=False))


def test_a_draft_that_does_not_answer_is_given_up() -> None:
    session = RecordingSession(context(Peers(Pods(), failover_seconds=0.0), rule=Rule.CONTRASTIVE))
    session.on_query(query_message(DraftQuery(3, np.array([3, 9]))))
    for _ in range(2):
        session.on_awaited()
    assert isinstance(session.aborted_by, LaggingError)
    assert "it has not answered a query" in str(session.aborted_by)


def rows(count: int, width: int = 4, **fields: Any) -> model_pb2.Features:
    return model_pb2.Features(values=bytes(2 * width * count), **fields)


def reading(width: int) -> DraftSession:
    """Return a session, without messages yet, at a draft that reads features."""
    session = DraftSession(draft_pod(), context(), STATE)
    session.features = draft_pb2.FeatureFormat(fingerprint="f", width=width)
    return session


def queued(session: DraftSession) -> list[draft_pb2.DraftRequest]:
    return [session._outgoing.get_nowait() for _ in range(session._outgoing.qsize())]


def test_features_go_to_a_draft_that_reads_them() -> None:
    session = reading(4)
    session.on_features(rows(3, first=7))
    (message,) = queued(session)
    assert message.features == rows(3, first=7)
    began = time.monotonic()
    assert session.starved_since(began)
    session.on_features(rows(3))
    assert not session.starved_since(began)
    session.features = None
    assert not session.starved_since(began)
    queued(session)
    session.on_features(rows(3))
    assert not queued(session)


@pytest.mark.parametrize("values", [b"", bytes(7), bytes(12)])
def test_rows_that_are_not_whole_do_not_reach_it(values: bytes) -> None:
    session = reading(4)
    session.on_features(model_pb2.Features(values=values))
    assert not queued(session)


def test_a_draft_that_does_not_read_gets_no_more_features() -> None:
    session = reading(1 << 15)
    for first in range(1000):
        session.on_features(rows(4, 1 << 15, first=4 * first))
    kept = queued(session)
    assert sum(len(message.features.values) for message in kept) == MAX_UNWRITTEN_FEATURES
    session.send(draft_pb2.DraftRequest(resend=draft_pb2.Resend()))  # other messages are still sent
    assert len(queued(session)) == 1
