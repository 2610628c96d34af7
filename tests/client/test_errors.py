"""The table of errors, and details that are broken."""

from __future__ import annotations

import pickle

import grpc
import pytest

from specdec.client import InvalidRequest, SpecdecError
from specdec.client.errors import ERRORS, REASONS, from_rpc


def failure(code: grpc.StatusCode, details: bytes = b"", message: str = "no") -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", details)) if details else grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, message)


def test_the_table_is_total() -> None:
    assert set(ERRORS) == set(grpc.StatusCode) - {grpc.StatusCode.OK}


def test_every_error_has_a_status() -> None:
    assert set(SpecdecError.__subclasses__()) == set(ERRORS.values()) | set(REASONS.values())


ANOTHER_VERSION = "the server speaks another version of the protocol than this client, specdec.v2"


@pytest.mark.parametrize("code", list(ERRORS))
def test_a_status_becomes_its_error(code: grpc.StatusCode) -> None:
    error = from_rpc(failure(code))
    assert type(error) is ERRORS[code]
    more = f": {ANOTHER_VERSION}" if code is grpc.StatusCode.UNIMPLEMENTED else ""  # without details: of gRPC itself
    assert (str(error), error.code, error.reason, error.violations) == (f"no{more}", code, "", [])
    assert str(from_rpc(failure(code, message=""))) == code.name + more


@pytest.mark.parametrize("details", [b"\xff", b"\x1a\x02\xff\xff", b"\x08\x03"])
def test_broken_details_do_not_hide_the_error(details: bytes) -> None:
    error = from_rpc(failure(grpc.StatusCode.INVALID_ARGUMENT, details))
    assert isinstance(error, InvalidRequest)
    assert (str(error), error.violations) == ("no", [])


def test_errors_survive_pickling() -> None:
    error = InvalidRequest("no", code=grpc.StatusCode.INVALID_ARGUMENT, violations=[("n", "17 is too many")])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.code, copy.violations) == (str(error), error.code, error.violations)
