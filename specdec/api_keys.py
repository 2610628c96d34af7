"""API keys: long random texts, of which servers keep hashes alone."""

from __future__ import annotations

import hashlib
import secrets

KEY_BYTES = 32


def new() -> str:
    """Return a key that nobody can guess: a plain hash of it cannot be turned back, and needs no salt."""
    return f"specdec-{secrets.token_urlsafe(KEY_BYTES)}"


def hash_of(key: str) -> str:
    """Return the hash of a key, as files of tenants have it."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
