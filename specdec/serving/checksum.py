"""The checksum of a verifier session: a running CRC-32 over its opening and what it has committed, which shows that
what was sent is what was received. The answer to the opening has one of its own.

Most damaged messages break something that is checked. But a flipped bit in a token id makes another token, in a seed
another text, and in the model's fingerprint another model, which no verifier serves: nobody could tell. TLS could;
within a cluster many do without it.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from typing import TypeVar

from specdec.v2 import verifier_pb2

Opening = TypeVar("Opening", verifier_pb2.VerifyOpen, verifier_pb2.VerifyOpened)


def of_opening(message: Opening) -> int:
    """Return the checksum of a session's opening, with which it begins, or of the answer to it: it covers all fields
    but the checksum itself."""
    bare = type(message)()
    bare.CopyFrom(message)
    bare.ClearField("checksum")
    return zlib.crc32(bare.SerializeToString(deterministic=True))


def extended(checksum: int, tokens: Iterable[int], finish: int = 0) -> int:
    """Return the checksum extended over `tokens`, and over the reason that ends the text with them; each has 4 bytes in
    native order, which is little-endian wherever this is known to run."""
    numbers = array("I", tokens)
    if finish:
        numbers.append(finish & 0xFFFFFFFF)
    return zlib.crc32(numbers, checksum)
