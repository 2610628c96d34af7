"""A server of another system, used over HTTP: a process on loopback that ends with the benchmark.

The server is healthy once `/health` succeeds. This module knows nothing of its other endpoints.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.systems.system import LOAD_SECONDS, STOP_SECONDS, NotServingError

HOST = "127.0.0.1"
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1
_EXCEPTION = re.compile(r"\w+Error: .+")
_process = ctypes.CDLL(None)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as reserved:
        return int(reserved.getsockname()[1])


@contextlib.contextmanager
def healthy(
    name: str, command: Sequence[str], port: int, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server on this port and wait until it is healthy; end it and all its children when the context exits.
    Raise NotServingError, with the server's name, if it fails. `environment` replaces this process's."""
    with tempfile.TemporaryDirectory() as folder, open(log := Path(folder, "log"), "wb") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            _await_health(name, process, port, log)
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):  # the rest of its group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end_with_parent() -> None:
    """Make the child end with the benchmark, even if that is killed. (A `Program` ends with its stdin instead.)"""
    _process.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def connection(port: int, seconds: float) -> http.client.HTTPConnection:
    """Return an unopened connection with this response time limit."""
    return http.client.HTTPConnection(HOST, port, timeout=seconds)


def get(port: int, path: str) -> tuple[int, bytes]:
    """Return status and content of a response."""
    with contextlib.closing(connection(port, LOAD_SECONDS)) as opened:
        opened.request("GET", path)
        answer = opened.getresponse()
        return answer.status, answer.read()


def _await_health(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.perf_counter() + LOAD_SECONDS
    while time.perf_counter() < deadline:
        if process.poll() is not None:
            raise NotServingError(f"{name} ended: {last_words(log)}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            if get(port, "/health")[0] == http.client.OK:
                return
        time.sleep(_POLL_SECONDS)
    raise NotServingError(f"{name} was not ready within {LOAD_SECONDS:.0f} s: {last_words(log)}")


def last_words(log: Path) -> str:
    """Return the first exception in a log, else its first line that mentions an error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if "WARNING" not in line]
    raised = [found.group() for line in telling if (found := _EXCEPTION.search(line))]
    errors = [line for line in telling if "error" in line.lower()]
    return (raised or errors or lines[-1:] or ["no output"])[0][:300]
