"""The ranks of a parallel engine: processes with one part of a model each. Rank 0 leads, the others follow.

Tensors go through torch.distributed, by NCCL between CUDA devices and by gloo between CPUs. Commands go over a separate
connection from rank 0 to every follower. An idle follower waits on it, not in a collective that would time out. When a
process dies its connections close. The others notice immediately, idle or inside a collective that would never finish.
A model is useless without all its parts: a rank that sees another one end exits as well, with status LOST.

Nothing here knows the meaning of a command, or what a model is.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import pickle
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeVar

import structlog
import torch
import torch.distributed as dist

from specdec.engine.distributed.codec import dumps
from specdec.engine.distributed.meeting import meet
from specdec.engine.engine import UnsupportedModelError
from specdec.engine.model_directory import ModelDirectoryError

log = structlog.get_logger()

T = TypeVar("T")

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Environment variables with torchrun's numbers for each process."""

LOST = 70
"""Exit status of a rank that ends because another has ended, or because it failed to do its part."""

PATIENCE = timedelta(hours=2)
"""Time for the other ranks to start and to load a large model. Lost ranks show on their connections."""

SILENT_SECONDS = 25
"""Seconds without acknowledgement of data or keep-alive probes after which a machine counts as lost."""

CONCLUSION_SECONDS = 3.0
"""Seconds within which the end of a process that broke a collective shows on its connection."""

END = b""
"""The last message of rank 0."""

_PR_SET_PDEATHSIG = 1


class Ranks:
    """This process and its connections to the other ranks. Rank 0 calls `tell`, the others call `commands`; all ranks
    call `all`, `together` and `agree` at the same time."""

    def __init__(
        self, rank: int, degree: int, local_rank: int, local_degree: int, connections: dict[Connection, int], group: Any
    ) -> None:
        self.rank = rank
        self.degree = degree
        self.local_rank = local_rank  # number on this machine
        self.local_degree = local_degree  # ranks on this machine
        self._connections = connections  # connection -> rank at its other end
        self._group = group  # for Python objects in host memory
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._ends = False  # True once this process is to stop: the end of others is then expected
        context = contextvars.copy_context()  # carries the fields common to all log lines
        self._watcher = threading.Thread(target=context.run, args=(self._watch,), name="ranks", daemon=True)

    @classmethod
    @contextmanager
    def joined(cls, device: str) -> Iterator[Ranks]:
        """Join the other ranks, given by torchrun's environment; on exit rank 0 tells them to stop."""
        rank, degree, local_rank, local_degree = (int(os.environ[name]) for name in PLACE)
        _end_with_launcher()
        connections, store = meet(rank, degree, one_machine=local_degree == degree, patience=PATIENCE)
        for connection in connections:
            _attentive(connection)
        place: dict[str, Any] = {"store": store, "rank": rank, "world_size": degree, "timeout": PATIENCE}
        if device.startswith("cuda") and torch.cuda.is_available():
            torch.cuda.set_device(local_rank)
            dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank), **place)
            group = dist.new_group(backend="gloo", timeout=PATIENCE)
        else:
            dist.init_process_group("gloo", **place)
            group = dist.group.WORLD
        ranks = cls(rank, degree, local_rank, local_degree, connections, group)
        if rank:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, ranks._on_signal)
        ranks._watcher.start()
        try:
            yield ranks
        finally:
            ranks._part()

    def all(self, thing: T) -> list[T]:
        """Return the `thing` of every rank, by rank; it must be small and picklable."""
        things: list[Any] = [None] * self.degree
        dist.all_gather_object(things, thing, group=self._group)
        return things

    def together(self, action: Callable[[], T]) -> T:
        """Run the action on all ranks and return its local result once all are done. If a rank refuses it
        (UnsupportedModelError, ModelDirectoryError), all raise that error."""
        result: T | None = None
        refusal: Exception | None = None
        try:
            result = action()
        except (UnsupportedModelError, ModelDirectoryError) as error:
            refusal = error
        for rank, found in enumerate(self.all(refusal)):
            if found is not None:
                raise found if rank == 0 else type(found)(f"rank {rank}: {found}")
        return result  # type: ignore[return-value]

    def agree(self, **options: Any) -> None:
        """Raise UnsupportedModelError on all ranks unless their options are equal: each machine has its own command
        line."""
        first, *others = self.all(options)
        for rank, theirs in enumerate(others, 1):
            for name, value in theirs.items():
                if value != first[name]:
                    raise UnsupportedModelError(
                        f"rank {rank} has {name} {value}, rank 0 has {first[name]}: all must have the same options"
                    )

    def tell(self, *command: Any) -> None:
        """Send a command to all other ranks without waiting for it to run."""
        message = dumps(command)
        try:
            self._send(message)
        except OSError as error:
            self.fail(error)

    def commands(self) -> Iterator[tuple[Any, ...]]:
        """Yield the commands of rank 0 in order, without end: this process ends when rank 0 does."""
        while True:
            yield pickle.loads(self._inbox.get())

    def await_end(self) -> NoReturn:
        """Wait for rank 0 to end, which ends this process, too."""
        self._watcher.join()
        raise AssertionError("the watch never ends here")

    def fail(self, error: Exception) -> NoReturn:
        """End this process, and thereby all: it failed to do its part of a command, and the others cannot undo theirs.
        If the reason is the loss of another rank, that is logged instead of the error."""
        self._watcher.join(CONCLUSION_SECONDS)
        log.critical("rank_failed", rank=self.rank, exc_info=error)
        os._exit(LOST)

    def _part(self) -> None:
        if wait(list(self._connections), timeout=0):  # a connection has ended, perhaps the reason for this exit
            self._watcher.join(CONCLUSION_SECONDS)
        if self.rank == 0:
            self._ends = True
            for connection in list(self._connections):  # a copy: `_watch` removes ended ranks
                with self._sending, contextlib.suppress(OSError):
                    connection.send_bytes(END)

    def _send(self, message: bytes) -> None:
        with self._sending:
            for connection in list(self._connections):
                connection.send_bytes(message)

    def _on_signal(self, number: int, _frame: Any) -> None:
        """Note that an end is expected: a follower ends when rank 0 does, and rank 0 gets the same signal."""
        self._ends = True

    def _watch(self) -> None:
        while True:
            for connection in wait(list(self._connections)):
                assert isinstance(connection, Connection)
                try:
                    message = connection.recv_bytes()
                except (EOFError, OSError):
                    self._gone(connection)
                else:
                    self._receive(message)

    def _receive(self, message: bytes) -> None:
        if message == END:
            log.info("stopped", rank=self.rank)
            os._exit(0)
        self._inbox.put(message)

    def _gone(self, connection: Connection) -> None:
        if not self._ends:
            log.critical("rank_lost", rank=self.rank, lost=self._connections[connection])
            os._exit(LOST)
        if self.rank:
            os._exit(0)
        del self._connections[connection]
        if not self._connections:
            raise SystemExit


def _end_with_launcher() -> None:
    """Have this process get SIGTERM, as sent by torchrun, if torchrun dies without sending it (on Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _attentive(connection: Connection) -> None:
    """Make a connection send small messages immediately, and detect the loss of the machine at its other end."""
    with socket.socket(fileno=os.dup(connection.fileno())) as ours:
        if ours.family == socket.AF_UNIX:  # Unix sockets do both
            return
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", SILENT_SECONDS // 5),
            ("TCP_KEEPINTVL", SILENT_SECONDS // 5),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", 1000 * SILENT_SECONDS),
        ):
            if hasattr(socket, name):  # on Linux
                ours.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
