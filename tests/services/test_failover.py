"""Verifiers and drafts killed, frozen, drained, restarted or replaced in mid-stream: the client sees at most a pause,
and exactly the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from orchestrator.models.catalog import Catalog
from orchestrator.servicer import GenerationServicer
from orchestrator.text.request_timeline import EXPECTED
from specdec.client.errors import from_rpc
from specdec.decoding.noise import sample_seed
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.working_memory import MAX_STEP_CANDIDATES
from specdec.serving.messages import logprobs_message
from specdec.v2 import draft_pb2, draft_pb2_grpc, generation_pb2, generation_pb2_grpc, model_pb2, verifier_pb2
from tests.services.conftest import Directories
from tests.services.test_faults import rest_of
from tests.stack import Stack, VerifierPod, peers_at, request_of, served, stack, until
from verifier_service.servicer import VerifierLimits, VerifierServicer

PROMPT = [50, 60, 70, 80, 90]
CONTRASTIVE = model_pb2.ACCEPTANCE_RULE_CONTRASTIVE
GENEROUS = 20.0
"""Seconds for what takes a moment on an idle machine."""

ALWAYS = generation_pb2.Speculation(drafters=[model_pb2.DRAFTER_REMOTE], forced=True)
WARM = {"temperature": 0.8, "seed": 4}
PENALISED = {
    "temperature": 0.8,
    "seed": 9,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.1,
}


def slow_target() -> None:
    """Slow enough to fail in mid-stream."""
    time.sleep(0.01)


def drafted(responses: list[generation_pb2.GenerateResponse]) -> bool:
    return any(model_pb2.TOKEN_SOURCE_REMOTE_DRAFT in response.sources for response in responses)


class Reader:
    """A stream as its client reads it."""

    def __init__(self, services: Stack, **fields: Any) -> None:
        self._call = services.stub.Generate(request_of(PROMPT, **fields))
        self.responses: list[generation_pb2.GenerateResponse] = []
        self.longest_pause = 0.0

    async def read(self, tokens: int) -> None:
        """Read until this number of tokens has come."""
        while sum(len(r.tokens) for r in self.responses) < tokens:
            await self._one()

    async def rest(self) -> generation_pb2.Completion:
        """Return the whole completion once it is there."""
        while not self.responses or not self.responses[-1].HasField("finish"):
            await self._one()
        assert await self._call.read() is grpc.aio.EOF
        whole = generation_pb2.Completion(finish=self.responses[-1].finish)
        for response in self.responses:
            whole.text += response.text
            whole.tokens.extend(response.tokens)
            whole.sources.extend(response.sources)
            whole.logprobs.extend(response.logprobs)
        return whole

    def cancel(self) -> None:
        self._call.cancel()

    async def _one(self) -> None:
        begin = time.monotonic()
        response = await self._call.read()
        assert response is not grpc.aio.EOF
        self.longest_pause = max(self.longest_pause, time.monotonic() - begin)
        self.responses.append(response)


def serving(services: Stack) -> int:
    """Return the index of the verifier with the only session."""
    (number,) = (i for i, pod in enumerate(services.verifiers) if pod.loop.stats.running)
    return number


def drafting(services: Stack) -> int:
    """Return the index of the draft with the only session."""
    (number,) = (i for i, pod in enumerate(services.drafts) if pod.drafter.slots_used)
    return number


def sampler(sampling: dict[str, Any]) -> RequestSampler:
    return RequestSampler(Sampling(**(sampling | {"seed": sample_seed(sampling.get("seed", 0), 0)})))


def same(
    directories: Directories,
    want: generation_pb2.Completion,
    got: generation_pb2.Completion,
    sampling: dict[str, Any],
) -> None:
    """Check that all a client sees of two texts is equal, ties apart."""
    directories.oracle.same(PROMPT, list(want.tokens), list(got.tokens), sampler(sampling))
    if list(want.tokens) != list(got.tokens):
        return  # a tie
    assert got.text == want.text
    assert (got.finish.reason, got.finish.stop) == (want.finish.reason, want.finish.stop)
    assert got.finish.usage.prompt_tokens == want.finish.usage.prompt_tokens
    assert got.finish.usage.completion_tokens == want.finish.usage.completion_tokens
    assert len(got.logprobs) == len(want.logprobs)
    for a, b in zip(got.logprobs, want.logprobs, strict=True):
        assert a.chosen == pytest.approx(b.chosen, abs=1e-4)
        assert a.top_logprobs == pytest.approx(list(b.top_logprobs), abs=1e-4)
    assert got.finish.speculation.steps > 0
    assert sum(got.finish.speculation.sources.values()) == len(got.tokens) == len(got.sources)


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"speculation": ALWAYS},
    "penalties": {"sampling": PENALISED, "logprobs": 3},
    "end token": {"sampling": WARM, "min_tokens": 110, "ignore_end_token": False},
}


def changes(speculation: generation_pb2.SpeculationStatistics) -> dict[str, int]:
    """Return the counts of its pods' failures, without those for a draft that does not pay, which depend on the
    machine."""
    return {reason: count for reason, count in speculation.failover_events.items() if reason not in EXPECTED}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_killed_verifier_is_replaced(directories: Directories, name: str) -> None:
    fields = {"max_tokens": 120, "ignore_end_token": True} | REQUESTS[name]
    async with stack(directories.target, directories.near, verifiers=2, target_delay=slow_target) as services:
        want = await services.generate(PROMPT, **dict(fields))
        reader = Reader(services, **fields)
        await reader.read(30)
        await services.verifiers[serving(services)].stop()
        before = len(reader.responses)
        got = await reader.rest()
        same(directories, want, got, fields.get("sampling", {}))
        assert changes(got.finish.speculation) == {"verifier_lost": 1}
        assert got.finish.reproducible
        if fields.get("speculation") == ALWAYS:
            assert drafted(reader.responses[before + 5 :])  # its draft has moved with it
            assert got.finish.speculation.undrafted_reason in ("", "late")
        await until(lambda: services.idle)


async def test_a_stop_string_ends_a_text_that_has_moved(directories: Directories) -> None:
    """Part of it is decoded before the verifier is lost, and part after."""
    fields: dict[str, Any] = {"max_tokens": 120, "ignore_end_token": True, "sampling": WARM}
    async with stack(directories.target, directories.near, verifiers=2, target_delay=slow_target) as services:
        whole = await services.generate(PROMPT, **dict(fields))
        at = next(i for i in range(60, len(whole.text)) if whole.text.find(whole.text[i : i + 4]) == i)
        fields["stop"] = [whole.text[at : at + 4]]
        want = await services.generate(PROMPT, **dict(fields))
        assert want.finish.stop
        reader = Reader(services, **fields)
        await reader.read(len(want.tokens) // 2)
        await services.verifiers[serving(services)].stop()
        got = await reader.rest()
        same(directories, want, got, WARM)
        assert changes(got.finish.speculation) == {"verifier_lost": 1}


async def test_a_text_survives_every_pod_in_turn(directories: Directories) -> None:
    """Verifier and draft are killed and restarted in turn, again and again."""
    fields: dict[str, Any] = {"max_tokens": 200, "ignore_end_token": True, "sampling": WARM}
    async with stack(directories.target, directories.near, verifiers=2, drafts=2, target_delay=slow_target) as services:
        want = await services.generate(PROMPT, **dict(fields))
        reader = Reader(services, **fields)
        for round_ in range(1, 5):
            await reader.read(30 * round_)
            await until(lambda: any(pod.drafter.slots_used for pod in services.drafts))  # it comes back by itself
            for pod in (services.verifiers[serving(services)], services.drafts[drafting(services)]):
                await pod.stop()
                await pod.start()
        got = await reader.rest()
        same(directories, want, got, WARM)
        assert got.finish.speculation.failover_events["verifier_lost"] == 4
        assert got.finish.speculation.failover_events["draft_lost"] == 4
        await until(lambda: services.idle)


async def test_a_verifier_that_is_alone_is_waited_for(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 80, "ignore_end_token": True, "sampling": WARM}
    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        want = await services.generate(PROMPT, **dict(fields))
        reader = Reader(services, **fields)
        await reader.read(20)
        (pod,) = services.verifiers
        await pod.stop()
        (peer,) = services.peers.verifiers
        await until(lambda: peer.breaker.state != "closed")
        await pod.start()
        got = await reader.rest()
        same(directories, want, got, WARM)
        assert changes(got.finish.speculation) == {"verifier_lost": 1}


async def test_a_verifier_that_is_drained_hands_over(directories: Directories) -> None:
    """It ends its sessions at its deadline; meanwhile it takes no new ones."""
    fields: dict[str, Any] = {"max_tokens": 200, "ignore_end_token": True, "sampling": WARM}
    async with stack(directories.target, directories.near, verifiers=2, target_delay=slow_target) as services:
        want = await services.generate(PROMPT, **dict(fields))
        reader = Reader(services, **fields)
        await reader.read(20)
        drained = serving(services)
        draining = asyncio.create_task(services.verifiers[drained].stop(0.3))
        other = await services.generate(PROMPT, **(fields | {"max_tokens": 20}))
        assert list(other.tokens) == list(want.tokens)[:20]
        await draining
        got = await reader.rest()
        same(directories, want, got, WARM)
        assert changes(got.finish.speculation) == {"verifier_lost": 1}


async def test_a_verifier_lost_for_good_is_said_so(directories: Directories) -> None:
    async with stack(directories.target, directories.near, verifiers=2, failover_seconds=0.6) as services:
        call = services.stub.Generate(request_of(PROMPT, max_tokens=250, ignore_end_token=True))
        assert await call.read()
        for pod in services.verifiers:
            await pod.stop()
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await rest_of(call)
    assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
    assert from_rpc(lost.value).reason == "VERIFIER_LOST"
    for pod in services.verifiers:
        assert f"{pod.address} (" in str(lost.value.details())
    assert from_rpc(lost.value).request_id


async def test_a_deadline_holds_while_a_verifier_is_looked_for(directories: Directories) -> None:
    async with stack(directories.target, None) as services:
        await services.verifiers[0].stop()
        request = generation_pb2.CompleteRequest(request=request_of(PROMPT, max_tokens=10))
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await services.stub.Complete(request, timeout=0.5)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_cancel_ends_the_search_for_a_verifier(directories: Directories) -> None:
    async with stack(directories.target, directories.near) as services:
        await services.generate(PROMPT, max_tokens=20, speculation=ALWAYS)  # connected to all pods
        before = len(asyncio.all_tasks())
        reader = Reader(services, max_tokens=250, ignore_end_token=True)
        await reader.read(1)
        await services.verifiers[0].stop()
        (peer,) = services.peers.verifiers
        await until(lambda: peer.breaker.state != "closed")
        reader.cancel()
        await until(lambda: len(asyncio.all_tasks()) <= before)


# --- verifiers that are there, and do not serve ---------------------------------------------------


class Frozen(VerifierServicer):
    """Stops answering completely, like a stopped process; or sends what the test specifies."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.changed: Callable[[verifier_pb2.VerifyResponse], verifier_pb2.VerifyResponse] = lambda response: response

    async def run(self, requests: Any, context: Any) -> None:
        through: Any = FrozenContext(self, context)
        await super().run(requests, through)


