"""The table of errors, and malformed details."""

from __future__ import annotations

import pickle

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status

from specdec.client import InvalidRequest, ServerError, SpecdecError, Unavailable
from specdec.client.completion import read_result
from specdec.client.errors import ERRORS, REASONS, from_rpc, is_loss, read
from specdec.v2 import generation_pb2


def failure(code: grpc.StatusCode, details: bytes = b"", message: str = "no") -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", details)) if details else grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, message)


def test_the_table_is_total() -> None:
    assert set(ERRORS) == set(grpc.StatusCode) - {grpc.StatusCode.OK}


def test_every_error_has_a_status() -> None:
    assert set(SpecdecError.__subclasses__()) == set(ERRORS.values()) | set(REASONS.values())


OTHER_WORDS = {
    grpc.StatusCode.UNIMPLEMENTED: "the server is not an orchestrator, or has another protocol version than this "
    "client, specdec.v2",
    grpc.StatusCode.DEADLINE_EXCEEDED: "the timeout has passed",
}
"""Messages that replace gRPC's, by status."""


@pytest.mark.parametrize("code", list(ERRORS))
def test_a_status_becomes_its_error(code: grpc.StatusCode) -> None:
    error = from_rpc(failure(code))
    broken = code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)  # broken connections: no server sends them
    assert type(error) is (Unavailable if broken else ERRORS[code])
    assert is_loss(error) is (broken or code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED))
    words = OTHER_WORDS.get(code, "{}")
    assert (str(error), error.code, error.reason, error.violations) == (words.format("no"), code, "", [])
    assert str(from_rpc(failure(code, message=""))) == words.format(code.name)


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
def test_a_server_that_says_so_has_failed(code: grpc.StatusCode) -> None:
    status = Status(code=code.value[0])
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="INTERNAL", domain="specdec"))
    error = from_rpc(failure(code, status.SerializeToString()))
    assert type(error) is ServerError
    assert not is_loss(error)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "connections to all backends failing; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to remote "
            "host: Connection refused",
            "no server answers: 127.0.0.1:9: Failed to connect to remote host: Connection refused",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv6:%5B::1%5D:9: tcp handshaker shutdown",
            "no server answers: [::1]:9: tcp handshaker shutdown",
        ),
        ("GOAWAY received", "GOAWAY received"),
    ],
)
def test_an_unreachable_server_is_told_by_its_address(said: str, told: str) -> None:
    assert str(from_rpc(failure(grpc.StatusCode.UNAVAILABLE, message=said))) == told


@pytest.mark.parametrize("details", [b"\xff", b"\x1a\x02\xff\xff", b"\x08\x03"])
def test_broken_details_do_not_hide_the_error(details: bytes) -> None:
    error = from_rpc(failure(grpc.StatusCode.INVALID_ARGUMENT, details))
    assert isinstance(error, InvalidRequest)
    assert (str(error), error.violations) == ("no", [])


def test_errors_survive_pickling() -> None:
    error = InvalidRequest("no", code=grpc.StatusCode.INVALID_ARGUMENT, violations=[("n", "17 is too many")])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.code, copy.violations) == (str(error), error.code, error.violations)


@pytest.mark.parametrize(
    "said", ["SERVER: Received message larger than max (9 vs. 8)", "CLIENT: Sent message larger than max (9 vs. 8)"]
)
def test_a_message_that_is_too_long_is_not_sent_again(said: str) -> None:
    assert type(from_rpc(failure(grpc.StatusCode.RESOURCE_EXHAUSTED, message=said))) is InvalidRequest


BEYOND = generation_pb2.ResolvedRequest(time=Timestamp(seconds=10**12))


@pytest.mark.parametrize("answer", [None, generation_pb2.CompleteResponse(resolved=BEYOND)])
def test_an_invalid_answer_is_the_servers_fault(answer: generation_pb2.CompleteResponse | None) -> None:
    """For grpc.aio, None is a response that cannot be parsed."""
    with pytest.raises(ServerError, match=r"cannot be parsed|is invalid"):
        read(read_result, answer)
