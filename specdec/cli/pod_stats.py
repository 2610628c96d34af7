"""The statistics of a pod of any of the three services.

Each service implements only its own `GetStats`, and answers UNIMPLEMENTED to the other services'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import Message

from specdec.v2.draft_pb2 import DraftServiceGetStatsRequest, DraftServiceGetStatsResponse
from specdec.v2.draft_pb2_grpc import DraftServiceStub
from specdec.v2.generation_pb2 import GenerationServiceGetStatsRequest, GenerationServiceGetStatsResponse
from specdec.v2.generation_pb2_grpc import GenerationServiceStub
from specdec.v2.verifier_pb2 import GetStatsRequest, GetStatsResponse
from specdec.v2.verifier_pb2_grpc import VerifierServiceStub
from specdec.wire.message_values import values_of

Stats = GenerationServiceGetStatsResponse | GetStatsResponse | DraftServiceGetStatsResponse

SERVICES: tuple[tuple[str, Callable[[grpc.Channel], Any], Message], ...] = (
    ("orchestrator", GenerationServiceStub, GenerationServiceGetStatsRequest()),
    ("verifier", VerifierServiceStub, GetStatsRequest()),
    ("draft", DraftServiceStub, DraftServiceGetStatsRequest()),
)
"""(role, stub, request), in the order of attempts."""


class NoSuchServiceError(Exception):
    """A gRPC server answers, but it is none of the three services."""


class PodStats(NamedTuple):
    """A service's role, and its statistics."""

    role: str
    stats: Stats

    def as_json(self) -> dict[str, Any]:
        return {"role": self.role, **values_of(self.stats)}


def ask(channel: grpc.Channel, seconds: float, metadata: Sequence[tuple[str, str]] = ()) -> PodStats:
    """Request the statistics of the service behind a channel. Raise grpc.RpcError if there is no answer within
    `seconds`, NoSuchServiceError if the server is none of the three."""
    deadline = time.monotonic() + seconds
    for role, stub, request in SERVICES:
        left = max(0.0, deadline - time.monotonic())
        try:
            return PodStats(role, stub(channel).GetStats(request, timeout=left, metadata=metadata))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
    raise NoSuchServiceError
