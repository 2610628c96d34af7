"""Pods from the wheels of the last version and of this one work together: in every combination, and during a rolling
upgrade."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from contextlib import ExitStack
from itertools import count, product
from pathlib import Path
from typing import Literal

import pytest

from specdec.client import AsyncClient
from specdec.roles import FOLDER
from tests.faults.pods import free_address
from tests.services.conftest import Directories

UNRELEASED = "c62de0164d76c40716f1b8ab2af6a05bf0cf6109"
"""The last version, until one is tagged: its pods do not know `FindPrefix`."""

START_SECONDS = 300.0  # two processes compiling all loops on a busy machine
MODULES = {"verifier": "verifier_service", "draft": "draft_service", "orchestrator": "orchestrator"}

pytestmark = [pytest.mark.verify, pytest.mark.timeout(1200)]


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=FOLDER, capture_output=True, check=True).stdout


def wheel(commit: str, folder: Path) -> Path:
    """Build the wheel of a commit, and return the folder with its unpacked content."""
    sources, made, installed = (folder / name for name in ("sources", "made", "installed"))
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as files:
        files.extractall(sources, filter="data")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(made), str(sources)]
    subprocess.run(build, check=True)
    (file,) = made.glob("*.whl")
    with zipfile.ZipFile(file) as files:
        files.extractall(installed)
    return installed


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of the last version."""
    try:
        tags = git("tag", "--list", "v*", "--sort=-version:refname").decode().split()
        commit = git("rev-parse", "--verify", f"{tags[0] if tags else UNRELEASED}^{{commit}}").decode().strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the last version is not in this checkout's history")
    return wheel(commit, tmp_path_factory.mktemp("last"))


@pytest.fixture(scope="module")
def this(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of this version, including uncommitted changes of tracked files."""
    return wheel(git("stash", "create").decode().strip() or "HEAD", tmp_path_factory.mktemp("this"))


class Pod:
    """A service of either version, at its own address."""

    def __init__(self, role: str, *options: str) -> None:
        self.address = free_address()
        port = self.address.rpartition(":")[2]
        self._command = ("-m", MODULES[role], *options, "--port", port, "--stop-with-stdin", "--log-level", "warning")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, installed: Path) -> None:
        """Start the version unpacked in this folder."""
        services = installed / "specdec" / "roles"
        # `-m` looks in the working directory first.
        self._process = subprocess.Popen(
            [sys.executable, *self._command],
            cwd=services,
            env=os.environ | {"PYTHONPATH": f"{services}{os.pathsep}{installed}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    async def until_ready(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_SECONDS)
        assert line == f"ready {self.address}\n".encode()

    async def replace(self, installed: Path) -> None:
        """Drain the service, and start another version in its place."""
        process = self._process
        assert process is not None
        process.terminate()
        assert await asyncio.to_thread(process.wait, START_SECONDS) == 0
        self.end()
        self.start(installed)
        await self.until_ready()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


async def started(exits: ExitStack, *pods: tuple[Pod, Path]) -> None:
    """Start pods concurrently; they end with `exits`."""
    for pod, installed in pods:
        exits.callback(pod.end)
        pod.start(installed)
    await asyncio.gather(*(pod.until_ready() for pod, _ in pods))


def target_options(directories: Directories) -> tuple[str, ...]:
    return ("--model", str(directories.target), "--dtype", "float32", "--threads", "1", "--kv-tokens", "8192")


def draft_options(directories: Directories) -> tuple[str, ...]:
    return ("--model", str(directories.near), "--threads", "1", "--kv-tokens", "8192")


def front_options(directories: Directories, verifiers: list[Pod], drafts: list[Pod]) -> list[str]:
    peers = [word for pod in verifiers for word in ("--verifier", pod.address)]
    peers += [word for pod in drafts for word in ("--draft", pod.address)]
    return ["--model", str(directories.target), *peers]


async def tokens(
    client: AsyncClient, seed: int, *, speculation: Literal["always", "auto", "off"] = "always"
) -> tuple[list[int], int]:
    """Return the tokens of one text, and its number of accepted candidates."""
    done = await client.complete(
        tokens=[1 + (seed * 7 + i) % 200 for i in range(70)],
        max_tokens=150,
        temperature=0.8,
        seed=seed,
        ignore_end_token=True,
        speculation=speculation,
    )
    (completion,) = done.completions
    return completion.tokens, completion.finish.speculation.accepted


async def test_every_combination_gives_the_same_tokens(directories: Directories, last: Path, this: Path) -> None:
    with ExitStack() as exits:
        versions = (last, this)
        verifiers = [Pod("verifier", *target_options(directories)) for _ in versions]
        drafts = [Pod("draft", *draft_options(directories)) for _ in versions]
        both = [*zip(verifiers, versions, strict=True), *zip(drafts, versions, strict=True)]
        await started(exits, *both)
        pairs = list(product(verifiers, drafts, versions))
        fronts = [
            (Pod("orchestrator", *front_options(directories, [verifier], [draft])), installed)
            for verifier, draft, installed in pairs
        ]
        await started(exits, *fronts)
        wanted = None
        for front, _ in fronts:
            accepted = 0
            async with AsyncClient(front.address, timeout=60) as client, asyncio.timeout(60):
                while not accepted:  # on a busy machine a draft may be late for a whole text
                    text, accepted = await tokens(client, seed=3)
                    wanted = wanted or text
                    assert text == wanted


async def test_a_rolling_upgrade_fails_no_request(directories: Directories, last: Path, this: Path) -> None:
    """Two replicas of each role are replaced by this version one after the other, under load."""
    with ExitStack() as exits:
        verifiers = [Pod("verifier", *target_options(directories)) for _ in range(2)]
        drafts = [Pod("draft", *draft_options(directories)) for _ in range(2)]
        await started(exits, *((pod, last) for pod in (*verifiers, *drafts)))
        fronts = [Pod("orchestrator", *front_options(directories, verifiers, drafts)) for _ in range(2)]
        await started(exits, *((pod, last) for pod in fronts))
        found: dict[int, list[int]] = {}  # texts by seed
        seeds, over = count(), False

        async with AsyncClient([pod.address for pod in fronts], timeout=120) as client:

            async def ask_on() -> None:
                while not over:
                    seed = next(seeds)
                    found[seed], _ = await tokens(client, seed, speculation="auto")

            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(ask_on())
                for pod in (
                    *fronts,
                    *verifiers,
                    *drafts,
                ):  # orchestrators first, so that they send requests unknown to old verifiers
                    await pod.replace(this)
                over = True
            assert len(found) > 20
            for seed in range(0, len(found), max(1, len(found) // 20)):
                assert (await tokens(client, seed, speculation="off"))[0] == found[seed]
