"""A verifier on vLLM: a process in a separate environment, made by `make vllm`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specdec.roles import environment

PYTHON = Path(os.environ.get("SPECDEC_VLLM_PYTHON", "build/vllm/bin/python")).absolute()
"""The interpreter of the environment with vLLM."""

needs_vllm = pytest.mark.skipif(
    not (PYTHON.parents[1] / ".specdec").is_file(), reason="there is no environment with vLLM (make vllm)"
)

START_SECONDS = 180.0


class VllmPod:
    """A running verifier."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, log: Path) -> None:
        self.address = address
        self.log = log
        self._process = process

    def kill(self) -> None:
        self._process.kill()

    def threads_of_parts(self) -> list[int]:
        """Return OMP_NUM_THREADS of vLLM's worker processes."""
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/children")  # any thread may have started children
        started = [each for listed in threads for each in listed.read_text().split()]
        workers = [Path("/proc", each) for each in started if "VLLM" in Path("/proc", each, "cmdline").read_text()]
        told = [re.search(r"\0OMP_NUM_THREADS=(\d+)\0", (each / "environ").read_text()) for each in workers]
        return [int(found[1]) for found in told if found]

    def signal(self, number: signal.Signals) -> None:
        """Signal the verifier and its child processes, like a terminal or a supervisor."""
        os.killpg(self._process.pid, number)

    async def ended(self) -> int:
        """Return the verifier's exit status, once it and its child processes have ended."""
        async with asyncio.timeout(60):
            status = await self._process.wait()
            with contextlib.suppress(ProcessLookupError):
                while True:
                    os.killpg(self._process.pid, 0)
                    await asyncio.sleep(0.05)
        return status

    async def terminate(self) -> int:
        """Drain the verifier; return its exit status."""
        self.signal(signal.SIGTERM)
        return await self.ended()


async def command(*options: str) -> tuple[int, str]:
    """Run a verifier with these options that fails to start; return its exit status and stderr."""
    process = await asyncio.create_subprocess_exec(
        *map(str, (PYTHON, "-m", "verifier_service", "--engine", "vllm")),
        *options,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    async with asyncio.timeout(START_SECONDS):
        _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


@asynccontextmanager
async def vllm_pod(model: Path, log: Path, *options: str) -> AsyncIterator[VllmPod]:
    """Yield a verifier of a model, with one thread and float32."""
    served = ("--model", str(model), "--dtype", "float32", "--threads", "1", "--kv-tokens", "8192")
    with log.open("w") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(PYTHON, "-m", "verifier_service", "--engine", "vllm", "--port", "0", "--stop-with-stdin"),
            *served,
            *options,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={**environment(), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            said = (await process.stdout.readline()).decode().split()
        assert said[:1] == ["ready"], f"it did not start: {log}"
        yield VllmPod(process, said[1], log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
