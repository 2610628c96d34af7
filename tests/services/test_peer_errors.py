"""A peer's status: an internal failure is accepted as such only if status message and rich status agree."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from specdec.serving.errors import (
    ModelFailureError,
    OverloadedError,
    PeerLostError,
    ServiceError,
    from_rpc,
    to_status,
)


def heard(error: ServiceError, details: str | None = None, rich: bytes | None = None) -> AioRpcError:
    """Return the error as its caller receives it, with message or rich status altered in transit."""
    status = to_status(error)
    ((key, value),) = status.trailing_metadata
    return AioRpcError(status.code, Metadata(), Metadata((key, value if rich is None else rich)), details or str(error))


@pytest.mark.parametrize("message", ["logits are not finite", "la sortie du modèle n'est pas finie: ∞"])
def test_a_failure_of_its_own_is_believed(message: str) -> None:
    found = from_rpc(heard(ModelFailureError(message)), "verifier")
    assert isinstance(found, ModelFailureError)
    assert message not in str(found)  # its message belongs in our log only


@pytest.mark.parametrize(
    "error",
    [
        heard(ModelFailureError("logits are not finite"), details="logits are not finIte"),
        heard(ModelFailureError("logits are not finite"), rich=b"\xff\xff\xff"),
        AioRpcError(grpc.StatusCode.INTERNAL, Metadata(), Metadata(), "Stream removed"),
    ],
    ids=["other words", "unreadable", "the transport's"],
)
def test_any_other_internal_status_is_the_transports(error: AioRpcError) -> None:
    found = from_rpc(error, "verifier")
    assert isinstance(found, PeerLostError)
    assert found.reason == "VERIFIER_LOST"


def test_when_to_come_back_survives() -> None:
    found = from_rpc(heard(OverloadedError("full", retry_after=2.5)), "verifier")
    assert isinstance(found, OverloadedError)
    assert found.retry_after == 2.5


def test_a_second_if_it_does_not_say() -> None:
    error = heard(OverloadedError("full", retry_after=2.5))
    error = AioRpcError(error.code(), Metadata(), Metadata(), error.details())
    found = from_rpc(error, "verifier")
    assert isinstance(found, OverloadedError)
    assert found.retry_after == 1.0
