"""The meeting of ranks: connections between rank 0 and the others, and the store of torch.distributed over them.

torch's own store listens on all interfaces and takes anybody's word for the address of a rank; and what ranks tell each
other is executed. So ranks do not use it. Those of one machine meet at a socket in a folder that no other user can
enter. Those of several machines meet at rank 0, which listens at `MASTER_ADDR` alone, on the port behind `MASTER_PORT`,
where each side proves that it knows the secret in `SPECDEC_RANKS_SECRET`, which is not sent itself.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import secrets
import socket
import struct
import tempfile
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NamedTuple

from specdec.engine import cache_folder
from specdec.engine.distributed.rank_store import RankStore, RemoteValues, Values
from specdec.engine.engine import UnsupportedModelError

SECRET = "SPECDEC_RANKS_SECRET"
MIN_SECRET_BYTES = 16

RETRY_SECONDS = 0.1
"""Seconds between two tries to reach a rank 0 that does not listen yet."""

LOOK_SECONDS = 0.02
"""Seconds between two looks for ranks that have proved who they are, while no further one comes."""

HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 256
"""Handshakes at a time, each in a thread of its own, and the time that each side may take for its word: a stranger that
says nothing keeps nobody from joining."""

NONCE_BYTES = 32
COMMANDS, STORE = 0, 1
"""Purposes of a connection."""

_HELLO = struct.Struct("<BI")  # what it is for, and the rank


class Met(NamedTuple):
    """A rank's connections to the other ranks."""

    connections: dict[Connection, int]
    """Each with the rank at its other end: of rank 0 all others, of these rank 0."""
    store: RankStore


class StrangerError(Exception):
    """The other end does not know the secret, or is no rank."""


def meet(rank: int, degree: int, *, one_machine: bool, patience: timedelta) -> Met:
    """Meet the other ranks; UnsupportedModelError says what is wrong on this machine, TimeoutError that rank 0 was not
    found in time."""
    address: Any
    if one_machine:
        address, key = str(_private_folder() / "rank-0"), b""  # whoever can enter the folder is this user
        _stay_on_loopback()
    else:
        address, key = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1), _secret()
    if rank:
        commands, values = (_reached(address, key, rank, purpose, patience) for purpose in (COMMANDS, STORE))
        return Met({commands: 0}, RankStore(RemoteValues(values), patience))
    with _listening(address) as listener:
        found = _gathered(listener, key, degree)
    if one_machine:
        Path(address).unlink()
        with contextlib.suppress(OSError):
            Path(address).parent.rmdir()
    kept = Values()
    for other in range(1, degree):
        serving = threading.Thread(target=kept.serve, args=(found[STORE, other],), name="ranks-store", daemon=True)
        serving.start()
    return Met({found[COMMANDS, other]: other for other in range(1, degree)}, RankStore(kept, patience))


def _reached(address: Any, key: bytes, rank: int, purpose: int, patience: timedelta) -> Connection:
    """Return a connection to rank 0, which may not listen yet."""
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        try:
            connection = Client(address)
            _introduce(connection, key, rank, purpose)
            return connection
        except StrangerError:
            raise UnsupportedModelError(
                f"rank {rank}: what listens at {address} does not know this rank's {SECRET}: give all ranks the same"
            ) from None
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank}: no rank 0 at {address}: {error}") from error
            time.sleep(RETRY_SECONDS)


def _listening(address: Any) -> socket.socket:
    """Return a socket that listens at an address: a host and port, or a path."""
    if isinstance(address, tuple):
        return socket.create_server(address, backlog=MAX_HANDSHAKES)
    Path(address).unlink(missing_ok=True)  # that of a rank 0 which was killed
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(MAX_HANDSHAKES)
    return listener


