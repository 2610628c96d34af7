"""Runs a command in a network of its own, where a resolver records the names that are looked up.

    python -m testing.own_network COMMAND [ARGUMENT ...]

The network has only a loopback interface, and `/etc/resolv.conf` names a resolver on it. The resolver returns 127.0.0.1
for names that end with PEERS, and knows no others. After the command has ended, one line of JSON on stdout contains its
exit status and the names; the command's own output goes to stderr. Needs Linux and permission to create user
namespaces; `problem` checks this.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

PEERS = ".peers.test"
"""Suffix of the names that the resolver knows: the services under test."""

_UNSHARE = ("unshare", "--map-root-user", "--net", "--mount")
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_IFREQ = struct.Struct("16sh22x")
_HEADER = struct.Struct("!6H")
_A, _AAAA, _IN = 1, 28, 1
_RESPONSE, _NAME_ERROR = 0x8180, 0x8183


@dataclass(frozen=True)
class Lookups:
    """The outcome of a command in a network of its own."""

    status: int  # exit status
    names: set[str]  # names looked up
    printed: str  # the command's output


def problem() -> str | None:
    """Return why a command cannot run in a network of its own here; None if it can."""
    if shutil.which(_UNSHARE[0]) is None:
        return "there is no unshare"
    done = subprocess.run(
        [*_UNSHARE, "mount", "--bind", "/etc/hosts", "/etc/resolv.conf"], capture_output=True, text=True
    )
    return None if done.returncode == 0 else done.stderr.strip() or "namespaces cannot be created"


def run(*command: str, seconds: float) -> Lookups:
    """Run a command in a network of its own; TimeoutExpired if it takes longer than the given time."""
    process = subprocess.Popen(
        [*_UNSHARE, sys.executable, "-m", "testing.own_network", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, printed = process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the process group, so that the command ends too
        process.wait()
    if process.returncode:
        raise RuntimeError(f"no network of its own: {printed}")
    found = json.loads(output)
    return Lookups(found["status"], set(found["names"]), printed)


def question(message: bytes) -> tuple[str, int, int]:
    """Return the name that a DNS message asks for, its type, and where the question ends."""
    labels, at = [], _HEADER.size
    while length := message[at]:
        labels.append(message[at + 1 : at + 1 + length].decode("ascii", "replace"))
        at += 1 + length
    (kind,) = struct.unpack_from("!H", message, at + 1)
    return ".".join(labels).lower(), kind, at + 5


def answer(message: bytes) -> bytes:
    """Return the response to a DNS message with one question."""
    name, kind, end = question(message)
    (number,) = struct.unpack_from("!H", message)
    known = name.endswith(PEERS)
    addresses = 1 if known and kind == _A else 0
    head = _HEADER.pack(number, _RESPONSE if known else _NAME_ERROR, 1, addresses, 0, 0)
    to_question = 0xC000 | _HEADER.size
    record = struct.pack("!HHHIH4s", to_question, _A, _IN, 0, 4, socket.inet_aton("127.0.0.1"))
    return head + message[_HEADER.size : end] + record * addresses


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = _IFREQ.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0)))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))


def _resolve(server: socket.socket, names: set[str]) -> None:
    while True:
        message, caller = server.recvfrom(4096)
        names.add(question(message)[0])
        server.sendto(answer(message), caller)


def main(command: Sequence[str]) -> None:
    _bring_up_loopback()
    names = set[str]()
    with TemporaryDirectory() as folder, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        settings = Path(folder, "resolv.conf")
        settings.write_text("nameserver 127.0.0.1\n")
        subprocess.run(["mount", "--bind", settings, "/etc/resolv.conf"], check=True)
        server.bind(("127.0.0.1", 53))
        threading.Thread(target=_resolve, args=(server, names), daemon=True).start()
        done = subprocess.run([*command], stdout=sys.stderr, check=False)
        print(json.dumps({"status": done.returncode, "names": sorted(names)}))


if __name__ == "__main__":
    main(sys.argv[1:])
