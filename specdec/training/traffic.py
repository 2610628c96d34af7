"""Traffic: the texts that draft services keep to learn from. A training has them in memory alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch
from torch import Tensor

from specdec.client.errors import from_rpc
from specdec.training.files import replace_json
from specdec.training.texts import TextError
from specdec.v2 import learning_pb2, learning_pb2_grpc

LEARNED_FROM = "learned_from.json"
"""File beside a draft's weights, with the digests of the tenants whose texts it has learned from."""


@dataclass(frozen=True)
class TrainingTraffic:
    """Kept texts, and the digests of their tenants."""

    texts: Sequence[Sequence[int]]
    tenants: frozenset[str]

    @classmethod
    def of(cls, messages: Iterable[learning_pb2.KeptText]) -> TrainingTraffic:
        texts = list(messages)
        return cls([text.tokens for text in texts], frozenset(text.tenant_digest for text in texts))

    def tokens(self, end: int | None) -> Tensor:
        """Return the tokens of all texts, int64 [n], with the `end` token after each."""
        ends = [] if end is None else [end]
        return torch.tensor([token for text in self.texts for token in (*text, *ends)], dtype=torch.int64)

    def name_tenants(self, out: Path) -> None:
        """Write LEARNED_FROM. WriteError if that fails."""
        replace_json(out / LEARNED_FROM, {"tenants": sorted(self.tenants)})


def kept_texts(
    target: str, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], seconds: float
) -> list[learning_pb2.KeptText]:
    """Return what the draft service at `target` keeps, within some seconds; TextError, with a one-line message, if it
    cannot be read."""
    stub = learning_pb2_grpc.LearningServiceStub(channel)
    try:
        answers = stub.GetTraffic(learning_pb2.GetTrafficRequest(), timeout=seconds, metadata=metadata)
        return [text for answer in answers for text in answer.texts]
    except grpc.RpcError as error:
        raise TextError(f"--traffic: {target}: {from_rpc(error)}") from None
