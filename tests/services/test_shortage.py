"""A service runs out of memory: no text is blamed, all texts continue elsewhere, and the process survives or exits with
a status for this case."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specdec.client import Client
from specdec.exit_status import ExitStatus
from specdec.local.child import Child, stop
from specdec.serving.engine_worker import SHORTAGE_SECONDS
from tests.models import make, near

pytestmark = [
    pytest.mark.verify,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("gcc") is None or os.uname().sysname != "Linux", reason="wants gcc and glibc"),
]

SOURCE = Path(__file__).with_name("shortage.c")
PATIENCE = 120.0
"""Seconds for a start, or for a process to exit."""

READERS = 4
SHORT_SECONDS = 3.0
LONG_SECONDS = SHORTAGE_SECONDS + 20.0


class Shortage:
    """Switches an allocation failure in one process on and off."""

    def __init__(self, folder: Path) -> None:
        self.library = folder / "shortage.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", self.library, SOURCE], check=True)
        self.control = folder / "control"
        self.control.write_bytes(bytes(64))
        with self.control.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 64)

    def begin(self, least: int) -> None:
        self._shared[:24] = struct.pack("qqq", 1, least, 0)

    def end(self) -> None:
        self._shared[:8] = struct.pack("q", 0)

    @property
    def failed(self) -> int:
        """Number of failed allocations."""
        count: int = struct.unpack("q", self._shared[16:24])[0]
        return count


class Pods:
    """A verifier and a draft, one of which may run out of memory; a second verifier; an orchestrator."""

    def __init__(self, target: Path, draft: Path, victim: str, shortage: Shortage) -> None:
        self.children: list[Child] = []
        fine = self._start("verifier", target)
        os.environ |= {"LD_PRELOAD": str(shortage.library), "SHORTAGE_CONTROL": str(shortage.control)}
        try:
            self.victim = self._start(victim, target if victim == "verifier" else draft)
        finally:
            del os.environ["LD_PRELOAD"], os.environ["SHORTAGE_CONTROL"]
        addresses = (fine.until_ready(PATIENCE), self.victim.until_ready(PATIENCE))
        peers = ("--verifier", addresses[0], f"--{victim}", addresses[1], "--trust-drafts")
        self.address = self._start("orchestrator", target, *peers).until_ready(PATIENCE)

    def _start(self, role: str, model: Path, *options: str) -> Child:
        module = role if role == "orchestrator" else f"{role}_service"
        computing = () if role == "orchestrator" else ("--threads", "1", "--kv-tokens", "4096")
        common = ("--port", "0", "--stop-with-stdin", "--log-level", "warning", "--model", str(model))
        child = Child.start(role, "-m", module, *common, *computing, *options)
        self.children.append(child)
        return child

    def text(self, number: int) -> list[int]:
        with Client(self.address) as client:
            prompt = f"def f{number}(" + "x" * (number * 7 % 60)
            result = client.complete(
                prompt, max_tokens=24, temperature=1.0, seed=number, ignore_end_token=True, speculation="always"
            )
            return list(result.completions[0].tokens)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = make("llama", folder / "target")
    return target, near(target, folder / "draft", noise=0.1)


@pytest.fixture(params=["verifier", "draft"])
def run(request: pytest.FixtureRequest, pair: tuple[Path, Path], tmp_path: Path) -> Iterator[tuple[Pods, Shortage]]:
    shortage = Shortage(tmp_path)
    pods = Pods(*pair, request.param, shortage)
    try:
        yield pods, shortage
    finally:
        stop(pods.children)


def read_for(pods: Pods, seconds: float, over: threading.Event) -> int:
    """Read texts concurrently for `seconds`; return the number completed. A failing text raises its error."""
    deadline = time.monotonic() + seconds

    def read(reader: int) -> int:
        count = 0
        while time.monotonic() < deadline and not over.is_set():
            assert len(pods.text(READERS * count + reader)) == 24
            count += 1
        return count

    with ThreadPoolExecutor(READERS) as readers:
        return sum(readers.map(read, range(READERS)))


@pytest.mark.parametrize("least", [1 << 16, 1 << 20])
def test_texts_go_on_while_a_pod_gets_no_memory(run: tuple[Pods, Shortage], least: int) -> None:
    """Only large allocations (a model's steps) fail, not a few bytes of a message, since gRPC aborts on those."""
    pods, shortage = run
    before = [pods.text(number) for number in range(READERS)]
    shortage.begin(least)
    deadline = time.monotonic() + PATIENCE
    while True:
        assert read_for(pods, SHORT_SECONDS, threading.Event()) >= READERS
        if shortage.failed or time.monotonic() > deadline:  # on a busy machine a draft may be late for all texts
            break
    shortage.end()
    assert shortage.failed > 0
    assert pods.victim.ending() in (None, f"exit status {int(ExitStatus.SHORT_OF_MEMORY)}: memory was short")
    assert [pods.text(number) for number in range(READERS)] == before


@pytest.mark.parametrize("run", ["verifier"], indirect=True)
def test_a_pod_that_gets_no_memory_for_long_ends_with_its_own_status(run: tuple[Pods, Shortage]) -> None:
    pods, shortage = run
    over = threading.Event()

    def watch() -> None:
        deadline = time.monotonic() + LONG_SECONDS
        while pods.victim.ending() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        over.set()

    shortage.begin(1 << 16)
    watcher = threading.Thread(target=watch)
    watcher.start()
    assert read_for(pods, LONG_SECONDS, over) >= READERS
    watcher.join()
    assert shortage.failed > 0
    assert pods.victim.process.poll() == ExitStatus.SHORT_OF_MEMORY
