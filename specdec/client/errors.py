"""The errors of calls, and the mapping from gRPC statuses to them.

    SpecdecError
    ├── InvalidRequest      the request is wrong: `violations` says where
    ├── NotFound            no such model
    ├── AccessDenied        the credentials are missing or not sufficient
    ├── Overloaded          the server is full: try again after `retry_after`
    ├── Unavailable         no server answers, even after retries
    ├── PromptChanged       the text cannot be resumed: all reachable servers tokenize its prompt differently
    ├── DeadlineExceeded    the timeout passed
    ├── Cancelled           the stream was cancelled, here or by the server
    ├── Unimplemented       the server does not implement this
    └── ServerError         anything else: a fault of the server

A value that does not fit into the request raises Python's ValueError or TypeError before anything is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar, cast
from urllib.parse import unquote

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from specdec.v2 import generation_pb2

PACKAGE = generation_pb2.DESCRIPTOR.package
"""The protocol of this client, including its version. Servers of another version have no service of this name."""


Response = TypeVar("Response")
Content = TypeVar("Content")


class SpecdecError(Exception):
    """A call failed."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str = "",
        violations: Iterable[tuple[str, str]] = (),
        retry_after: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        """The server's name for the failure, such as "DRAFT_REQUIRED"; empty if it gave none."""
        self.violations = list(violations)
        """(field, description) of each field that the server refused."""
        self.retry_after = retry_after
        """Seconds after which the server suggests a retry; None if it does not."""
        self.request_id = request_id
        """The request's id in the server's logs; empty if the server gave none."""


class InvalidRequest(SpecdecError):
    """The request is wrong."""


class NotFound(SpecdecError):
    """Something named by the request, such as a model, does not exist."""


class AccessDenied(SpecdecError):
    """The credentials are missing or not sufficient."""


class Overloaded(SpecdecError):
    """The server accepts no more requests for now."""


class Unavailable(SpecdecError):
    """No server answers, and the retries are used up or the stream cannot be resumed."""


class PromptChanged(SpecdecError):
    """The text cannot be resumed: all reachable servers tokenize its prompt differently."""


class DeadlineExceeded(SpecdecError):
    """The timeout passed before the call was complete."""


class Cancelled(SpecdecError):
    """The call was cancelled, here or by the server."""


class Unimplemented(SpecdecError):
    """The server does not know the call or the feature."""


class ServerError(SpecdecError):
    """The server failed, or violated the protocol."""


ERRORS: Mapping[grpc.StatusCode, type[SpecdecError]] = MappingProxyType(
    {
        grpc.StatusCode.CANCELLED: Cancelled,
        grpc.StatusCode.UNKNOWN: ServerError,
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.NOT_FOUND: NotFound,
        grpc.StatusCode.ALREADY_EXISTS: ServerError,
        grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
        grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
        grpc.StatusCode.FAILED_PRECONDITION: ServerError,
        grpc.StatusCode.ABORTED: ServerError,
        grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
        grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
        grpc.StatusCode.INTERNAL: ServerError,
        grpc.StatusCode.UNAVAILABLE: Unavailable,
        grpc.StatusCode.DATA_LOSS: ServerError,
        grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    }
)
"""The error for every status except OK; a test checks that none is missing."""


REASONS: Mapping[str, type[SpecdecError]] = MappingProxyType({"PROMPT_CHANGED": PromptChanged})
"""Errors for reasons more specific than their status."""


_BROKEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
"""Statuses that our servers send only with details. Without details they come from gRPC itself: the connection broke
while sending."""

_REFUSED = re.compile(r"status: 4\d\d|^Exception ")
"""gRPC's messages for a call refused by an HTTP proxy, or for a message that it cannot serialise or parse. A retry
would fail in the same way."""


def read(reader: Callable[[Response], Content], response: Response | None) -> Content:
    """Return what the reader makes of a response; ServerError if it is invalid. grpc.aio returns None for a response
    that it could not parse."""
    if response is None:
        raise ServerError("the server's response cannot be parsed", code=grpc.StatusCode.INTERNAL)
    try:
        return reader(response)
    except ValueError as error:
        raise ServerError(f"the server's response is invalid: {error}", code=grpc.StatusCode.INTERNAL) from error


