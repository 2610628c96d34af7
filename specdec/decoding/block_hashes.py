"""Block hashes: short names of a text's beginnings, by which others can ask which of them a verifier has computed.

A text is cut into blocks of `HASHED_TOKENS` tokens. The hash of a block covers the tenant, all blocks before it and its
own tokens, as in vLLM's prefix caching: equal hashes mean equal beginnings. Among 2**32 different ones two may be
expected to share a hash; then a text is routed less well, and nothing else happens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASHED_TOKENS = 64
"""Tokens in a block. Verifiers and orchestrators must agree on it, as `verifier.proto` says."""


def root_hash(tenant: str) -> int:
    """Return what the hash of a tenant's first blocks continues."""
    return _digest(tenant.encode())


def next_hash(before: int, block: bytes) -> int:
    """Return the hash of a block, its tokens as 4 bytes each, little-endian; `before` is that of the block before."""
    return _digest(before.to_bytes(8, "little") + block)


def block_hashes(tokens: Sequence[int], tenant: str) -> list[int]:
    """Return the hashes of the blocks of a text that are full, first to last."""
    text, size, found = array("I", tokens).tobytes(), 4 * HASHED_TOKENS, []
    before = root_hash(tenant)
    for start in range(0, len(text) - size + 1, size):
        before = next_hash(before, text[start : start + size])
        found.append(before)
    return found


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
