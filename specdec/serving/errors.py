"""The errors of a service, and the one table that maps them to gRPC statuses.

ServiceError
├── InvalidRequestError      INVALID_ARGUMENT      invalid fields, each with its limit
│   └── PromptTooLongError   INVALID_ARGUMENT      the prompt leaves no room in the context
├── UnknownModelError        NOT_FOUND             no such model here
├── UnknownRequestError      NOT_FOUND             no record of this request
├── NotBuiltError            UNIMPLEMENTED         a feature of the contract that does not exist yet
├── UnauthenticatedError     UNAUTHENTICATED       the API key is missing or unknown
├── PermissionDeniedError    PERMISSION_DENIED     the caller may not do this
├── OverloadedError          RESOURCE_EXHAUSTED    full; carries a retry delay
│   ├── TenantLimitError     RESOURCE_EXHAUSTED    the tenant is at its limit, even if there is room
│   ├── GrammarPendingError  RESOURCE_EXHAUSTED    the pod cannot take the text's grammar yet
│   └── TooLateError         RESOURCE_EXHAUSTED    the text would miss its deadline
├── PeerLostError            UNAVAILABLE           another service is gone
├── DeadlineError            DEADLINE_EXCEEDED     the caller's deadline has passed
├── EngineLostError          UNAVAILABLE           the engine of this pod does not work
├── ShortOfMemoryError       UNAVAILABLE           this process got no memory; another one may
├── ProtocolError            FAILED_PRECONDITION   a peer broke the session's protocol
├── PromptChangedError       FAILED_PRECONDITION   a resumed text's prompt has other tokens here
├── NotRememberedError       FAILED_PRECONDITION   a tenant is forgotten only until this pod restarts
├── GrammarFailureError      INVALID_ARGUMENT      the text's grammar is too complex to continue
├── ModelFailureError        INTERNAL              the model's output is unusable
└── InternalError            INTERNAL              a bug here; the log has it

Errors may repeat input from others. Message and details are truncated here, before they are logged or sent, so that
they stay below gRPC's limit of 8 KiB for a status.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from specdec.engine.shortage import is_shortage
from specdec.serving.echo import cut, echo
from specdec.v2 import model_pb2

PACKAGE = model_pb2.DESCRIPTOR.package
"""Package of the wire protocol, its version included."""

DOMAIN = "specdec"

MESSAGE_BYTES = 1024
"""Maximum bytes of an error's message. It is sent twice, once with each non-ASCII byte escaped as three."""

MAX_VIOLATIONS = 8
FIELD_BYTES = 64
PROBLEM_BYTES = 200
"""Limits on the violations in an error: their number, bytes of a field name, bytes of a problem."""

MAX_RETRY_SECONDS = 3600.0

STATUS_DETAILS = "grpc-status-details-bin"
"""Metadata key of gRPC's serialized rich status."""


class ServiceError(Exception):
    """An error with a meaning for the caller. `reason` is machine-readable, in UPPER_SNAKE."""

    reason = "UNKNOWN"

    def __init__(self, message: str) -> None:
        super().__init__(cut(message, MESSAGE_BYTES))

    def details(self) -> Sequence[object]:
        """Return the google.rpc messages to send in addition to ErrorInfo."""
        return ()


class InvalidRequestError(ServiceError):
    """Invalid fields, as (field, problem with value and limit). The first MAX_VIOLATIONS are listed, the others
    counted."""

    reason = "INVALID_REQUEST"

    def __init__(self, violations: Sequence[tuple[str, str]]) -> None:
        self.violations = [
            (cut(field, FIELD_BYTES), cut(problem, PROBLEM_BYTES)) for field, problem in violations[:MAX_VIOLATIONS]
        ]
        parts = [f"{field}: {problem}" for field, problem in self.violations]
        if len(violations) > MAX_VIOLATIONS:
            parts.append(f"and {len(violations) - MAX_VIOLATIONS} more")
        super().__init__("; ".join(parts))

    def details(self) -> Sequence[object]:
        bad = error_details_pb2.BadRequest()
        for field, problem in self.violations:
            bad.field_violations.add(field=field, description=problem)
        return (bad,)


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room in the model's context, or in a verifier's memory."""

    reason = "PROMPT_TOO_LONG"


class UnknownModelError(ServiceError):
    reason = "UNKNOWN_MODEL"


class UnknownRequestError(ServiceError):
    """No timeline of the request is on record here."""

    reason = "UNKNOWN_REQUEST"


class NotBuiltError(ServiceError):
    reason = "NOT_BUILT"


class OverloadedError(ServiceError):
    """The service has no room now. `retry_after` is in seconds."""

    reason = "OVERLOADED"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = min(max(retry_after, 0.0), MAX_RETRY_SECONDS) if math.isfinite(retry_after) else 1.0

    def details(self) -> Sequence[object]:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(1000 * self.retry_after))
        return (error_details_pb2.RetryInfo(retry_delay=delay),)


class TenantLimitError(OverloadedError):
    """A tenant is at one of its limits; others may still be served."""

    reason = "TENANT_LIMIT"

    def __init__(self, tenant: str, problem: str, retry_after: float) -> None:
        super().__init__(f"tenant {echo(tenant)}: {problem}", retry_after)
        self._violation = error_details_pb2.QuotaFailure.Violation(
            subject=f"tenant:{cut(tenant, FIELD_BYTES)}", description=cut(problem, PROBLEM_BYTES)
        )

    def details(self) -> Sequence[object]:
        return (*super().details(), error_details_pb2.QuotaFailure(violations=[self._violation]))


class GrammarPendingError(OverloadedError):
    """The pod is busy trying or compiling this grammar or others. It need not be full: texts without a grammar, or with
    a compiled one, may still be admitted."""

    reason = "GRAMMAR_PENDING"


class TooLateError(OverloadedError):
    """The text would not finish before its caller's deadline, so it is not started."""

    reason = "TOO_LATE"


