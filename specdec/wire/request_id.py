"""Request ids: a request's identity in the logs and traces of all services."""

from __future__ import annotations

import uuid

REQUEST_ID = "x-request-id"
"""Metadata key of the request id."""

REQUEST_ID_CHARACTERS = 64


def is_request_id(given: object) -> bool:
    """Return True for a valid request id: 1 to 64 printable ASCII characters."""
    return (
        isinstance(given, str) and 0 < len(given) <= REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable()
    )


def new_request_id() -> str:
    return uuid.uuid4().hex[:16]
