"""A delay proxy in its own process, so that its work does not slow the services it delays.

    with DelayProcess.start() as proxy:
        address = proxy.to("127.0.0.1:50051")
        proxy.delay(0.01)

Its event loop waits with select(2), whose time-outs are in microseconds; epoll's are in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import subprocess
import sys
from collections.abc import Iterator
from typing import Self

from testing.delay_proxy import DelayProxy, RelayedBytes


class DelayProcess:
    """A DelayProxy in its own process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextlib.contextmanager
    def start(cls) -> Iterator[Self]:
        """Start the process with zero delay; it ends when the context exits."""
        command = [sys.executable, "-m", "testing.delay_process"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield cls(process)  # leaving closes its stdin, which ends it

    def to(self, server: str) -> str:
        """Return an address that leads to the server, as `DelayProxy.to` does."""
        return self._query(f"to {server}")

    def delay(self, seconds: float) -> None:
        """Set the one-way delay in seconds."""
        self._query(f"delay {seconds}")

    def traffic(self, server: str) -> RelayedBytes:
        """Return the traffic of a server so far."""
        return RelayedBytes(*map(int, self._query(f"traffic {server}").split()))

    def _query(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise RuntimeError(f"the proxy did not answer {line!r}")
        return answer


async def _obey() -> None:
    """Execute commands from stdin, with one line of stdout per command, until stdin ends."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with DelayProxy() as proxy:
        async for line in lines:
            match line.decode().split():
                case ["to", server]:
                    print(await proxy.to(server), flush=True)
                case ["delay", seconds]:
                    proxy.delay = float(seconds)
                    print(seconds, flush=True)
                case ["traffic", server]:
                    print(proxy.traffic[server].to_server, proxy.traffic[server].from_server, flush=True)
                case unknown:
                    raise SystemExit(f"unknown command: {unknown}")


def main() -> None:
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(_obey())


if __name__ == "__main__":
    main()
