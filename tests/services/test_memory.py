"""The verifier's memory as a client sees it: waiting for it, preemption, sharing, and its use in statistics."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from orchestrator.models.catalog import Catalog
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.servicer import GenerationServicer
from specdec.client.errors import InvalidRequest, from_rpc
from specdec.decoding.noise import sample_seed
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.engine.kv.blocks import BLOCK
from specdec.v2 import generation_pb2, generation_pb2_grpc, model_pb2, verifier_pb2, verifier_pb2_grpc
from tests.services.conftest import Directories
from tests.services.test_equality import slow_target
from tests.stack import ALWAYS, Stack, request_of, served, stack, until
from tests.verifier_service.step_loop.helpers import expect_no_growth
from verifier_service.servicer import VerifierLimits

PROMPT = [50 + i % 60 for i in range(2 * BLOCK + 20)]
NEVER_AT_ONCE = 20.0
"""Timeout in seconds: the awaited conditions take milliseconds, and longer on a busy machine."""


def prompts(count: int, length: int) -> list[list[int]]:
    """Return prompts without a common prefix."""
    return [[3 + number] + [40 + (7 * i) % 90 for i in range(length - 1)] for number in range(count)]


async def load_of(services: Stack) -> verifier_pb2.GetStatsResponse:
    async with grpc.aio.insecure_channel(services.verifiers[0].address) as channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        load: verifier_pb2.GetStatsResponse = await stub.GetStats(verifier_pb2.GetStatsRequest())
    return load


class Gate:
    """Blocks the target's forward passes while closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def __call__(self) -> None:
        self._open.wait()

    @contextmanager
    def closed(self) -> Iterator[None]:
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


@asynccontextmanager
async def gated(directories: Directories, **options: Any) -> AsyncIterator[tuple[Stack, Gate]]:
    gate = Gate()
    async with stack(directories.target, None, target_delay=gate, **options) as services:
        yield services, gate


def begin(services: Stack, prompt: list[int], tokens: int, **fields: Any) -> asyncio.Task[generation_pb2.Completion]:
    return asyncio.create_task(services.generate(prompt, max_tokens=tokens, ignore_end_token=True, **fields))


async def test_more_sessions_than_fit_wait_their_turn(directories: Directories) -> None:
    """Waiting sessions get the same tokens as alone."""
    texts = prompts(4, 30)
    async with stack(directories.target, None) as services:
        want = [list((await begin(services, prompt, 90)).tokens) for prompt in texts]
    async with stack(directories.target, None, capacity=256 + 4 * BLOCK) as services:
        assert services.verifier_loop.context == 3 * BLOCK  # one such text, and half of another
        got = [list(c.tokens) for c in await asyncio.gather(*(begin(services, prompt, 90) for prompt in texts))]
        await until(lambda: services.verifier_loop.pool.held == 0)
    check(directories, texts, want, got)


def check(directories: Directories, texts: list[list[int]], want: list[list[int]], got: list[list[int]]) -> None:
    for prompt, a, b in zip(texts, want, got, strict=True):
        directories.oracle.same(prompt, a, b, RequestSampler(Sampling()))


async def test_who_waits_too_much_is_refused_at_once(directories: Directories) -> None:
    """Refusals and GetStats do not wait for a step in progress; waiting sessions are served afterwards."""
    limits = VerifierLimits(max_waiting=2)
    async with gated(directories, verifier_limits=limits, capacity=256 + 4 * BLOCK) as (services, gate):
        with gate.closed():
            first = begin(services, PROMPT, 10)
            await until(lambda: services.verifier_loop.stats.running == 1, NEVER_AT_ONCE)
            others = [begin(services, PROMPT, 10) for _ in range(7)]
            await until(lambda: sum(task.done() for task in others) == 5, NEVER_AT_ONCE)
            assert (await load_of(services)).running == 1
            assert not first.done()
        assert len((await first).tokens) == 10
        results = await asyncio.gather(*others, return_exceptions=True)
        refused = [r for r in results if isinstance(r, grpc.aio.AioRpcError)]
        assert len(refused) == 5
        for error in refused:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            said = str(error.details())
            assert (
                "2 sessions are waiting for memory, the limit is 2" in said or "no capacity for more" in said
            )  # the limit of the pod that refused
            # The verifier's own retry delay, or the one cached from the last session it took: one to three times its
            # first estimate of a turn.
            assert 1000 <= retry_after(error).ToMilliseconds() <= 3000
        assert [len(r.tokens) for r in results if isinstance(r, generation_pb2.Completion)] == [10, 10]
        assert len((await served_in_the_end(services)).tokens) == 10


