"""The statistics of a pod of any of the three services.

Each service has a `GetStats` of its own, and answers UNIMPLEMENTED to those of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from specdec.v2.draft_pb2 import DraftServiceGetStatsRequest, DraftServiceGetStatsResponse
from specdec.v2.draft_pb2_grpc import DraftServiceStub
from specdec.v2.generation_pb2 import GenerationServiceGetStatsRequest, GenerationServiceGetStatsResponse
from specdec.v2.generation_pb2_grpc import GenerationServiceStub
from specdec.v2.verifier_pb2 import GetStatsRequest, GetStatsResponse
from specdec.v2.verifier_pb2_grpc import VerifierServiceStub

Stats = GenerationServiceGetStatsResponse | GetStatsResponse | DraftServiceGetStatsResponse

SERVICES: tuple[tuple[str, Callable[[grpc.Channel], Any], Message], ...] = (
    ("orchestrator", GenerationServiceStub, GenerationServiceGetStatsRequest()),
    ("verifier", VerifierServiceStub, GetStatsRequest()),
    ("draft", DraftServiceStub, DraftServiceGetStatsRequest()),
)
"""(role, stub, request), in the order in which they are tried."""

_LONG = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)
"""Types converted to strings by MessageToDict, since JavaScript's numbers cannot hold 64 bits."""


class NoSuchServiceError(Exception):
    """A gRPC server answers, but is none of the three services."""


class PodStats(NamedTuple):
    """A service's role, and its statistics."""

    role: str
    stats: Stats

    def as_json(self) -> dict[str, Any]:
        return {"role": self.role, **_values(self.stats)}


def ask(channel: grpc.Channel, seconds: float, metadata: Sequence[tuple[str, str]] = ()) -> PodStats:
    """Request the statistics of the service behind a channel. Raise grpc.RpcError if there is no answer within
    `seconds`, NoSuchServiceError if it is none of the three."""
    for role, stub, request in SERVICES:
        try:
            return PodStats(role, stub(channel).GetStats(request, timeout=seconds, metadata=metadata))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
    raise NoSuchServiceError


def _values(message: Message) -> dict[str, Any]:
    """Return a message's fields by name, in MessageToDict's form, but with numbers as numbers."""
    found = MessageToDict(message, always_print_fields_with_no_presence=True, preserving_proto_field_name=True)
    return _with_numbers(message.DESCRIPTOR, found)


def _with_numbers(kind: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields in the order of their declaration, with numbers in place of strings."""
    return {field.name: _with_number(field, found[field.name]) for field in kind.fields if field.name in found}


def _with_number(field: Any, value: Any) -> Any:
    inner = field.message_type
    if field.type in _LONG:
        return int(value)
    if inner is None:
        return value
    if inner.GetOptions().map_entry:
        return {key: _with_number(inner.fields_by_name["value"], item) for key, item in value.items()}
    return [_with_numbers(inner, item) for item in value] if isinstance(value, list) else _with_numbers(inner, value)
