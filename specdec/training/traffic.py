"""Traffic: the texts that draft services keep to learn from. A training has them in memory alone.

What a draft has learned from whom is written beside its weights, before them (`specdec/engine/learned_from.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import grpc
import torch
from torch import Tensor

from specdec.client.errors import from_rpc
from specdec.training.texts import TextError
from specdec.v2 import learning_pb2, learning_pb2_grpc


@dataclass(frozen=True)
class TrainingTraffic:
    """Kept texts, and since when there are some of each tenant."""

    texts: Sequence[Sequence[int]]
    tenants: Mapping[str, float]
    """Digest of a tenant -> when its oldest text was kept, Unix seconds."""

    @classmethod
    def of(cls, messages: Iterable[learning_pb2.KeptText], read: float) -> TrainingTraffic:
        """Return texts that were read at these Unix seconds, or later."""
        texts = list(messages)
        tenants: dict[str, float] = {}
        for text in texts:
            at = read - text.age_us / 1e6
            tenants[text.tenant_digest] = min(at, tenants.get(text.tenant_digest, at))
        return cls([text.tokens for text in texts], tenants)

    def tokens(self, end: int | None) -> Tensor:
        """Return the tokens of all texts, int64 [n], with the `end` token after each."""
        ends = [] if end is None else [end]
        return torch.tensor([token for text in self.texts for token in (*text, *ends)], dtype=torch.int64)


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
