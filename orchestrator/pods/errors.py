"""Why a pod cannot take a text, so that the caller may ask another pod: the pod is lost, or serves something else."""

from __future__ import annotations

from orchestrator.requests.model import ServedModel
from specdec.serving.errors import ProtocolError, ServiceError
from specdec.serving.identity import protocol_mismatch
from specdec.v2 import model_pb2

MAX_IDENTITY_BYTES = 4096
"""Size limit in bytes of a pod's identity, which is kept with the session: names and fingerprints take a few
hundred."""


class LostError(Exception):
    """The session is gone; another pod may resume its text. `conclusive`: the pod is gone as well, for all sessions.
    `died`: the pod was up, and vanished without a status."""

    def __init__(self, message: str, *, conclusive: bool = False, died: bool = False) -> None:
        super().__init__(message)
        self.conclusive = conclusive
        self.died = died


class UnfitError(Exception):
    """The pod works, but serves something else. `error` goes to the client if there is no other pod."""

    def __init__(self, error: ServiceError) -> None:
        super().__init__(str(error))
        self.error = error


class ForeignPodError(UnfitError):
    """The pod can serve no request here: its protocol or its model differs. `reason` is machine-readable."""

    def __init__(self, reason: str, error: ServiceError) -> None:
        super().__init__(error)
        self.reason = reason


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