class UnauthenticatedError(ServiceError):
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(ServiceError):
    """The caller is authenticated but may not do this. `reason` is the cause."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class PeerLostError(ServiceError):
    """Another service is gone. `reason` names it: VERIFIER_LOST, DRAFT_REQUIRED, ..."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = cut(reason, FIELD_BYTES)


class EngineLostError(ServiceError):
    """Every forward pass of this pod fails; sessions should continue at another pod."""

    reason = "ENGINE_LOST"

    def __init__(self) -> None:
        super().__init__("every forward pass of this pod fails")


class ShortOfMemoryError(ServiceError):
    """This process could not allocate memory, independent of the request: retry at another pod."""

    reason = "SHORT_OF_MEMORY"

    def __init__(self) -> None:
        super().__init__("this process is out of memory")


class DeadlineError(ServiceError):
    reason = "DEADLINE"


class ProtocolError(ServiceError):
    reason = "PROTOCOL"


class PromptChangedError(ServiceError):
    """The prompt of a resumed text has other tokens here, because the template or tokenizer differs."""

    reason = "PROMPT_CHANGED"


class NotRememberedError(ServiceError):
    """A tenant's texts are deleted, but the record that keeps the tenant forgotten after a restart could not be
    written. `why` is the reason."""

    reason = "NOT_REMEMBERED"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the tenant is forgotten, but only until this pod restarts: the record could not be written: {why}"
        )


class GrammarFailureError(ServiceError):
    """A grammar is too complex to continue, for this text or for another of its tenant."""

    reason = "GRAMMAR_TOO_COMPLEX"


class ModelFailureError(ServiceError):
    reason = "MODEL_FAILURE"


class InternalError(ServiceError):
    """An unexpected exception. The caller gets a request id; the details are in the log."""

    reason = "INTERNAL"

    def __init__(self) -> None:
        super().__init__("internal error, see the log of the service")


