"""A text without a draft, or with a late one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from orchestrator.generation import draft_session
from orchestrator.generation.drafting import Drafting
from orchestrator.generation.speculation_policy import SpeculationState
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from specdec.decoding.sampling import Rule
from specdec.decoding.speculation import ALL_DRAFTERS, NO_DRAFTERS, OWN_DRAFTERS, CandidateSource, SpeculationOptions
from specdec.serving.errors import OverloadedError, PeerLostError, ServiceError, to_status
from specdec.v2 import draft_pb2, draft_pb2_grpc, model_pb2, verifier_pb2
from tests.orchestrator.samples import MODEL, context
from tests.orchestrator.servers import addresses


class Sink:
    """Records what drafting sends to a verifier."""

    def __init__(self) -> None:
        self.policies: list[verifier_pb2.VerifyPolicy] = []
        self.errors: list[ServiceError] = []

    async def extend(self, extend: model_pb2.Extend) -> None:
        raise AssertionError("there is nobody to send candidates")

    async def set_policy(self, policy: verifier_pb2.VerifyPolicy) -> None:
        self.policies.append(policy)

    def abort(self, error: ServiceError) -> None:
        self.errors.append(error)


@pytest.mark.parametrize(
    ("drafters", "reason"), [(ALL_DRAFTERS, "no_draft"), (OWN_DRAFTERS, "off"), (NO_DRAFTERS, "off")]
)
async def test_without_drafts_only_others_may_propose(drafters: frozenset[CandidateSource], reason: str) -> None:
    text = context(speculation=SpeculationOptions(drafters))
    assert model_pb2.DRAFTER_REMOTE not in SpeculationState.initial(text).verify_policy(text).drafters
    async with Drafting(text, Sink()) as drafting:
        drafting.on_opened(verifier_pb2.VerifyOpened(max_nodes=8))
        assert drafting.undrafted_reason == reason


async def test_contrast_without_drafts_is_ended_by_every_verifier_that_opens_it() -> None:
    sink = Sink()
    async with Drafting(context(rule=Rule.CONTRASTIVE), sink) as drafting:
        assert not sink.errors
        for opened in range(1, 3):
            drafting.on_opened(verifier_pb2.VerifyOpened(max_nodes=8))
            assert len(sink.errors) == opened
    error = sink.errors[0]
    assert isinstance(error, PeerLostError)
    assert error.reason == "DRAFT_REQUIRED"


async def test_a_draft_is_hoped_for_where_one_may_be_asked() -> None:
    peers = Peers(Pods(), Pods(["127.0.0.1:1"]))
    text = context(peers)
    assert model_pb2.DRAFTER_REMOTE in SpeculationState.initial(text).verify_policy(text).drafters
    async with Drafting(text, Sink()) as drafting:
        assert not drafting.undrafted_reason
    await peers.close()


def commit(undrafted: int = 0) -> verifier_pb2.Commit:
    return verifier_pb2.Commit(committed=model_pb2.Committed(tokens=[5, 6]), steps=2, undrafted_tokens=undrafted)


async def test_the_time_without_a_draft_that_cannot_be_had_is_counted() -> None:
    peers, sink = Peers(Pods(), Pods(["127.0.0.1:1"])), Sink()
    text = context(peers)
    begin = time.monotonic()
    async with Drafting(text, sink) as drafting:
        drafting.on_opened(verifier_pb2.VerifyOpened(max_nodes=8, drafting_wanted=True))
        async with asyncio.timeout(20):
            while not sink.policies:  # those without the draft
                await asyncio.sleep(0.01)
        drafting.on_commit(commit())  # until the first commit, the text is in prefill
        assert not text.fallback_seconds
        drafting.on_commit(commit())
        drafting.on_commit(commit())
    assert text.fallback_seconds.keys() == {"no_draft"}
    assert 0 < text.fallback_seconds["no_draft"] < time.monotonic() - begin
    await peers.close()


async def test_the_time_of_steps_whose_draft_is_late_is_counted() -> None:
    peers = Peers(Pods(), Pods(["127.0.0.1:1"]))
    text = context(peers)
    async with Drafting(text, Sink()) as drafting:  # no draft is wanted yet, so none is contacted
        drafting.on_opened(verifier_pb2.VerifyOpened(max_nodes=8))
        for undrafted in (2, 0, 0):
            drafting.on_commit(commit(undrafted))
        assert not text.fallback_seconds
        drafting.on_commit(commit(2))
    assert text.fallback_seconds.keys() == {"late"}
    await peers.close()


@pytest.mark.parametrize("fields", [{"speculation": SpeculationOptions(OWN_DRAFTERS)}, {"rule": Rule.CONTRASTIVE}])
async def test_a_text_that_wants_no_draft_or_waits_for_it_does_not_go_on_without(fields: dict[str, Any]) -> None:
    peers = Peers(Pods(), Pods(["127.0.0.1:1"]))
    text = context(peers, **fields)
    async with Drafting(text, Sink()) as drafting:
        for _ in range(3):
            drafting.on_commit(commit(2))
    assert not text.fallback_seconds
    await peers.close()


class Mute(draft_pb2_grpc.DraftServiceServicer):
    """A draft that opens sessions and sends useless candidates, but never a distribution."""

    def __init__(self) -> None:
        self.opened = 0

    async def Draft(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        await self.begin(context)
        await asyncio.Event().wait()

    async def begin(self, context: Any, **fields: Any) -> None:
        """Open a session, and send candidates once."""
        self.opened += 1
        identity = model_pb2.ModelIdentity(
            protocol_version=2, tokenizer_fingerprint=MODEL.tokenizer_fingerprint, context_tokens=MODEL.context
        )
        await context.write(draft_pb2.DraftResponse(opened=draft_pb2.DraftOpened(identity=identity, **fields)))
        await context.write(draft_pb2.DraftResponse(extend=model_pb2.Extend()))

    async def GetStats(self, request: Any, context: Any) -> draft_pb2.DraftServiceGetStatsResponse:
        raise NotImplementedError


class Leaving(Mute):
    """A draft that ends each session on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = asyncio.Event()

    async def Draft(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        self.leave.clear()
        session = asyncio.create_task(super().Draft(requests, context))
        await self.leave.wait()
        session.cancel()


class Full(Mute):
    """A draft without capacity."""

    async def Draft(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        self.opened += 1
        await context.abort_with_status(to_status(OverloadedError("full", 60.0)))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_lost_draft_is_replaced_when_one_is_wanted() -> None:
    """It is not replaced while candidates would go unused, even after repeated lookups."""
    draft, sink = Leaving(), PatientSink()
    async with addresses(draft_pb2_grpc.add_DraftServiceServicer_to_server, draft) as found:
        peers = Peers(Pods(), Pods(found, connect=grpc.aio.insecure_channel))
        text = context(peers)
        async with Drafting(text, sink) as drafting:
            drafting.on_opened(verifier_pb2.VerifyOpened(max_nodes=8, drafting_wanted=True))
            await until(lambda: sink.extends)
            drafting.on_commit(commit())  # a commit that wants no draft
            draft.leave.set()
            await until(lambda: text.timeline.failover_events["draft_lost"])
            await until(lambda: drafting._session is None)
            assert drafting._state.drafted  # as before the first draft
            assert draft.opened == 1
            drafting.on_commit(verifier_pb2.Commit(drafting_wanted=True, steps=1))
            await until(lambda: draft.opened == 2)
        await peers.close()


async def test_a_draft_that_is_full_for_a_text_is_left_alone_by_it_unless_it_needs_one() -> None:
    """Other texts may be shorter, so they try it."""
    draft, sinks = Full(), [Sink(), Sink()]
    wanted = verifier_pb2.VerifyOpened(max_nodes=8, drafting_wanted=True)
    async with addresses(draft_pb2_grpc.add_DraftServiceServicer_to_server, draft) as found:
        peers = Peers(Pods(), Pods(found, connect=grpc.aio.insecure_channel))
        async with Drafting(context(peers), sinks[0]) as first, Drafting(context(peers), sinks[1]) as second:
            first.on_opened(wanted)
            await until(lambda: sinks[0].policies)
            second.on_opened(wanted)
            await until(lambda: all(len(sink.policies) >= 3 for sink in sinks))  # rounds without a draft
            assert draft.opened == 2
            async with Drafting(context(peers, rule=Rule.CONTRASTIVE), Sink()) as needing:
                needing.on_opened(wanted)
                await until(lambda: draft.opened >= 4)
        await peers.close()


class PatientSink(Sink):
    def __init__(self) -> None:
        super().__init__()
        self.extends = 0

    async def extend(self, extend: model_pb2.Extend) -> None:
        self.extends += 1


async def test_contrast_waits_no_longer_for_several_useless_drafts_than_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The drafts take turns: each is active, and none sends the distributions that the text waits for."""
    monkeypatch.setattr(draft_session, "LATE_SHARE", 0.2)
    drafts, sink = [Mute(), Mute()], PatientSink()
    async with addresses(draft_pb2_grpc.add_DraftServiceServicer_to_server, *drafts) as found:
        peers = Peers(Pods(), Pods(found, connect=grpc.aio.insecure_channel), failover_seconds=2.5)
        async with Drafting(context(peers, rule=Rule.CONTRASTIVE), sink) as drafting:
            drafting.on_opened(verifier_pb2.VerifyOpened(max_nodes=8, drafting_wanted=True))
            async with asyncio.timeout(60):
                while not sink.errors:
                    if drafts[0].opened or drafts[1].opened:
                        drafting.on_awaited()
                    await asyncio.sleep(0.05)
        await peers.close()
    assert all(draft.opened for draft in drafts)
    (error,) = sink.errors
    assert isinstance(error, PeerLostError)
    assert error.reason == "DRAFT_REQUIRED"


async def test_undrafted_tokens_have_a_reason_whatever_the_request_leaves_open() -> None:
    """By default, the verifier decides which steps are drafted."""
    peers = Peers(Pods(), Pods(["127.0.0.1:1"]))
    async with Drafting(context(peers), Sink()) as drafting:
        drafting.on_opened(verifier_pb2.VerifyOpened(max_nodes=8))
        drafting.on_commit(commit())
        assert not drafting.undrafted_reason
        drafting.on_commit(commit(undrafted=2))
        assert (drafting.undrafted_tokens, drafting.undrafted_reason) == (2, "late")
    await peers.close()


class Curious(Mute):
    """A draft that asks for log-probabilities of the target, and records the commits that it gets."""

    def __init__(self, keeps: bool, asks: int) -> None:
        super().__init__()
        self._keeps, self._asks = keeps, asks
        self.heard: list[model_pb2.Committed] = []

    async def Draft(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        await self.begin(context, keeps_text=self._keeps, overruled_logprobs=self._asks)
        async for request in requests:
            if request.HasField("committed"):
                self.heard.append(request.committed)


@pytest.mark.parametrize(
    ("learn", "keeps", "asks", "gets"),
    [(True, True, 200, 64), (True, True, 5, 5), (True, True, 0, 0), (False, True, 64, 0), (True, False, 64, 0)],
)
async def test_a_draft_gets_log_probabilities_of_texts_that_it_keeps_with_permission(
    learn: bool, keeps: bool, asks: int, gets: int
) -> None:
    draft, sink = Curious(keeps, asks), PatientSink()
    async with addresses(draft_pb2_grpc.add_DraftServiceServicer_to_server, draft) as found:
        peers = Peers(Pods(), Pods(found, connect=grpc.aio.insecure_channel))
        async with Drafting(context(peers, learn=learn), sink) as drafting:
            drafting.on_opened(verifier_pb2.VerifyOpened(max_nodes=8, drafting_wanted=True))
            await until(lambda: sink.extends)
            assert sink.policies[-1].overruled_logprobs == gets
            sent = verifier_pb2.Commit(committed=model_pb2.Committed(tokens=[5, 6]), steps=2, drafting_wanted=True)
            sent.committed.overruled.add(position=1, tokens=[6], logprobs=b"\0\0")
            drafting.on_commit(sent)
            await until(lambda: draft.heard)
            assert len(draft.heard[0].overruled) == (gets > 0)
        await peers.close()


class Hungry(Leaving):
    """A draft that reads features, and records those that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.fed: list[int] = []  # first positions of messages

    async def begin(self, context: Any, **fields: Any) -> None:
        await super().begin(context, features=draft_pb2.FeatureFormat(fingerprint="f", width=2))

    async def Draft(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        reading = asyncio.create_task(self._note(requests))
        await super().Draft(requests, context)
        reading.cancel()

    async def _note(self, requests: Any) -> None:
        async for request in requests:
            if request.HasField("features"):
                self.fed.append(request.features.first)


FEEDING = verifier_pb2.VerifyOpened(max_nodes=8, drafting_wanted=True, features_fingerprint="f")


def rows(session: int, first: int) -> model_pb2.Features:
    return model_pb2.Features(session=session, first=first, values=bytes(8))


async def test_a_draft_gets_the_features_that_its_session_asked_for() -> None:
    """Features for an earlier session may be in flight: a draft that read them would treat the next ones as known."""
    draft, sink = Hungry(), PatientSink()
    async with addresses(draft_pb2_grpc.add_DraftServiceServicer_to_server, draft) as found:
        peers = Peers(Pods(), Pods(found, connect=grpc.aio.insecure_channel))
        async with Drafting(context(peers), sink) as drafting:
            drafting.on_opened(FEEDING)
            await until(lambda: sink.extends)
            assert sink.policies[-1].features_session == 1
            drafting.on_features(rows(1, 0))
            await until(lambda: draft.fed == [0])
            draft.leave.set()
            await until(lambda: draft.opened == 2 and sink.extends == 2)
            assert sink.policies[-1].features_session == 2
            drafting.on_features(rows(1, 2))
            drafting.on_features(rows(2, 7))
            await until(lambda: draft.fed == [0, 7])
        await peers.close()


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_draft_that_reads_other_features_is_left_alone_by_this_text(at_once: bool) -> None:
    """This holds whether its verifier never sent them or a verifier that took over does not."""
    draft, sink = Hungry(), PatientSink()
    other = verifier_pb2.VerifyOpened(max_nodes=8, drafting_wanted=True, features_fingerprint="g")
    async with addresses(draft_pb2_grpc.add_DraftServiceServicer_to_server, draft) as found:
        peers = Peers(Pods(), Pods(found, connect=grpc.aio.insecure_channel))
        text = context(peers)
        async with Drafting(text, sink) as drafting:
            if not at_once:
                drafting.on_opened(FEEDING)
                await until(lambda: sink.extends)
            drafting.on_opened(other)
            await until(lambda: "does not send" in drafting._last_failure[1])
            await until(lambda: sink.policies and model_pb2.DRAFTER_REMOTE not in sink.policies[-1].drafters)
        assert peers.drafts is not None
        assert [pod.breaker.state for pod in peers.drafts] == ["closed"]
        assert not text.timeline.failover_events["draft_lost"]
        await peers.close()
