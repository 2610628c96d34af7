"""Fitness: whether a pod, by its reported identity, can serve this orchestrator's model."""

from __future__ import annotations

from orchestrator.pods.errors import ForeignPodError, LostError
from orchestrator.requests.model import ServedModel
from specdec.serving.errors import ProtocolError
from specdec.serving.identity import protocol_mismatch
from specdec.v2 import model_pb2

MAX_IDENTITY_BYTES = 4096
"""Size limit in bytes of a pod's identity, which is kept with the session: names and fingerprints take a few
hundred."""


def check_fit(identity: model_pb2.ModelIdentity, model: ServedModel, peer: str) -> None:
    """Raise ForeignPodError unless the pod, called `peer` in messages, has our protocol and tokenizer; LostError if its
    identity is malformed."""
    if identity.ByteSize() > MAX_IDENTITY_BYTES or not identity.context_tokens:
        raise LostError(
            f"its identity has {identity.ByteSize()} bytes and a context of {identity.context_tokens} tokens"
        )
    if (mismatch := protocol_mismatch(identity)) is not None:
        raise ForeignPodError("protocol_mismatch", ProtocolError(f"{peer}: {mismatch}"))
    if identity.tokenizer_fingerprint != model.tokenizer_fingerprint:
        raise ForeignPodError(
            "tokenizer_mismatch",
            ProtocolError(f"{peer}: serves {identity.model!r} with a different tokenizer than {model.name!r} here"),
        )


def check_verifier(identity: model_pb2.ModelIdentity, model: ServedModel) -> None:
    """Check a verifier as `check_fit` does, and that its context is no longer than the model's."""
    check_fit(identity, model, "verifier")
    if identity.context_tokens > model.context:
        raise ForeignPodError(
            "context_mismatch",
            ProtocolError(
                f"verifier: has a context of {identity.context_tokens} tokens, more than the {model.context} "
                f"of {model.name!r} here"
            ),
        )
