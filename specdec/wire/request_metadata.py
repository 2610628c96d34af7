"""The metadata of a request's calls: its id, and the number of prompts of its HTTP request."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

REQUEST_ID = "x-request-id"
"""Metadata key of the request id: a request's identity in the logs and traces of all services."""

REQUEST_ID_CHARACTERS = 64

PROMPTS = "specdec-prompts"
"""Metadata key of the number of prompts of an HTTP request. Each prompt is a separate request to an orchestrator."""

MAX_DIGITS = 6
"""Maximum digits of the number of prompts; longer ones are ignored."""


def is_request_id(given: object) -> bool:
    """Return True for a valid request id: 1 to 64 printable ASCII characters."""
    return (
        isinstance(given, str) and 0 < len(given) <= REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable()
    )


def new_request_id() -> str:
    return uuid.uuid4().hex[:16]


def prompts_in(metadata: Iterable[tuple[str, Any]]) -> int:
    """Return the number of prompts in the HTTP request that a call belongs to; 1 if the metadata has no number."""
    given = dict(metadata).get(PROMPTS, "1")
    return int(given) if isinstance(given, str) and given.isdecimal() and len(given) <= MAX_DIGITS else 1
