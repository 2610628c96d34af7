"""Processes: services started for the lifetime of a context, and their children in /proc."""

from __future__ import annotations

import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def started(*program: str) -> AsyncIterator[tuple[int, str]]:
    """Run a service, `python -m PROGRAM`, until the context exits; yield (process id, address) once ready."""
    process = await create_subprocess_exec(
        sys.executable, "-m", *program, "--stop-with-stdin", stdin=PIPE, stdout=PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        if not line:
            raise SystemExit(f"{program[0]} did not start (its own message is above)")
        yield process.pid, line.split()[1]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def children_of(pid: int) -> list[int]:
    """Return the ids of live child processes."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
