"""For any input, an error fits a gRPC status, names the request to look up, and discloses no internals."""

from __future__ import annotations

import math
import tracemalloc
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.client.errors import from_rpc
from specdec.serving.echo import ECHO_CHARACTERS, cut, echo
from specdec.serving.errors import (
    MAX_RETRY_SECONDS,
    EngineLostError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PeerLostError,
    ServiceError,
    as_service_error,
    to_status,
)
from specdec.v2 import generation_pb2
from tests.stack import served

MAX_HEADER_BYTES = 8192
"""gRPC's limit for a status with its metadata."""

texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=20).flatmap(
    lambda text: st.integers(0, 3000).map(lambda times: text * times)
)


def header_bytes(error: ServiceError) -> int:
    """Return the size as gRPC counts it: percent-encoded message, base64 binary values, plus 32 for each entry."""
    status = to_status(error, "r" * 64)
    ((key, value),) = status.trailing_metadata
    message = urllib.parse.quote(status.details)
    return len(message) + len("grpc-message") + len(value) * 4 // 3 + 4 + len(key) + 4 * 32


@given(st.lists(st.tuples(texts, texts), max_size=30))
def test_violations_fit_a_status(violations: list[tuple[str, str]]) -> None:
    assert header_bytes(InvalidRequestError(violations)) < MAX_HEADER_BYTES


@given(texts)
def test_messages_fit_a_status(text: str) -> None:
    for error in (OverloadedError(text), PeerLostError(text, text)):
        assert header_bytes(error) < MAX_HEADER_BYTES
        assert len(str(error).encode()) <= 1024


@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0, 2.0**64, 1e300])
def test_a_delay_can_be_told(seconds: float) -> None:
    error = OverloadedError("full", seconds)
    assert 0 <= error.retry_after <= MAX_RETRY_SECONDS
    to_status(error)


def test_the_rest_is_counted() -> None:
    error = InvalidRequestError([(f"field{number}", "is wrong") for number in range(20)])
    assert "field7: is wrong" in str(error)
    assert str(error).endswith("and 12 more")


@given(st.text(max_size=300), st.integers(4, 100))
def test_a_text_is_cut_between_characters(text: str, limit: int) -> None:
    found = cut(text, limit)
    assert len(found.encode()) <= limit
    assert found == text.encode("utf-8", "replace").decode() or found.endswith("...")


def test_what_is_echoed_is_short() -> None:
    assert echo("short") == "'short'"
    assert len(echo("x" * 10**6)) < ECHO_CHARACTERS + 30
    assert len(echo(list(range(1000)))) <= ECHO_CHARACTERS


def test_every_error_of_ours_says_which_request() -> None:
    """The message, which a person reads, names the request too."""
    for error in (InternalError(), EngineLostError(), PeerLostError("lost", "VERIFIER_LOST")):
        assert "(request 0123abcd)" in to_status(error, "0123abcd").details


class Service:
    """A service that raises `error` in every call."""

    name = "specdec.v2.GenerationService"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def register(self, server: Any) -> None:
        methods: dict[str, Any] = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self._fail, generation_pb2.GenerateRequest.FromString, bytes
            ),
            "Complete": grpc.unary_unary_rpc_method_handler(
                self._fail, generation_pb2.CompleteRequest.FromString, bytes
            ),
        }
        server.add_registered_method_handlers(self.name, methods)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.name, methods),))

    async def close(self) -> None:
        pass

    async def _fail(self, request: Any, context: Any) -> None:
        raise self._error


@asynccontextmanager
async def calling(error: Exception) -> AsyncIterator[grpc.aio.Channel]:
    async with served(Service(error)) as (address, _), grpc.aio.insecure_channel(address) as channel:
        yield channel


async def failure(channel: grpc.aio.Channel, method: str, message: bytes = b"") -> grpc.aio.AioRpcError:
    """Return the error of a call; unary and streaming responses look the same on the wire."""
    call: Any = channel.unary_stream(f"/{Service.name}/{method}")(
        message,  # type: ignore[arg-type]
        metadata=(("x-request-id", "from-the-caller"),),
    )
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call.read()
    return failed.value


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_what_nobody_expected_is_told_by_its_request_id_alone(method: str) -> None:
    async with calling(KeyError("10.0.0.1:50051 of /models/secret")) as channel:
        error = await failure(channel, method)
    assert error.code() is grpc.StatusCode.INTERNAL
    told = f"{error.details()} {error.trailing_metadata()}"
    assert not [word for word in ("10.0.0.1", "secret", "KeyError") if word in told]
    seen = from_rpc(error)
    assert (seen.reason, seen.request_id) == ("INTERNAL", "from-the-caller")


def test_a_timeout_that_nobody_handled_is_not_the_callers_deadline() -> None:
    assert isinstance(as_service_error(TimeoutError()), InternalError)


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_a_request_that_cannot_be_decoded_is_invalid(method: str) -> None:
    async with calling(AssertionError()) as channel:
        error = await failure(channel, method, b"\xff\xff\xff\xff")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    ((field, problem),) = from_rpc(error).violations
    assert (field, problem) == ("request", "cannot be decoded as this method's request")


class Measuring(Service):
    """A service that answers with the memory in use while its request is served."""

    def __init__(self) -> None:
        super().__init__(AssertionError())

    def register(self, server: Any) -> None:
        methods: dict[str, Any] = {"Complete": grpc.unary_unary_rpc_method_handler(self._measure, len, bytes)}
        server.add_registered_method_handlers(self.name, methods)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.name, methods),))

    async def _measure(self, request: int, context: Any) -> bytes:
        return b"%d" % tracemalloc.get_traced_memory()[0]


async def test_an_encoded_request_is_not_kept_beside_the_decoded_one() -> None:
    size = 1 << 20
    tracemalloc.start()
    try:
        async with served(Measuring()) as (address, _), grpc.aio.insecure_channel(address) as channel:
            ask: Any = channel.unary_unary(f"/{Service.name}/Complete")
            before = tracemalloc.get_traced_memory()[0]
            used = int(await ask(bytes(size))) - before
    finally:
        tracemalloc.stop()
    assert used < 1.5 * size, "the client's copy alone"


async def test_the_longest_error_arrives_as_it_is() -> None:
    async with calling(InvalidRequestError([("é" * 100, "ü" * 1000)] * 300)) as channel:
        error = await failure(channel, "Complete")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(from_rpc(error).violations) == 8