async def served_in_the_end(services: Stack) -> generation_pb2.Completion:
    """Return the completion of one more request, retried while refused."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await begin(services, PROMPT, 10)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise


def retry_after(error: grpc.aio.AioRpcError) -> duration_pb2.Duration:
    status = status_pb2.Status()
    status.ParseFromString(dict(error.trailing_metadata() or ())["grpc-status-details-bin"])
    info = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    delay: duration_pb2.Duration = info.retry_delay
    return delay


async def test_a_waiting_session_can_be_cancelled(directories: Directories) -> None:
    async with gated(directories, capacity=256 + 4 * BLOCK) as (services, gate):
        loop = services.verifier_loop
        with gate.closed():
            first = begin(services, PROMPT, 10)
            await until(lambda: loop.stats.running == 1, NEVER_AT_ONCE)
            waiting = [begin(services, PROMPT, 10) for _ in range(3)]
            await until(lambda: loop._inbox.qsize() >= 3, NEVER_AT_ONCE)  # they wait to be attached
            for task in waiting:
                task.cancel()
            await until(lambda: loop._inbox.qsize() >= 6, NEVER_AT_ONCE)  # and to be detached
        assert len((await first).tokens) == 10
        await until(lambda: loop.stats.waiting == loop.stats.running == loop.pool.held == 0)
        await loop.call(lambda: None)  # until the last step has been counted
        assert loop.stats.committed == 10


async def test_a_prompt_is_found_by_its_tenant_alone(directories: Directories) -> None:
    async with stack(directories.target, None) as services:

        async def found(tenant: str, prompt: list[int]) -> int:
            completion = await services.generate(prompt, max_tokens=5, tenant=tenant, ignore_end_token=True)
            texts.append(list(completion.tokens))
            assert completion.finish.usage.prompt_tokens == len(prompt)
            return completion.finish.usage.cached_tokens

        texts: list[list[int]] = []
        assert await found("a", PROMPT) == 0
        assert await found("a", PROMPT) == 2 * BLOCK
        assert await found("b", PROMPT) == 0
        assert await found("", PROMPT) == 0
        assert await found("b", PROMPT) == 2 * BLOCK
        check(directories, [PROMPT] * 5, [texts[0]] * 5, texts)
        assert await found("a", [*PROMPT[: BLOCK + 9], 5]) == BLOCK + 9  # inside a block, by copying
        assert await found("a", [5, *PROMPT]) == 0
        load = services.verifier_loop.stats
        assert load.cached_tokens == 4 * BLOCK + BLOCK + 9
        assert load.prompt_tokens == 6 * len(PROMPT) + 1 + BLOCK + 10


async def test_a_resumed_text_is_found(directories: Directories) -> None:
    sampling = {"temperature": 0.8, "seed": 3}
    async with stack(directories.target, None) as services:
        whole = await services.generate(PROMPT, sampling=sampling, max_tokens=60, ignore_end_token=True)
        tokens = list(whole.tokens)
        rest = await services.generate(
            PROMPT, sampling=sampling, max_tokens=60, generated_tokens=tokens[:50], ignore_end_token=True
        )
    sampler = RequestSampler(Sampling(temperature=0.8, seed=sample_seed(3, 0)))
    directories.oracle.same(PROMPT, tokens, tokens[:50] + list(rest.tokens), sampler)
    assert rest.finish.usage.cached_tokens == len(PROMPT)  # of the cached text, only the prompt counts


async def test_a_completion_says_how_often_it_lost_its_memory(directories: Directories) -> None:
    """Three texts fit at first, but only one when fully grown; the oldest is never preempted."""
    texts = prompts(3, BLOCK - 4)
    async with gated(directories, capacity=256 + 4 * BLOCK) as (services, gate):
        loop = services.verifier_loop
        expect_no_growth(loop)
        with gate.closed():
            tasks = [begin(services, texts[0], 40)]
            await until(lambda: loop.stats.running == 1, NEVER_AT_ONCE)
            tasks += [begin(services, prompt, 40) for prompt in texts[1:]]
            await until(lambda: loop._inbox.qsize() >= 2, NEVER_AT_ONCE)  # they arrive before the first grows
        completions = await asyncio.gather(*tasks)
        preemptions = [completion.finish.preemptions for completion in completions]
        assert preemptions[0] == 0
        assert sum(preemptions) == loop.stats.preemptions > 0
        assert (await load_of(services)).preemptions == loop.stats.preemptions
        timelines = services.verifiers[0].service.timelines
        events = [event.name for each in (*timelines._ended, *timelines._running) for event in each.events]
        assert events.count("preempted") == loop.stats.preemptions
        assert events.count("admitted") == len(texts) + loop.stats.preemptions
        want = [list((await begin(services, prompt, 40)).tokens) for prompt in texts]
    check(directories, texts, want, [list(completion.tokens) for completion in completions])


@pytest.mark.parametrize("exact", [True, False])
async def test_the_numerics_mode_is_told(directories: Directories, exact: bool) -> None:
    """It is exact only if requested and confirmed by the reference check at start-up."""
    async with stack(directories.target, None, exact=exact) as services:
        finish = (await services.generate(PROMPT, max_tokens=3)).finish
    fast = finish.numerics_fingerprint.endswith("/fast")
    assert fast or exact
    assert finish.numerics_mode == (model_pb2.NUMERICS_MODE_FAST if fast else model_pb2.NUMERICS_MODE_EXACT)


async def test_the_stats_count_what_was_served(directories: Directories) -> None:
    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        before = await load_of(services)
        assert before.kv_tokens == services.verifier_loop.context
        assert sum(before.decisions.modes.values()) == 0
        before.ClearField("decisions")
        counters = {name: value for field, value in before.ListFields() if (name := field.name) not in STANDING}
        assert counters == {}
        completions = [
            await begin(services, PROMPT, 40, speculation=ALWAYS),
            *await asyncio.gather(*(begin(services, PROMPT, 30, speculation=ALWAYS) for _ in range(3))),
        ]
        await until(lambda: services.verifier_loop.pool.held == 0)
        await services.verifier_loop.call(lambda: None)  # until the last step has been counted
        load = await load_of(services)
    finishes = [completion.finish for completion in completions]
    assert (load.running, load.waiting, load.kv_held_tokens, load.preemptions) == (0, 0, 0, 0)
    assert load.committed_tokens == sum(f.usage.completion_tokens for f in finishes) == 130
    assert load.prompt_tokens == 4 * len(PROMPT)
    assert load.cached_tokens == sum(f.usage.cached_tokens for f in finishes) == 3 * 2 * BLOCK
    assert load.offered_candidates == sum(f.speculation.offered for f in finishes)
    assert load.accepted_candidates == sum(f.speculation.accepted for f in finishes)
    assert 0 < load.steps <= sum(f.speculation.steps for f in finishes)
    computed = load.prompt_tokens - load.cached_tokens
    assert load.rows == computed + load.offered_candidates + sum(f.speculation.steps - 1 for f in finishes)
    assert load.kv_cached_tokens >= 2 * BLOCK
    assert 0 < load.busy_us <= load.up_us


STANDING = {"identity", "kv_tokens", "max_sessions", "max_waiting", "pod", "serving", "up_us"}
"""Fields that are nonzero before anything is served."""


async def test_the_stats_while_it_serves(directories: Directories) -> None:
    async with gated(directories) as (services, gate):
        with gate.closed():
            task = begin(services, PROMPT, 5)
            await until(lambda: services.verifier_loop.stats.running == 1, NEVER_AT_ONCE)
            load = await load_of(services)
        assert (load.running, load.steps, load.committed_tokens) == (1, 0, 0)
        assert load.kv_held_tokens == 3 * BLOCK
        assert len((await task).tokens) == 5


async def test_a_prompt_that_no_verifier_has_memory_for_is_told_as_the_clients_own(directories: Directories) -> None:
    """A verifier with more memory is tried too; an absent one is not waited for."""
    prompt = list(range(40, 40 + 100))
    async with stack(directories.target, None, capacity=3 * BLOCK) as small, stack(directories.target, None) as large:
        for others in (["127.0.0.1:1"], [large.verifiers[0].address, "127.0.0.1:1"]):
            peers = Peers(Pods([small.verifiers[0].address, *others]), failover_seconds=20.0)
            async with (
                served(GenerationServicer(Catalog.of(small.model, peers))) as (front, _),
                grpc.aio.insecure_channel(front) as channel,
            ):
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                whole = generation_pb2.CompleteRequest(request=request_of(prompt, max_tokens=5, ignore_end_token=True))
                if len(others) > 1:
                    assert len((await stub.Complete(whole)).completions[0].tokens) == 5
                    continue
                begin_at = time.monotonic()
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Complete(whole)
                assert from_rpc(refused.value).reason == "PROMPT_TOO_LONG"
                assert time.monotonic() - begin_at < 15.0
        assert small.verifier_loop.context <= len(prompt)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await begin(small, prompt, 5)
        error = from_rpc(refused.value)
        assert isinstance(error, InvalidRequest)
        assert error.reason == "PROMPT_TOO_LONG"
        assert "prompt: has 100 tokens" in str(error)
