"""A failing forward pass, and a verifier that reports its model as failed: texts continue, here or elsewhere."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import grpc
import pytest

from specdec.client.errors import from_rpc
from specdec.serving.errors import InvalidRequestError, ModelFailureError, ServiceError
from specdec.v2 import verifier_pb2
from tests.services.conftest import Directories
from tests.services.interrupted import (
    ALWAYS,
    PROMPT,
    WARM,
    Frozen,
    Reader,
    changes,
    same,
    service_of,
    serving,
    slow_target,
    undisturbed,
)
from tests.stack import Stack, VerifierPod, stack, until

FIELDS: dict[str, Any] = {"max_tokens": 60, "ignore_end_token": True, "sampling": WARM}


class Faults:
    """Makes forward passes fail, by the thread that runs them."""

    def __init__(self) -> None:
        self._left: dict[threading.Thread, float] = {}

    def __call__(self) -> None:
        time.sleep(0.02)
        thread = threading.current_thread()
        if self._left.get(thread, 0) > 0:
            self._left[thread] -= 1
            raise RuntimeError("CUDA error: out of memory at /opt/secret")

    def put_into(self, loop: Any, passes: float = float("inf")) -> None:
        """Make the next `passes` passes of a loop fail."""
        self._left[loop._thread] = passes

    def take_from(self, loop: Any) -> None:
        self._left[loop._thread] = 0


@pytest.fixture(scope="module")
def faults() -> Faults:
    """Shared by all tests: the step latency is measured for each delay of an engine."""
    return Faults()


def victim(services: Stack) -> VerifierPod:
    return services.verifiers[serving(services)]


async def test_a_pass_that_fails_is_a_pause(directories: Directories, faults: Faults) -> None:
    """All sessions in the step pause, and continue with the same tokens."""
    want = await undisturbed(directories, **FIELDS)
    async with stack(directories.target, directories.near, target_delay=faults) as services:
        readers = [Reader(services, **FIELDS, speculation=ALWAYS) for _ in range(3)]
        await asyncio.gather(*(reader.read(10) for reader in readers))
        faults.put_into(services.verifier_loop, passes=1)
        for reader in readers:
            got = await reader.rest()
            same(directories, want, got, WARM)
            assert not changes(got.finish.speculation)
        await until(lambda: services.idle)


async def test_an_engine_that_does_not_recover_is_left(directories: Directories, faults: Faults) -> None:
    """Until the engine recovers, its pod reports the failure and takes no sessions."""
    want = await undisturbed(directories, **FIELDS)
    async with stack(directories.target, directories.near, verifiers=2, target_delay=faults) as services:
        reader = Reader(services, **FIELDS)
        await reader.read(10)
        broken = victim(services)
        faults.put_into(broken.loop)
        got = await reader.rest()
        same(directories, want, got, WARM)
        assert changes(got.finish.speculation) == {"verifier_lost": 1}
        assert not broken.service.works
        more = await asyncio.gather(*(services.generate(PROMPT, **dict(FIELDS)) for _ in range(4)))
        for each in more:
            same(directories, want, each, WARM)
        faults.take_from(broken.loop)
        await until(lambda: broken.service.works)
        await until(lambda: services.idle)


async def test_an_engine_that_is_alone_is_waited_for(directories: Directories, faults: Faults) -> None:
    want = await undisturbed(directories, **FIELDS)
    async with stack(directories.target, None, target_delay=faults) as services:
        reader = Reader(services, **FIELDS)
        await reader.read(10)
        faults.put_into(services.verifier_loop)
        await until(lambda: not services.verifiers[0].service.works)
        faults.take_from(services.verifier_loop)
        got = await reader.rest()
        same(directories, want, got, WARM)


async def test_an_engine_lost_for_good_is_said_in_our_words(directories: Directories, faults: Faults) -> None:
    async with stack(directories.target, None, target_delay=faults, failover_seconds=0.6) as services:
        reader = Reader(services, **FIELDS)
        await reader.read(10)
        faults.put_into(services.verifier_loop)
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await reader.rest()
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "secret" not in f"{lost.value.details()}{lost.value.trailing_metadata()}"
        assert from_rpc(lost.value).request_id


async def test_a_drafts_pass_that_fails_costs_no_token(directories: Directories, faults: Faults) -> None:
    """The draft continues after one failed pass; if all fail, it returns once its engine recovers."""
    want = await undisturbed(directories, **FIELDS)
    async with stack(directories.target, directories.near, target_delay=slow_target, delay=faults) as services:
        assert services.draft_loop is not None
        once = Reader(services, **FIELDS, speculation=ALWAYS)
        await once.read(10)
        faults.put_into(services.draft_loop, passes=1)
        got = await once.rest()
        same(directories, want, got, WARM)
        assert not changes(got.finish.speculation)
        again = Reader(services, **FIELDS, speculation=ALWAYS)
        await again.read(10)
        faults.put_into(services.draft_loop)
        got = await again.rest()
        same(directories, want, got, WARM)
        assert changes(got.finish.speculation) == {"draft_lost": 1}
        assert not services.drafts[0].service.works
        faults.take_from(services.draft_loop)
        await until(lambda: services.drafts[0].service.works)


@pytest.mark.parametrize(
    "error",
    [ModelFailureError("its logits are not finite"), InvalidRequestError([("prompt_tokens", "are none")])],
    ids=["INTERNAL", "INVALID_ARGUMENT"],
)
@pytest.mark.parametrize("others", [0, 1, pytest.param(2, marks=pytest.mark.verify)])
async def test_what_one_verifier_says_of_a_text_another_need_not(
    directories: Directories, error: ServiceError, others: int
) -> None:
    """A verifier that fails on the text is not tried again, and the last error is reported."""

    def failing(response: verifier_pb2.VerifyResponse) -> verifier_pb2.VerifyResponse:
        if response.HasField("commit"):
            raise error
        return response

    want = await undisturbed(directories, **FIELDS)
    async with stack(
        directories.target, None, verifiers=1 + others, target_delay=slow_target, verifier_kind=Frozen
    ) as services:
        reader = Reader(services, **FIELDS)
        await reader.read(10)
        service_of(services, serving(services)).changed = failing
        if others:
            got = await reader.rest()
            same(directories, want, got, WARM)
            assert changes(got.finish.speculation) == {"verifier_lost": 1}
        else:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await reader.rest()
            assert failed.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)
            assert "finite" not in str(failed.value.details())
