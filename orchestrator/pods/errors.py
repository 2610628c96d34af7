"""Errors of a pod after which the caller may ask another pod: the pod is lost, or serves something else."""

from __future__ import annotations

from specdec.serving.errors import ServiceError


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
