"""DNS messages: questions and answers."""

from __future__ import annotations

import socket
import struct

import pytest

from testing.own_network import PEERS, answer, question


def asked(name: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!2H", kind, 1)


@pytest.mark.parametrize("more", [b"", b"\0\0\x29\x04\xd0\0\0\0\0\0\0"])  # EDNS adds a record
def test_a_question_is_read(more: bytes) -> None:
    message = asked("Reports.Example", 28)
    assert question(message + more) == ("reports.example", 28, len(message))


@pytest.mark.parametrize(
    ("name", "kind", "code", "addresses"),
    [(f"a{PEERS}", 1, 0, 1), (f"a{PEERS}", 28, 0, 0), ("reports.example", 1, 3, 0), ("a.test", 1, 3, 0)],
)
def test_peers_are_known_by_their_address_and_no_others(name: str, kind: int, code: int, addresses: int) -> None:
    said = answer(asked(name, kind))
    number, flags, questions, answers, *_ = struct.unpack_from("!6H", said)
    assert (number, flags >> 15, flags & 0xF, questions, answers) == (7, 1, code, 1, addresses)
    assert question(said)[0] == name
    assert said.endswith(socket.inet_aton("127.0.0.1")) is bool(addresses)
