"""What was said is what was heard: a running CRC-32 over a verifier session's opening and what it has committed.

Most wrong messages break something that is checked. A bit flipped in a token id makes another token, in a seed another
text: nobody could tell. TLS would; within a cluster many do without.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable

from specdec.v2 import verifier_pb2


def of_opening(message: verifier_pb2.VerifyOpen) -> int:
    """What the checksum begins with: all that is asked for."""
    bare = verifier_pb2.VerifyOpen()
    bare.CopyFrom(message)
    bare.ClearField("checksum")
    return zlib.crc32(bare.SerializeToString(deterministic=True))


def extended(checksum: int, tokens: Iterable[int], finish: int = 0) -> int:
    """Over `tokens` as well, and over the reason that ends the text with them; each 4 bytes
    in native order, which is little-endian wherever this is known to run."""
    told = array("I", tokens)
    if finish:
        told.append(finish & 0xFFFFFFFF)
    return zlib.crc32(told, checksum)
