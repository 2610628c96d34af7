"""Rendezvous of ranks: connections between rank 0 and the others, and torch.distributed's store over them.

torch's own store listens on all interfaces and trusts any peer's claim about a rank's address. Messages between ranks
are pickles, so a false rank could execute code. Hence ranks do not use that store. Ranks of one machine meet at a
socket in a folder closed to other users. Ranks of several machines meet at rank 0, listening at `MASTER_ADDR` only, on
the port after `MASTER_PORT`. Each side proves its knowledge of the secret in `SPECDEC_RANKS_SECRET` without sending it.
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
"""Retry interval while rank 0 does not listen yet."""

LOOK_SECONDS = 0.02
"""Poll interval for completed handshakes while no new connection arrives."""

HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 256
"""Limit on concurrent handshakes, each in its own thread, and timeout for each message: a silent stranger cannot keep
ranks from joining."""

NONCE_BYTES = 32
COMMANDS, STORE = 0, 1
"""Purposes of a connection."""

_HELLO = struct.Struct("<BI")  # purpose, rank


class Met(NamedTuple):
    """A rank's connections to the other ranks."""

    connections: dict[Connection, int]
    """Connection -> rank at its other end. Rank 0 has all others, the others have rank 0."""
    store: RankStore


class StrangerError(Exception):
    """Raised if the peer does not know the secret or is not a rank."""


def meet(rank: int, degree: int, *, one_machine: bool, patience: timedelta) -> Met:
    """Connect to the other ranks. Raises UnsupportedModelError if something is wrong on this machine, TimeoutError if
    rank 0 was not found in time."""
    address: Any
    if one_machine:
        address, key = str(_private_folder() / "rank-0"), b""  # only this user can enter the folder
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
    """Return a connection to rank 0, retrying while it does not listen yet."""
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        try:
            connection = Client(address)
            _introduce(connection, key, rank, purpose)
            return connection
        except StrangerError:
            raise UnsupportedModelError(
                f"rank {rank}: the listener at {address} has another {SECRET}: all ranks must have the same"
            ) from None
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank}: no rank 0 at {address}: {error}") from error
            time.sleep(RETRY_SECONDS)


def _listening(address: Any) -> socket.socket:
    """Return a socket listening at an address: a host and port, or a path."""
    if isinstance(address, tuple):
        return socket.create_server(address, backlog=MAX_HANDSHAKES)
    Path(address).unlink(missing_ok=True)  # left over from a rank 0 that was killed
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(MAX_HANDSHAKES)
    return listener


def _gathered(listener: socket.socket, key: bytes, degree: int) -> dict[tuple[int, int], Connection]:
    """Return the connections of all other ranks by (purpose, rank). Strangers are rejected."""
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
    """Authenticate to rank 0 as a rank, and verify rank 0; StrangerError if it fails."""
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
    """Verify that the peer is a rank; return the purpose of the connection, and its rank."""
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
        raise OSError("it does not respond")
    said = connection.recv_bytes(count)
    if len(said) != count:
        raise StrangerError
    return said


def _proof(key: bytes, *parts: bytes) -> bytes:
    """Return an HMAC, under the key, of the messages of both sides."""
    return hmac.digest(key, b"".join(struct.pack("<I", len(part)) + part for part in parts), "sha256")


def _secret() -> bytes:
    found = os.environ.get(SECRET, "").encode()
    if len(found) < MIN_SECRET_BYTES:
        raise UnsupportedModelError(
            f"{SECRET} has {len(found)} bytes: ranks on several machines must share a secret of at least "
            f"{MIN_SECRET_BYTES}"
        )
    return found


def _private_folder() -> Path:
    """Return the private folder, on this machine, of the ranks started by this torchrun."""
    launched = os.getppid(), os.environ.get("MASTER_PORT", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    folder = Path(tempfile.gettempdir()) / f"specdec-ranks-{os.geteuid()}" / "-".join(map(str, launched))
    for part in (folder.parent, folder):
        if why := cache_folder.why_unusable(part):
            raise UnsupportedModelError(f"{part}, where the ranks of this machine meet, cannot be used: {why}")
    return folder


def _stay_on_loopback() -> None:
    """Restrict gloo and NCCL to the loopback interface for the ranks of one machine."""
    if loopback := next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