class FrozenContext:
    def __init__(self, service: Frozen, context: Any) -> None:
        self._service = service
        self._context = context

    def time_remaining(self) -> float | None:
        left: float | None = self._context.time_remaining()
        return left

    async def write(self, response: verifier_pb2.VerifyResponse) -> None:
        await self._service.thawed.wait()
        await self._context.write(self._service.changed(response))


def service_of(services: Stack, number: int) -> Frozen:
    service = services.verifiers[number].service
    assert isinstance(service, Frozen)
    return service


async def test_a_frozen_verifier_is_left(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 80, "ignore_end_token": True, "sampling": WARM}
    async with stack(
        directories.target, directories.near, verifiers=2, target_delay=slow_target, verifier_kind=Frozen
    ) as services:
        want = await services.generate(PROMPT, **dict(fields))
        reader = Reader(services, **fields)
        await reader.read(20)
        frozen = service_of(services, serving(services))
        frozen.thawed.clear()
        got = await reader.rest()
        same(directories, want, got, WARM)
        assert changes(got.finish.speculation) == {"verifier_lost": 1}
        assert reader.longest_pause < 3 * 3  # 3 s on an idle machine
        frozen.thawed.set()
        await until(lambda: services.idle)


async def test_a_frozen_verifier_is_not_waited_for_at_the_beginning(directories: Directories) -> None:
    async with stack(directories.target, None, verifiers=2, verifier_kind=Frozen, silence_seconds=0.6) as services:
        service_of(services, 0).thawed.clear()
        answers = await asyncio.gather(*(services.generate(PROMPT, max_tokens=10) for _ in range(8)))
        assert [len(a.tokens) for a in answers] == 8 * [10]
        service_of(services, 0).thawed.set()


