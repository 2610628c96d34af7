"""The processes that hold one model's parts between them: rank 0, which leads, and those that follow.

Tensors go through torch.distributed, by NCCL between CUDA devices and by gloo between CPUs. What is to be run, rank 0
says on a connection of its own to every follower. A follower waits there for as long as there is nothing to do, without
a collective that would time out; and a process that is gone is the end of a connection, which the others see at once,
idle or in the midst of a collective that would never end. Without all its parts a model is of no use: whoever sees the
end of another ends as well, by LOST.

Nothing here knows what a command means, or what a model is.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import pickle
import queue
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, NoReturn, TypeVar

import structlog
import torch
import torch.distributed as dist

from specdec.engine.distributed.codec import dumps
from specdec.engine.engine import UnsupportedModelError
from specdec.engine.model_directory import ModelDirectoryError

log = structlog.get_logger()

T = TypeVar("T")

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""What torchrun tells each process in its environment: numbers."""

LOST = 70
"""Exit status of a rank that ends because another has, or because it could not do its part."""

PATIENCE = timedelta(hours=2)
"""For the others to come, and to have read a large model. Who is gone is noticed otherwise."""

SILENT_SECONDS = 25
"""A machine that does not even acknowledge what is sent to it, nor that it is there, is gone."""

CONCLUSION_SECONDS = 3.0
"""In which the end of a process that has broken a collective is seen on its connection."""

END = b""
"""Rank 0's last word."""

_PR_SET_PDEATHSIG = 1


class Ranks:
    """This process among the others. `tell` is for rank 0, `commands` for the rest; everything else all do together."""

    def __init__(
        self, rank: int, degree: int, local_rank: int, local_degree: int, connections: dict[Connection, int], group: Any
    ) -> None:
        self.rank = rank
        self.degree = degree
        self.local_rank = local_rank  # on this machine
        self.local_degree = local_degree  # ranks of this machine
        self._connections = connections  # to the rank at the other end
        self._group = group  # for what is no tensor, and lies in the machine's memory
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._ends = False  # because it is time to
        context = contextvars.copy_context()  # with what every line of the log says
        self._watcher = threading.Thread(target=context.run, args=(self._watch,), name="ranks", daemon=True)

    @classmethod
    @contextmanager
    def joined(cls, device: str) -> Iterator[Ranks]:
        """Find the others, as torchrun's environment tells; part from them in peace if this is rank 0."""
        rank, degree, local_rank, local_degree = (int(os.environ[name]) for name in PLACE)
        _end_with_launcher()
        if device.startswith("cuda") and torch.cuda.is_available():
            torch.cuda.set_device(local_rank)
            dist.init_process_group("nccl", timeout=PATIENCE, device_id=torch.device("cuda", local_rank))
            group = dist.new_group(backend="gloo", timeout=PATIENCE)
        else:
            dist.init_process_group("gloo", timeout=PATIENCE)
            group = dist.group.WORLD
        ranks = cls(rank, degree, local_rank, local_degree, _connections(rank, degree, group), group)
        if rank:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, ranks._on_signal)
        ranks._watcher.start()
        try:
            yield ranks
        finally:
            ranks._part()

    def all(self, thing: T) -> list[T]:
        """Everybody's, by rank. Small and picklable."""
        things: list[Any] = [None] * self.degree
        dist.all_gather_object(things, thing, group=self._group)
        return things

    def together(self, action: Callable[[], T]) -> T:
        """What the action gives here, once it has been done everywhere; if it was refused anywhere, the same error
        everywhere."""
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
        """UnsupportedModelError everywhere unless all have been told the same: each machine has its own command."""
        first, *others = self.all(options)
        for rank, theirs in enumerate(others, 1):
            for name, value in theirs.items():
                if value != first[name]:
                    raise UnsupportedModelError(
                        f"rank {rank} was told {name} {value}, rank 0 {first[name]}: all take the same options"
                    )

    def tell(self, *command: Any) -> None:
        """Have all the others run a command as well. It is not waited for."""
        message = dumps(command)
        try:
            self._send(message)
        except OSError as error:
            self.fail(error)

    def commands(self) -> Iterator[tuple[Any, ...]]:
        """What rank 0 tells, in order, for ever: when rank 0 ends, so does this process."""
        while True:
            yield pickle.loads(self._inbox.get())

    def await_end(self) -> NoReturn:
        """Rank 0's, and with it this process's."""
        self._watcher.join()
        raise AssertionError("the watch never ends here")

    def fail(self, error: Exception) -> NoReturn:
        """End this process, and so all: it has not done its part of something, which none of the others can take back.
        If that is because another is gone, that is what is told."""
        self._watcher.join(CONCLUSION_SECONDS)
        log.critical("rank_failed", rank=self.rank, exc_info=error)
        os._exit(LOST)

    def _part(self) -> None:
        if wait(list(self._connections), timeout=0):  # there is an end on one, perhaps why this process ends
            self._watcher.join(CONCLUSION_SECONDS)
        if self.rank == 0:
            self._ends = True
            for connection in list(self._connections):  # from which the watch takes those who have ended already
                with self._sending, contextlib.suppress(OSError):
                    connection.send_bytes(END)

    def _send(self, message: bytes) -> None:
        with self._sending:
            for connection in list(self._connections):
                connection.send_bytes(message)

    def _on_signal(self, number: int, _frame: Any) -> None:
        """A follower leaves it to rank 0, which is told likewise, when to end; and then is not surprised."""
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
    """Be told to end, as torchrun would tell it, when torchrun is gone without a word: on Linux."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _connections(rank: int, degree: int, group: Any) -> dict[Connection, int]:
    """Between rank 0 and every other one."""
    connections: dict[Connection, int] = {}
    if rank:
        invitation: list[Any] = [None]
        dist.broadcast_object_list(invitation, src=0, group=group)
        address, secret = invitation[0]
        connection = Client(address, authkey=secret)
        connection.send(rank)
        connections[connection] = 0
    else:
        secret = secrets.token_bytes(32)
        with Listener((os.environ["MASTER_ADDR"], 0), backlog=degree, authkey=secret) as listener:
            dist.broadcast_object_list([(listener.address, secret)], src=0, group=group)
            while len(connections) < degree - 1:
                with contextlib.suppress(AuthenticationError, EOFError, ConnectionError):  # it was none of us
                    connection = listener.accept()
                    connections[connection] = connection.recv()
    for connection in connections:
        _attentive(connection)
    return connections


def _attentive(connection: Connection) -> None:
    """Send small messages at once, and notice a machine that has gone without a word."""
    with socket.socket(fileno=os.dup(connection.fileno())) as ours:
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
