"""No pod outlives the tests, however these end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from testing.processes import alive
from tests.faults.cluster import Models

SCRIPT = """
import asyncio, sys, time
from pathlib import Path
from tests.faults import births, pods

async def main():
    births.PRELOAD.clear()
    options = ("--model", sys.argv[1], "--verifier", "127.0.0.1:1")
    made = [
        pods.Pod(name, "orchestrator", pods.free_address(), options, Path(sys.argv[2]))
        for name in ("free", "frozen")
    ]
    for pod in made:
        pod.start()
        await pod.until_ready()
    made[1].freeze()
    print(*(pod.pid for pod in made), flush=True)
    time.sleep(600)

asyncio.run(main())
"""


def test_none_outlives_a_parent_that_is_killed(models: Models, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(models.target), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        process.kill()
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)
