"""Request ids: the names by which the logs and traces of all services know a request."""

from __future__ import annotations

import uuid

REQUEST_ID = "x-request-id"
"""Key of the metadata that has it."""

REQUEST_ID_CHARACTERS = 64


def is_request_id(given: object) -> bool:
    """Return True if services take this as a request id: 1 to 64 printable ASCII characters."""
    return (
        isinstance(given, str) and 0 < len(given) <= REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable()
    )


def new_request_id() -> str:
    return uuid.uuid4().hex[:16]
