"""A text continues only at a verifier with the same model, preferably with the same numerics; a change of numerics is
reported."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from specdec.client.errors import from_rpc
from specdec.v2 import model_pb2
from tests.services.conftest import Directories
from tests.services.interrupted import GENEROUS, PROMPT, WARM, Reader, changes, same, serving, slow_target, undisturbed
from tests.stack import Stack, request_of, stack, until


def second(field: str) -> Any:
    """Return a disguise: the second verifier differs in one field."""

    def disguise(number: int, identity: model_pb2.ModelIdentity) -> None:
        if number == 1:
            setattr(identity, field, "another")

    return disguise


async def begun_elsewhere(services: Stack, number: int, **fields: Any) -> Reader:
    """Begin a text at a verifier other than this one."""
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
    fields: dict[str, Any] = {"max_tokens": 80, "ignore_end_token": True, "sampling": WARM}
    want = await undisturbed(directories, **fields)
    async with stack(
        directories.target,
        None,
        verifiers=2,
        target_delay=slow_target,
        disguise=second("model_fingerprint"),
        failover_seconds=GENEROUS if returns else 0.5,
    ) as services:
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
        for _ in services.verifiers:  # each has reported its numerics
            await services.generate(PROMPT, max_tokens=2)
        reader = await begun_elsewhere(services, 1, max_tokens=60, ignore_end_token=True)
        await services.verifiers[serving(services)].stop()
        got = await reader.rest()
    assert changes(got.finish.speculation) == {"verifier_lost": 1}
    assert got.finish.reproducible