STATUS: dict[type[ServiceError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    PromptTooLongError: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    UnknownRequestError: grpc.StatusCode.NOT_FOUND,
    NotBuiltError: grpc.StatusCode.UNIMPLEMENTED,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TenantLimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    GrammarPendingError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TooLateError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PeerLostError: grpc.StatusCode.UNAVAILABLE,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    ProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
    PromptChangedError: grpc.StatusCode.FAILED_PRECONDITION,
    NotRememberedError: grpc.StatusCode.FAILED_PRECONDITION,
    EngineLostError: grpc.StatusCode.UNAVAILABLE,
    ShortOfMemoryError: grpc.StatusCode.UNAVAILABLE,
    GrammarFailureError: grpc.StatusCode.INVALID_ARGUMENT,
    ModelFailureError: grpc.StatusCode.INTERNAL,
    InternalError: grpc.StatusCode.INTERNAL,
}


def as_service_error(error: Exception) -> ServiceError:
    """Map an exception to the caller's error: InternalError if unexpected."""
    match error:
        case ServiceError():
            return error
        case _ if is_shortage(error):
            return ShortOfMemoryError()
        case DecodeError():
            return ProtocolError("a message cannot be parsed")
        case _:
            return InternalError()


def to_status(error: ServiceError, request_id: str = "") -> grpc.Status:
    """Return the rich status: code, message, ErrorInfo, the request id used in logs, and the error's own details."""
    code = STATUS[type(error)]
    names_request = request_id and code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
    text = f"{error} (request {request_id})" if names_request else str(error)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    request = [error_details_pb2.RequestInfo(request_id=request_id)] if request_id else []
    packed = []
    for message in (info, *request, *error.details()):
        detail = any_pb2.Any()
        detail.Pack(message)
        packed.append(detail)
    rich = status_pb2.Status(code=getattr(code_pb2, code.name), message=text, details=packed)
    status: grpc.Status = rpc_status.to_status(rich)
    return status


def from_rpc(error: grpc.aio.AioRpcError, peer: str) -> ServiceError:
    """Translate a peer's error for our own caller. The peer's message may contain addresses and exceptions, which
    belong in the log. So of the peer's texts, only invalid fields and the tenant's name are passed on."""
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED if quota := _detail(error, error_details_pb2.QuotaFailure()):
            violation = next(iter(quota.violations), error_details_pb2.QuotaFailure.Violation())
            tenant = violation.subject.removeprefix("tenant:")
            return TenantLimitError(tenant, f"the {peer} has no capacity for more of its sessions", _retry_after(error))
        case grpc.StatusCode.RESOURCE_EXHAUSTED if _reason(error) == TooLateError.reason:
            return TooLateError(f"{peer}: could not finish the text before the deadline", _retry_after(error))
        case grpc.StatusCode.RESOURCE_EXHAUSTED if _reason(error) == GrammarPendingError.reason:
            return GrammarPendingError(f"{peer}: cannot take the grammar yet", _retry_after(error))
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return OverloadedError(f"{peer}: has no capacity for more sessions", _retry_after(error))
        case grpc.StatusCode.INVALID_ARGUMENT if _reason(error) == GrammarFailureError.reason:
            return GrammarFailureError("grammar: is too complex for this text")
        case grpc.StatusCode.INVALID_ARGUMENT if _reason(error) == PromptTooLongError.reason:
            return PromptTooLongError(_violations(error))
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(_violations(error) or [("request", f"was refused by the {peer}")])
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(f"{peer}: the deadline has passed")
        case grpc.StatusCode.UNIMPLEMENTED:
            return NotBuiltError(
                f"{peer}: the server is another service, or has another protocol version than {PACKAGE}"
            )
        case grpc.StatusCode.FAILED_PRECONDITION:
            return ProtocolError(f"{peer}: reports a protocol error")
        case grpc.StatusCode.INTERNAL if said_by_pod(error):
            return ModelFailureError(f"{peer}: its model has failed on this text")
        case _:
            return PeerLostError(f"{peer}: is unavailable", f"{peer.upper()}_LOST")


def _violations(error: grpc.aio.AioRpcError) -> list[tuple[str, str]]:
    """Return the invalid fields that the peer listed."""
    bad = _detail(error, error_details_pb2.BadRequest())
    return [] if bad is None else [(found.field, found.description) for found in bad.field_violations]


def _reason(error: grpc.aio.AioRpcError) -> str:
    """Return the peer's ErrorInfo reason, or ""."""
    info = _detail(error, error_details_pb2.ErrorInfo())
    return "" if info is None else str(info.reason)


def _retry_after(error: grpc.aio.AioRpcError) -> float:
    """Return the peer's retry delay in seconds; 1 if it has none."""
    info = _detail(error, error_details_pb2.RetryInfo())
    return 1.0 if info is None else float(info.retry_delay.ToMilliseconds() / 1000)


def said_by_pod(error: grpc.aio.AioRpcError) -> bool:
    """Return whether one of our services sent this error: its rich status then repeats the message. An INTERNAL without
    details comes from the transport, for example when a write meets a connection that has just broken. A differing
    message was altered in transit."""
    status = _rich(error)
    return status is not None and status.message == error.details()


def _detail(error: grpc.aio.AioRpcError, message: Any) -> Any:
    """Return the status detail of the type of `message`; None if it is missing or cannot be parsed."""
    status = _rich(error)
    with contextlib.suppress(DecodeError):
        for detail in () if status is None else status.details:
            if detail.Unpack(message):
                return message
    return None


def _rich(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    """Return the rich status; None if it is missing or cannot be parsed."""
    details = status_details(error.trailing_metadata())
    with contextlib.suppress(DecodeError):
        return status_pb2.Status.FromString(details) if details else None
    return None


def status_details(metadata: Any) -> bytes:
    """Return the serialized rich status in a call's trailing metadata; empty if there is none."""
    return next((value for key, value in metadata or () if key == STATUS_DETAILS and isinstance(value, bytes)), b"")
