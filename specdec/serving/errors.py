"""What can go wrong in a service, and the one table from there to gRPC statuses.

ServiceError
├── InvalidRequestError      INVALID_ARGUMENT      the caller's fields, each with its limit
├── UnknownModelError        NOT_FOUND             no such model here
├── NotBuiltError            UNIMPLEMENTED         a feature of the contract that does not exist yet
├── OverloadedError          RESOURCE_EXHAUSTED    full; says when to come back
├── PeerLostError            UNAVAILABLE           another service is gone
├── DeadlineError            DEADLINE_EXCEEDED     the caller's time is over
├── ProtocolError            FAILED_PRECONDITION   a peer broke the session's protocol
└── ModelFailureError        INTERNAL              the model's output is unusable
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "specdec"

STATUS_DETAILS = "grpc-status-details-bin"
"""Key under which gRPC carries a rich status, serialized."""


class ServiceError(Exception):
    """An error with a meaning to the caller. `reason` is for machines, UPPER_SNAKE."""

    reason = "UNKNOWN"

    def details(self) -> Sequence[object]:
        """google.rpc messages beside ErrorInfo."""
        return ()


class InvalidRequestError(ServiceError):
    """Fields that are wrong: (field, what is wrong, with value and limit)."""

    reason = "INVALID_REQUEST"

    def __init__(self, violations: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{field}: {problem}" for field, problem in violations))
        self.violations = list(violations)

    def details(self) -> Sequence[object]:
        bad = error_details_pb2.BadRequest()
        for field, problem in self.violations:
            bad.field_violations.add(field=field, description=problem)
        return (bad,)


class UnknownModelError(ServiceError):
    reason = "UNKNOWN_MODEL"


class NotBuiltError(ServiceError):
    reason = "NOT_BUILT"


class OverloadedError(ServiceError):
    """No room now. `retry_after` in seconds."""

    reason = "OVERLOADED"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def details(self) -> Sequence[object]:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(1000 * self.retry_after))
        return (error_details_pb2.RetryInfo(retry_delay=delay),)


class PeerLostError(ServiceError):
    """`reason` names the peer: VERIFIER_LOST, DRAFT_REQUIRED, ..."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class DeadlineError(ServiceError):
    reason = "DEADLINE"


class ProtocolError(ServiceError):
    reason = "PROTOCOL"


class ModelFailureError(ServiceError):
    reason = "MODEL_FAILURE"


STATUS: dict[type[ServiceError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    NotBuiltError: grpc.StatusCode.UNIMPLEMENTED,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PeerLostError: grpc.StatusCode.UNAVAILABLE,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    ProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
    ModelFailureError: grpc.StatusCode.INTERNAL,
}


def to_status(error: ServiceError) -> grpc.Status:
    """The rich status: code, message, ErrorInfo and what the error adds."""
    code = STATUS[type(error)]
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    packed = []
    for message in (info, *error.details()):
        detail = any_pb2.Any()
        detail.Pack(message)
        packed.append(detail)
    rich = status_pb2.Status(code=getattr(code_pb2, code.name), message=str(error), details=packed)
    status: grpc.Status = rpc_status.to_status(rich)
    return status


def from_rpc(error: grpc.aio.AioRpcError, peer: str) -> ServiceError:
    """What a peer's refusal means to our own caller."""
    message = f"{peer}: {error.details() or error.code().name}"
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return OverloadedError(message, _retry_after(error))
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(_violations(error) or [("request", message)])
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(message)
        case grpc.StatusCode.UNIMPLEMENTED:
            return NotBuiltError(message)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return ProtocolError(message)
        case grpc.StatusCode.INTERNAL if _ours(error):
            return ModelFailureError(message)
        case _:
            return PeerLostError(message, f"{peer.upper()}_LOST")


def _violations(error: grpc.aio.AioRpcError) -> list[tuple[str, str]]:
    """The fields that the peer found wrong."""
    bad = _detail(error, error_details_pb2.BadRequest())
    return [] if bad is None else [(found.field, found.description) for found in bad.field_violations]


def _retry_after(error: grpc.aio.AioRpcError) -> float:
    """Seconds that the peer wants to be left alone for; 1 if it does not say."""
    info = _detail(error, error_details_pb2.RetryInfo())
    return 1.0 if info is None else float(info.retry_delay.ToMilliseconds() / 1000)


def _ours(error: grpc.aio.AioRpcError) -> bool:
    """Whether a service said it: every one of its errors has details that say the same. An INTERNAL without comes from
    the transport, as when a write meets a connection that has just broken; other words were changed on their way."""
    status = _rich(error)
    return status is not None and status.message == error.details()


def _detail(error: grpc.aio.AioRpcError, message: Any) -> Any:
    """The message that came with a status, if there is one of its kind and it can be read."""
    status = _rich(error)
    with contextlib.suppress(DecodeError):
        for detail in () if status is None else status.details:
            if detail.Unpack(message):
                return message
    return None


def _rich(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    """The rich status, if there is one that can be read."""
    with contextlib.suppress(DecodeError):
        for key, value in error.trailing_metadata() or ():
            if key == STATUS_DETAILS and isinstance(value, bytes):
                return status_pb2.Status.FromString(value)
    return None
