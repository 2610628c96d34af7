"""API keys: long random texts. Servers store only their hashes."""

from __future__ import annotations

import hashlib
import secrets

KEY_BYTES = 32


def new() -> str:
    """Return a new random key of KEY_BYTES bytes: at this entropy an unsalted hash cannot be reversed."""
    return f"specdec-{secrets.token_urlsafe(KEY_BYTES)}"


def bearer_key(authorization: str) -> str | None:
    """Return the key in an `authorization` header, None if its scheme is not Bearer. The scheme may have any case, and
    the key white space around it."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def hash_of(key: str) -> str:
    """Return a key's hash in the format of tenant files."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