class Gate:
    """Blocks forward passes while closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def __call__(self) -> None:
        self._open.wait()
        time.sleep(0.005)


class Gates:
    """One gate per verifier thread."""

    def __init__(self) -> None:
        self._gates: dict[threading.Thread, Gate] = {}

    def __call__(self) -> None:
        self._gates.setdefault(threading.current_thread(), Gate())()

    def of(self, pod: VerifierPod) -> Gate:
        (gate,) = (gate for thread, gate in self._gates.items() if thread is pod.loop._thread)
        return gate


async def test_a_verifier_that_answers_and_does_not_step_is_left(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "ignore_end_token": True, "sampling": WARM}
    gates = Gates()
    async with stack(directories.target, directories.near, verifiers=2, target_delay=gates) as services:
        want = await services.generate(PROMPT, **dict(fields))
        reader = Reader(services, **fields)
        await reader.read(10)
        with gates.of(services.verifiers[serving(services)]).closed():
            got = await reader.rest()
        same(directories, want, got, WARM)
        assert changes(got.finish.speculation) == {"verifier_lost": 1}
        await until(lambda: services.idle)


async def test_a_verifier_that_is_alone_may_take_long_over_a_step(directories: Directories) -> None:
    gates = Gates()
    async with stack(directories.target, directories.near, target_delay=gates) as services:
        reader = Reader(services, max_tokens=60, ignore_end_token=True)
        await reader.read(10)
        with gates.of(services.verifiers[0]).closed():
            await asyncio.sleep(3.0)  # longer than the time limit of any other pod
        got = await reader.rest()
        assert "verifier_lost" not in got.finish.speculation.failover_events


async def test_a_commit_out_of_place_is_not_taken(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "ignore_end_token": True, "sampling": WARM}

    def shifted(response: verifier_pb2.VerifyResponse) -> verifier_pb2.VerifyResponse:
        if response.commit.committed.tokens:
            response.commit.committed.base += 1
        return response

    async with stack(
        directories.target, directories.near, verifiers=2, target_delay=slow_target, verifier_kind=Frozen
    ) as services:
        want = await services.generate(PROMPT, **dict(fields))
        reader = Reader(services, **fields)
        await reader.read(10)
        service_of(services, serving(services)).changed = shifted
        got = await reader.rest()
        same(directories, want, got, WARM)
        assert changes(got.finish.speculation) == {"verifier_lost": 1}


async def test_nobody_leaves_a_verifier_that_has_nothing_to_do_for_it(directories: Directories) -> None:
    """It waits for a slow draft, and shows that by reporting no step in progress."""
    async with stack(
        directories.target, directories.near, delay=lambda: time.sleep(0.7), silence_seconds=0.5
    ) as services:
        got = await services.generate(PROMPT, max_tokens=3, ignore_end_token=True, rule=CONTRASTIVE)
        assert len(got.tokens) == 3
        assert not got.finish.speculation.failover_events


# --- other models ---------------------------------------------------------------------------------


def second(field: str) -> Any:
    """Return a disguise: the second verifier differs in one field."""

    def disguise(number: int, identity: model_pb2.ModelIdentity) -> None:
        if number == 1:
            setattr(identity, field, "another")

    return disguise


async def begun_elsewhere(services: Stack, number: int, **fields: Any) -> Reader:
    """Begin a text at any verifier but this one."""
    while True:
        reader = Reader(services, **fields)
        await reader.read(10)
        if serving(services) != number:
            return reader
        reader.cancel()
        await until(lambda: services.idle)


async def lost_to_the_second(services: Stack, **fields: Any) -> Reader:
    """Begin a text at the first of two verifiers, then kill that verifier."""
    reader = await begun_elsewhere(services, 1, **fields)
    await services.verifiers[0].stop()
    return reader


@pytest.mark.parametrize("returns", [True, False])
async def test_a_text_is_never_spliced_from_two_models(directories: Directories, returns: bool) -> None:
    fields: dict[str, Any] = {"max_tokens": 100, "ignore_end_token": True, "sampling": WARM}
    async with stack(
        directories.target,
        None,
        verifiers=2,
        target_delay=slow_target,
        disguise=second("model_fingerprint"),
        failover_seconds=GENEROUS if returns else 0.5,
    ) as services:
        want = await services.generate(PROMPT, **dict(fields))
        reader = await lost_to_the_second(services, **fields)
        if returns:
            await services.verifiers[0].start()
            same(directories, want, await reader.rest(), WARM)
            return
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await reader.rest()
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        assert from_rpc(lost.value).reason == "MODEL_CHANGED"


async def test_a_text_is_taken_up_on_its_revision_only(directories: Directories) -> None:
    async with stack(directories.target, None, verifiers=2, disguise=second("model_fingerprint")) as services:
        call = services.stub.Generate(request_of(PROMPT, max_tokens=5))
        revision = (await call.read()).model_fingerprint
        assert revision
        call.cancel()
        for wanted in ("another", revision, "another", revision):  # whichever pod is tried first
            answer = services.stub.Generate(request_of(PROMPT, max_tokens=5, model_fingerprint=wanted))
            assert (await answer.read()).model_fingerprint == wanted
            answer.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await services.generate(PROMPT, max_tokens=5, model_fingerprint="a third")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert from_rpc(refused.value).reason == "MODEL_CHANGED"


async def test_other_numerics_are_told(directories: Directories) -> None:
    async with stack(
        directories.target, None, verifiers=2, target_delay=slow_target, disguise=second("numerics_fingerprint")
    ) as services:
        reader = await lost_to_the_second(services, max_tokens=40, ignore_end_token=True)
        got = await reader.rest()
    assert len(got.tokens) == 40
    assert not got.finish.reproducible
    assert got.finish.numerics_fingerprint == "another"
    assert changes(got.finish.speculation) == {"verifier_lost": 1, "numerics_changed": 1}


async def test_equal_numerics_are_preferred(directories: Directories) -> None:
    async with stack(
        directories.target, None, verifiers=3, target_delay=slow_target, disguise=second("numerics_fingerprint")
    ) as services:
        for _ in services.verifiers:  # each has reported its own
            await services.generate(PROMPT, max_tokens=2)
        reader = await begun_elsewhere(services, 1, max_tokens=60, ignore_end_token=True)
        await services.verifiers[serving(services)].stop()
        got = await reader.rest()
    assert changes(got.finish.speculation) == {"verifier_lost": 1}
    assert got.finish.reproducible


# --- drafts ---------------------------------------------------------------------------------------


async def test_a_killed_draft_is_replaced(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 150, "ignore_end_token": True, "sampling": WARM, "speculation": ALWAYS}
    async with stack(directories.target, directories.near, drafts=2, target_delay=slow_target) as services:
        want = await services.generate(PROMPT, **dict(fields))
        reader = Reader(services, **fields)
        await reader.read(20)
        await services.drafts[drafting(services)].stop()
        await reader.read(40)
        await until(lambda: any(pod.drafter.slots_used for pod in services.drafts), GENEROUS)
        got = await reader.rest()
        same(directories, want, got, WARM)
        s = got.finish.speculation
        assert changes(s) == {"draft_lost": 1}
        assert s.undrafted_reason in ("", "late")
        assert drafted(reader.responses[-20:])


async def test_a_draft_comes_back_to_a_long_text(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 240, "ignore_end_token": True, "sampling": WARM, "speculation": ALWAYS}
    async with stack(directories.target, directories.near, target_delay=lambda: time.sleep(0.04)) as services:
        reader = Reader(services, **fields)
        await reader.read(20)
        (draft,) = services.drafts
        await draft.stop()
        await until(lambda: not draft.drafter.slots_used)
        await draft.start()
        got = await reader.rest()
        assert len(got.tokens) == 240
        s = got.finish.speculation
        assert (s.failover_events["draft_lost"], s.failover_events["draft_back"]) == (1, 1)
        assert s.undrafted_reason == "draft_lost"
        assert drafted(reader.responses[-20:])


class Wrong(draft_pb2_grpc.DraftServiceServicer):
    """A draft that answers every commit with the same token."""

    name = "specdec.v2.DraftService"

    def __init__(self, identity: model_pb2.ModelIdentity, token: int) -> None:
        self._identity = identity
        self._token = token

    def register(self, server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    async def close(self) -> None:
        pass

    async def GetStats(
        self, request: draft_pb2.DraftServiceGetStatsRequest, context: Any
    ) -> draft_pb2.DraftServiceGetStatsResponse:
        return draft_pb2.DraftServiceGetStatsResponse()

    async def Draft(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await context.write(draft_pb2.DraftResponse(opened=draft_pb2.DraftOpened(identity=self._identity)))
        async for request in request_iterator:
            text = request.committed
            if request.HasField("open"):
                base = len(request.open.prompt_tokens) + len(request.open.generated_tokens)
            elif text.tokens:
                base = text.base + len(text.tokens)
            extend = model_pb2.Extend(
                base=base, tokens=[self._token], parents=[0], logprob_bytes=logprobs_message([-0.1])
            )
            await context.write(draft_pb2.DraftResponse(extend=extend))


async def test_a_useless_draft_is_left_alone(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 200, "ignore_end_token": True}
    async with stack(directories.target, None, target_delay=slow_target) as services:
        want = await services.generate(PROMPT, **dict(fields))
        token = next(token for token in range(3, 256) if token not in want.tokens)
        draft = Wrong(services.verifiers[0].service.identity, token)
        async with (
            served(draft) as (address, _),
            served(GenerationServicer(Catalog.of(services.model, peers_at(services, address)))) as (front, _),
            grpc.aio.insecure_channel(front) as channel,
        ):
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            request = request_of(PROMPT, speculation=ALWAYS, **fields)
            (got,) = (await stub.Complete(generation_pb2.CompleteRequest(request=request))).completions
    directories.oracle.same(PROMPT, list(want.tokens), list(got.tokens), sampler({}))
    assert got.finish.speculation.failover_events["draft_useless"] == 1
    assert got.finish.speculation.undrafted_reason == "draft_useless"


async def test_a_text_that_cannot_be_drafted_says_nothing_of_its_draft(directories: Directories) -> None:
    """However many such texts follow, the pod stays in use."""
    fields: dict[str, Any] = {"max_tokens": 220, "ignore_end_token": True}
    async with stack(directories.target, None, target_delay=slow_target) as services:
        want = await services.generate(PROMPT, **dict(fields))
        token = next(token for token in range(3, 256) if token not in want.tokens)
        draft = Wrong(services.verifiers[0].service.identity, token)
        async with served(draft) as (address, _):
            peers = peers_at(services, address)
            assert peers.drafts is not None
            (pod,) = peers.drafts
            async with (
                served(GenerationServicer(Catalog.of(services.model, peers))) as (front, _),
                grpc.aio.insecure_channel(front) as channel,
            ):
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                request = generation_pb2.CompleteRequest(request=request_of(PROMPT, speculation=ALWAYS, **fields))
                for answer in await asyncio.gather(*(stub.Complete(request) for _ in range(4))):
                    assert answer.completions[0].finish.speculation.failover_events["draft_useless"]
                    assert pod.breaker.state == "closed"


async def test_contrast_goes_on_with_another_draft(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "ignore_end_token": True, "rule": CONTRASTIVE}
    async with stack(directories.target, directories.near, verifiers=2, drafts=2, target_delay=slow_target) as services:
        want = await services.generate(PROMPT, **dict(fields))
        reader = Reader(services, **fields)
        await reader.read(10)
        await services.drafts[drafting(services)].stop()
        await reader.read(25)
        await services.verifiers[serving(services)].stop()
        got = await reader.rest()
        assert list(got.tokens) == list(want.tokens)
        assert changes(got.finish.speculation) == {"draft_lost": 1, "verifier_lost": 1}
        await until(lambda: services.idle)


async def test_contrast_waits_for_a_draft_to_return(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 40, "ignore_end_token": True, "rule": CONTRASTIVE}
    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        want = await services.generate(PROMPT, **dict(fields))
        reader = Reader(services, **fields)
        await reader.read(10)
        (draft,) = services.drafts
        await draft.stop()
        await until(lambda: not draft.drafter.slots_used)
        await draft.start()
        got = await reader.rest()
        assert list(got.tokens) == list(want.tokens)


async def test_rejection_survives_both(directories: Directories) -> None:
    """Its tokens depend on the offered candidates; none is lost, none is repeated."""
    async with stack(directories.target, directories.near, verifiers=2, drafts=2, target_delay=slow_target) as services:
        reader = Reader(
            services,
            max_tokens=120,
            ignore_end_token=True,
            rule=model_pb2.ACCEPTANCE_RULE_REJECTION,
            sampling={"temperature": 1.0, "seed": 3},
        )
        await reader.read(30)
        await services.verifiers[serving(services)].stop()
        await reader.read(60)
        await services.drafts[drafting(services)].stop()
        got = await reader.rest()
        assert len(got.tokens) == got.finish.usage.completion_tokens == 120
        assert not got.finish.reproducible


async def test_many_texts_move(directories: Directories) -> None:
    """Every session of a verifier finds a place on the other, whatever may be waiting there."""
    fields: dict[str, Any] = {"max_tokens": 120, "ignore_end_token": True, "sampling": WARM}
    async with stack(
        directories.target, directories.near, verifiers=2, drafts=2, target_delay=slow_target, capacity=2048
    ) as services:
        want = await services.generate(PROMPT, **dict(fields))
        readers = [Reader(services, **fields) for _ in range(16)]
        await asyncio.gather(*(reader.read(5) for reader in readers))
        assert all(pod.loop.stats.running for pod in services.verifiers)  # they were spread
        await services.verifiers[0].stop()
        answers = await asyncio.gather(*(reader.rest() for reader in readers))
        moved = sum(answer.finish.speculation.failover_events.get("verifier_lost", 0) for answer in answers)
        assert moved >= 4
        for answer in answers:
            directories.oracle.same(PROMPT, list(want.tokens), list(answer.tokens), sampler(WARM))
        await until(lambda: services.idle)


async def test_who_moves_is_not_turned_away(directories: Directories) -> None:
    """Two texts that lost their verifier wait at the other, whose only waiting place is taken."""
    limits = VerifierLimits(max_waiting=1)
    text = [3 + i % 200 for i in range(2 * BLOCK + 20)]  # as large as the memory

    async def complete(tenant: str) -> generation_pb2.Completion:
        """Run one as its own tenant, so that no verifier is preferred for its cached prefix."""
        return await services.generate(text, max_tokens=20, ignore_end_token=True, tenant=tenant)

    gates = Gates()
    async with stack(
        directories.target,
        None,
        verifiers=2,
        target_delay=gates,
        verifier_limits=limits,
        capacity=MAX_STEP_CANDIDATES + 4 * BLOCK,
        stuck_seconds=60,
    ) as services:
        want = await complete("first")
        assert list((await complete("second")).tokens) == list(want.tokens)  # each has made its steps, and has a gate
        with gates.of(services.verifiers[0]).closed(), gates.of(services.verifiers[1]).closed():
            texts = []
            for number in range(4):
                texts.append(asyncio.create_task(complete(str(number))))
                await until(lambda: sum(p.service.capacity().sessions for p in services.verifiers) == number + 1)  # noqa: B023
            assert [pod.service.capacity().sessions for pod in services.verifiers] == [2, 2]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await complete("one too many")
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await services.verifiers[0].stop()
            await until(lambda: services.verifiers[1].service.capacity().sessions == 4)
        answers = await asyncio.gather(*texts)
    assert [list(answer.tokens) for answer in answers] == 4 * [list(want.tokens)]
    assert sum(answer.finish.speculation.failover_events["verifier_lost"] for answer in answers) == 2
