"""Several processes behind one address: an event loop uses one core, and the orchestrator keeps no state between
requests.

The supervisor starts its own program again as workers, which share the port by SO_REUSEPORT: the kernel gives every new
connection to one of them. The supervisor serves no calls, and knows nothing of the workers' requests. Workers exit
when their stdin closes, so that none outlives the supervisor, however it ends.

A client's call about a request may reach another worker than the request did. Each worker therefore answers the others
on a Unix socket, in a folder that only their user can enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import structlog

from specdec.exit_status import how_it_ended
from specdec.serving.interceptor import CallInterceptor
from specdec.serving.process.listening import bound, joined
from specdec.serving.process.restarts import Restarts
from specdec.serving.process.server import STOP_SIGNALS, ServerSettings, StartError, announce, stop_event
from specdec.serving.tracing.servicer import TraceServicer

log = structlog.get_logger()


class Siblings:
    """Answers the other workers, and finds their sockets."""

    def __init__(self, socket: Path) -> None:
        """`socket` is this worker's own, next to the others' sockets."""
        self._socket = socket
        self._server = grpc.aio.server(interceptors=[CallInterceptor()])
        self._channels: dict[Path, grpc.aio.Channel] = {}

    async def start(self, recorded: TraceServicer) -> None:
        """Start serving this worker's timelines to the others. On failure, log a warning: the others will not find its
        requests."""
        recorded.register(self._server)
        try:
            self._server.add_insecure_port(_address(self._socket))
        except RuntimeError as error:
            log.warning("siblings_not_answered", socket=str(self._socket), why=str(error))
            return
        await self._server.start()

    def channels(self) -> list[grpc.aio.Channel]:
        """Return a channel to every other worker seen so far."""
        with contextlib.suppress(OSError):  # without the folder there are no other workers
            for socket in self._socket.parent.iterdir():
                if socket != self._socket and socket not in self._channels:
                    self._channels[socket] = grpc.aio.insecure_channel(_address(socket))
        return list(self._channels.values())

    async def close(self) -> None:
        await self._server.stop(None)
        for channel in self._channels.values():
            await channel.close()


def _address(socket: Path) -> str:
    return f"unix:{socket}"


END_SECONDS = 5.0
"""Seconds for a worker to exit after its drain."""


async def supervise(settings: ServerSettings, count: int) -> None:
    """Run workers until SIGINT, SIGTERM or, with --stop-with-stdin, the end of stdin; StartError if they cannot stay
    up.

    Prints one line `ready HOST:PORT` on stdout once all of them are ready.
    """
    stop = stop_event(settings)

    # 1. Bind the port exclusively first, so that a port shared by other programs counts as taken. Then hold it while
    # there are workers.
    with bound(settings.host, settings.port) as alone:
        settings = replace(settings, port=alone.getsockname()[1], share_port=True)
    with bound(settings.host, settings.port, shared=True), _folder() as sockets:
        # 2. Serve. The options in `ours` come last, so they override earlier ones.
        ours = ("--port", str(settings.port), "--share-port", "--workers", "1", "--stop-with-stdin")
        address = joined(settings.host, settings.port)

        def command(worker: int) -> tuple[str, ...]:
            socket = ("--sibling-socket", f"{sockets}/{worker}")
            port = settings.metrics_port
            own = () if not port else ("--metrics-port", str(port + worker))  # each worker counts for itself
            return (sys.executable, *sys.orig_argv[1:], *ours, *socket, *own)

        workers = Workers(command, lambda: announce(address))
        running = asyncio.ensure_future(workers.run(count))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)

        # 3. Drain the workers.
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, workers.end, signal.SIGKILL)  # a second signal kills all workers
        loop.call_later(settings.drain_seconds + END_SECONDS, workers.end, signal.SIGKILL)
        workers.end(signal.SIGTERM)
        await running


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that only this user can enter; StartError if none can be made."""
    try:
        return tempfile.TemporaryDirectory(prefix="specdec-")
    except OSError as error:
        raise StartError(
            f"--workers: cannot create a folder for the workers' sockets ({error}): set TMPDIR to a writable one"
        ) from None


class Workers:
    """A process for each worker, restarted when it dies."""

    def __init__(self, command: Callable[[int], Sequence[str]], all_ready: Callable[[], None]) -> None:
        """`command` returns the command line of a worker by its number."""
        self._command = command
        self._all_ready = all_ready
        self._awaited: set[int] = set()  # workers that have never been ready
        self._processes: set[Process] = set()
        self._restarts: defaultdict[int, Restarts] = defaultdict(Restarts)  # by worker: several may die together
        self._failure: StartError | None = None
        self._ending = asyncio.Event()

    async def run(self, count: int) -> None:
        """Run `count` workers until `end`; StartError if they cannot stay up."""
        self._awaited = set(range(count))
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(self._keep_up(number))
        if self._failure is not None:
            raise self._failure

    def end(self, number: signal.Signals) -> None:
        """Send this signal to all workers, and stop restarting them."""
        self._ending.set()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep_up(self, number: int) -> None:
        while not self._ending.is_set():
            # A worker gets its own process session: Ctrl-C reaches only the supervisor, which drains the workers.
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command(number), stdin=PIPE, stdout=PIPE, start_new_session=True
                )
            except OSError as error:  # out of memory or processes for now; other workers continue
                log.warning("worker_not_started", why=str(error))
                await self._died(number, str(error), f"a worker could not be started: {error}")
                continue
            self._processes.add(process)
            if self._ending.is_set():  # `end` was called while it was being started
                process.terminate()
            assert process.stdout is not None
            if await process.stdout.readline():  # `ready`
                self._is_ready(number)
            status = await process.wait()
            self._processes.remove(process)
            if not self._ending.is_set():
                log.warning("worker_died", pid=process.pid, status=status)
                how = how_it_ended(status)
                at_first = "(its own message is above)" if status > 0 else f"({how})"
                await self._died(number, how, f"a worker did not start {at_first}")

    def _is_ready(self, number: int) -> None:
        self._restarts[number].ready()
        if number in self._awaited:
            self._awaited.remove(number)
            if not self._awaited:
                self._all_ready()

    async def _died(self, number: int, why: str, at_first: str) -> None:
        """Wait until a dead worker is to be restarted, or stop all workers with an error: `at_first` if this worker was
        never ready."""
        restarts = self._restarts[number]
        pause = restarts.died()
        if number in self._awaited:
            self._give_up(at_first)
        elif pause is None:
            self._give_up(f"a worker died {restarts.deaths} times in a row, most recently: {why}")
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)

    def _give_up(self, why: str) -> None:
        self._failure = StartError(why)
        self.end(signal.SIGTERM)
