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


STARTS_APART_SECONDS = 2.0
"""Maximum difference between the starts that two snapshots of one process give. An answer takes some time."""


class PodStats(NamedTuple):
    """A service's role, and its statistics."""

    role: str
    stats: Stats
    at: float  # time of the answer, from time.monotonic

    def is_same_process(self, other: PodStats) -> bool:
        """Return whether two snapshots are of one process: containers often have equal process ids, so the starts are
        compared, too."""
        apart = (self.at - self.stats.up_us / 1e6) - (other.at - other.stats.up_us / 1e6)
        return self.stats.pod.process_id == other.stats.pod.process_id and abs(apart) <= STARTS_APART_SECONDS

    def as_json(self) -> dict[str, Any]:
        return {"role": self.role, **values_of(self.stats)}


def ask(channel: grpc.Channel, seconds: float, metadata: Sequence[tuple[str, str]] = ()) -> PodStats:
    """Request the statistics of the service behind a channel. Raise grpc.RpcError if there is no answer within
    `seconds`, NoSuchServiceError if the server is none of the three."""
    deadline = time.monotonic() + seconds
    for role, stub, request in SERVICES:
        left = max(0.0, deadline - time.monotonic())
        try:
            stats = stub(channel).GetStats(request, timeout=left, metadata=metadata)
            return PodStats(role, stats, time.monotonic())
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
    raise NoSuchServiceError