def _gathered(listener: socket.socket, key: bytes, degree: int) -> dict[tuple[int, int], Connection]:
    """Return the connections of all other ranks by what they are for and whose they are. Strangers are turned away."""
    arrived: queue.SimpleQueue[tuple[tuple[int, int], Connection]] = queue.SimpleQueue()
    places = threading.BoundedSemaphore(MAX_HANDSHAKES)

    def receive(connection: Connection) -> None:
        try:
            arrived.put((_examined(connection, key, degree), connection))
        except (StrangerError, OSError, EOFError):
            connection.close()
        finally:
            places.release()

    listener.settimeout(LOOK_SECONDS)
    found: dict[tuple[int, int], Connection] = {}
    while len(found) < 2 * (degree - 1):
        with contextlib.suppress(TimeoutError):
            accepted, _ = listener.accept()
            accepted.settimeout(None)
            connection = Connection(accepted.detach())
            if places.acquire(blocking=False):
                threading.Thread(target=receive, args=(connection,), daemon=True).start()
            else:
                connection.close()
        with contextlib.suppress(queue.Empty):
            while True:
                who, connection = arrived.get_nowait()
                found[who] = connection
    return found


def _introduce(connection: Connection, key: bytes, rank: int, purpose: int) -> None:
    """Prove to rank 0 that this is a rank, and have it prove that it is rank 0; StrangerError if it cannot."""
    theirs = _heard(connection, NONCE_BYTES)
    hello, ours = _HELLO.pack(purpose, rank), secrets.token_bytes(NONCE_BYTES)
    connection.send_bytes(hello + ours + _proof(key, b"rank", hello, theirs, ours))
    try:
        answer = _heard(connection, NONCE_BYTES)
    except EOFError:
        raise StrangerError from None
    if not hmac.compare_digest(answer, _proof(key, b"rank 0", hello, theirs, ours)):
        raise StrangerError


def _examined(connection: Connection, key: bytes, degree: int) -> tuple[int, int]:
    """Have the other end prove that it is a rank; return what the connection is for, and its rank."""
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.send_bytes(ours)
    said = _heard(connection, _HELLO.size + 2 * NONCE_BYTES)
    hello, rest = said[: _HELLO.size], said[_HELLO.size :]
    theirs, proof = rest[:NONCE_BYTES], rest[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"rank", hello, ours, theirs)):
        raise StrangerError
    purpose, rank = _HELLO.unpack(hello)
    if purpose not in (COMMANDS, STORE) or not 0 < rank < degree:
        raise StrangerError
    connection.send_bytes(_proof(key, b"rank 0", hello, ours, theirs))
    return purpose, rank


def _heard(connection: Connection, count: int) -> bytes:
    if not connection.poll(HANDSHAKE_SECONDS):
        raise OSError("it says nothing")
    said = connection.recv_bytes(count)
    if len(said) != count:
        raise StrangerError
    return said


def _proof(key: bytes, *parts: bytes) -> bytes:
    """Return what only who knows the key can tell, of what both sides have said."""
    return hmac.digest(key, b"".join(struct.pack("<I", len(part)) + part for part in parts), "sha256")


def _secret() -> bytes:
    found = os.environ.get(SECRET, "").encode()
    if len(found) < MIN_SECRET_BYTES:
        raise UnsupportedModelError(
            f"{SECRET} has {len(found)} bytes: ranks on several machines need a secret of at least {MIN_SECRET_BYTES}, "
            "the same for all"
        )
    return found


def _private_folder() -> Path:
    """Return the folder of the ranks that torchrun has started here: of this user alone."""
    launched = os.getppid(), os.environ.get("MASTER_PORT", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    folder = Path(tempfile.gettempdir()) / f"specdec-ranks-{os.geteuid()}" / "-".join(map(str, launched))
    for part in (folder.parent, folder):
        if why := cache_folder.why_unusable(part):
            raise UnsupportedModelError(f"{part}, where the ranks of this machine meet, cannot be used: {why}")
    return folder


def _stay_on_loopback() -> None:
    """Have gloo and NCCL connect the ranks of one machine without any other interface."""
    if loopback := next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
