"""The checksum of a verifier session: a running CRC-32 over its opening and its committed tokens, which both ends
compare. The answer to the opening carries a separate checksum.

Most damaged messages fail validation. But a flipped bit may turn a token id or a seed into another valid one, or the
model's fingerprint into one that no verifier serves: without a checksum, this damage would go unnoticed. TLS detects
it, but many clusters do not use TLS internally.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from typing import TypeVar

from specdec.v2 import verifier_pb2

Opening = TypeVar("Opening", verifier_pb2.VerifyOpen, verifier_pb2.VerifyOpened)


def of_opening(message: Opening) -> int:
    """Return the checksum of a session's opening or of the answer to it, over all fields except `checksum`. The running
    checksum starts with the opening's."""
    if message.HasField("checksum"):
        bare = type(message)()
        bare.CopyFrom(message)
        bare.ClearField("checksum")
        message = bare
    return zlib.crc32(message.SerializeToString(deterministic=True))


def extended(checksum: int, tokens: Iterable[int], finish: int = 0) -> int:
    """Return the checksum extended over `tokens` and, if the text ends with them, the finish reason: 4 bytes each in
    native byte order, little-endian on all supported machines."""
    numbers = array("I", tokens)
    if finish:
        numbers.append(finish & 0xFFFFFFFF)
    return zlib.crc32(numbers, checksum)