def from_rpc(error: grpc.RpcError, server: str = "an orchestrator") -> SpecdecError:
    """Return the error to raise to the caller for an RpcError. `server`: the kind of server that was called."""
    details = dict(_details(error))
    retry = details.get("google.rpc.RetryInfo")
    try:
        violations = [
            (_text(_fields(violation), 1), _text(_fields(violation), 2))
            for violation in _fields(details.get("google.rpc.BadRequest", b"")).get(1, [])
        ]
        reason = _text(_fields(details.get("google.rpc.ErrorInfo", b"")), 1)
        request_id = _text(_fields(details.get("google.rpc.RequestInfo", b"")), 1)
        delay = None if retry is None else Duration.FromString(_fields(retry).get(1, [b""])[0])
    except DecodeError:  # malformed details must not hide the error itself
        violations, reason, delay, request_id = [], "", None, ""
    message = error.details() or error.code().name
    kind = REASONS.get(reason, ERRORS[error.code()])
    if not details:  # not from one of our servers
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
            kind = InvalidRequest  # the message is too long: retries cannot help
        if error.code() in _BROKEN and not _REFUSED.search(message):
            kind = Unavailable
        message = _in_other_words(error.code(), message, server)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # the same message, whichever end notices first
        message = "the timeout has passed"
    return kind(
        message,
        code=error.code(),
        reason=reason,
        violations=violations,
        retry_after=None if delay is None else delay.seconds + delay.nanos / 1e9,
        request_id=request_id,
    )


def _in_other_words(code: grpc.StatusCode, details: str, server: str) -> str:
    """Return gRPC's own message, reworded for the person who must act on it."""
    if code is grpc.StatusCode.UNIMPLEMENTED:  # the server has no such service
        return f"the server is not {server}, or has another protocol version than this client, {PACKAGE}"
    if code is grpc.StatusCode.UNAVAILABLE and "last error: " in details:
        why = unquote(re.sub("^[A-Z_]+: (ipv[46]:)?", "", details.rpartition("last error: ")[2]))
        remedy = mismatch(why)
        return f"no server answers: {why}" if remedy is None else f"{_address_in(why)}{remedy}"
    return details


_MISMATCHES = (
    ("WRONG_VERSION_NUMBER", "the server does not speak TLS: leave out `credentials` (--tls, --tls-ca)"),
    (
        "Hostname Verification",
        "the server's certificate is for another name than its address: use a name in the certificate, or give it as "
        "the option grpc.ssl_target_name_override (--tls-name)",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the server's certificate is not signed by an authority that this client trusts: give that authority's "
        "certificate in `credentials` (--tls-ca)",
    ),
    (
        "Failed parsing HTTP/2",
        "this is another kind of server, perhaps the HTTP one of `specdec openai`: use the port of the orchestrator",
    ),
    (
        "Socket closed",
        "the server closes new connections: perhaps it requires TLS (`credentials`; --tls-ca, --tls), or also a client "
        "certificate (in `credentials`; --tls-cert)",
    ),
)
"""gRPC's messages about a mismatch of client and server, and the remedies."""


def mismatch(why: str) -> str | None:
    """Return the remedy for a connection that failed with this gRPC message; None for an unknown message."""
    return next((remedy for words, remedy in _MISMATCHES if words in why), None)


def _address_in(why: str) -> str:
    """Return the address at the start of one of gRPC's reasons, with a colon; empty if there is none."""
    found = re.match(r"(\[[^\]]*\]|[^\s:]+):\d+: ", why)
    return found[0] if found else ""


def is_loss(error: SpecdecError) -> bool:
    """Return True if the server, not the request, is at fault: another server may answer.

    Cancelled without a reason comes from a server that is shutting down and cancels late calls, not from a caller.
    """
    return isinstance(error, Unavailable) or (isinstance(error, Cancelled) and not error.reason)


def _details(error: grpc.RpcError) -> list[tuple[str, bytes]]:
    """Return (type, encoded message) of the details attached to a status (google.rpc.Status)."""
    status = b""
    for key, value in cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ()):
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            status = value
    try:
        packed = [_fields(detail) for detail in _fields(status).get(3, [])]
    except DecodeError:
        return []
    return [(_text(detail, 1).rpartition("/")[2], detail.get(2, [b""])[0]) for detail in packed]


def _fields(data: bytes) -> dict[int, list[bytes]]:
    """Return the strings, bytes and messages in an encoded message, by field number.

    Reading google.rpc's messages this way saves the client a dependency. An Empty has no fields, so the parser keeps
    every field as unknown.
    """
    fields: dict[int, list[bytes]] = {}
    unknown = UnknownFieldSet(Empty.FromString(data))
    for field in (unknown[i] for i in range(len(unknown))):
        if isinstance(field.data, bytes):
            fields.setdefault(field.field_number, []).append(field.data)
    return fields


def _text(fields: Mapping[int, list[bytes]], number: int) -> str:
    return fields.get(number, [b""])[0].decode(errors="replace")
