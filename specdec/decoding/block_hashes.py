"""Block hashes: 64-bit names for prefixes of a text, used to ask a verifier which of these prefixes it has cached.

A text is cut into blocks of `HASHED_TOKENS` tokens. The hash of a block covers the cache scope, all previous blocks and
its own tokens, as in vLLM's prefix caching: equal hashes mean equal prefixes. Among 2**32 different prefixes, half a
collision is expected; its only effect is that a text is routed to a worse verifier.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASHED_TOKENS = 64
"""Tokens per block. Verifiers and orchestrators must agree on it, as stated in `verifier.proto`."""


def cache_scope(tenant: str, salt: str = "") -> bytes:
    """Return the scope of a text in prefix caches: texts share prefixes if tenant and salt are equal. UTF-8 never
    contains byte 255, so different (tenant, salt) pairs have different scopes."""
    return tenant.encode() + (b"\xff" + salt.encode() if salt else b"")


def root_hash(scope: bytes) -> int:
    """Return the hash preceding the first block of a cache scope."""
    return _digest(scope)


def next_hash(before: int, block: bytes) -> int:
    """Return the hash of a block from the previous block's hash. `block`: its tokens, 4 bytes each, little-endian."""
    return _digest(before.to_bytes(8, "little") + block)


def block_hashes(tokens: Sequence[int], scope: bytes, known: Sequence[int] = ()) -> list[int]:
    """Return the hashes of a text's full blocks, first to last. `tokens` are those after the blocks with `known`
    hashes."""
    text, size, found = array("I", tokens).tobytes(), 4 * HASHED_TOKENS, list(known)
    before = found[-1] if found else root_hash(scope)
    for start in range(0, len(text) - size + 1, size):
        before = next_hash(before, text[start : start + size])
        found.append(before)
    return found


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
