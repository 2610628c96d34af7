"""What the throughput benchmark measures: a server that is loaded once and then asked now and then.

A subject is ours, over gRPC, or a peer's program (`bench.peers`). Each has processes of its own, in
sessions of their own, so that the processor time it takes can be told, idle time above all: subjects
wait side by side on the same cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from specdec.client import AsyncClient
from specdec.local import Stack

ROOT = Path(__file__).parent.parent
LOAD_SECONDS = 900.0  # vLLM compiles
ANSWER_SECONDS = 900.0
STOP_SECONDS = 20.0


class SubjectError(Exception):
    """It cannot serve, or has stopped; the reason in one line."""


@dataclass(frozen=True)
class Load:
    """What is asked at once: all prompts, each continued by `max_tokens`, end tokens ignored."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float


class Subject(Protocol):
    """A loaded server."""

    name: str
    about: Mapping[str, Any]  # versions, flags

    def run(self, load: Load) -> float:
        """Seconds until the last token of all has arrived."""
        ...

    def sessions(self) -> Iterable[int]:
        """The process sessions it lives in."""
        ...


@dataclass
class Ours:
    """A running stack, asked by the streaming client; the client's own work counts."""

    name: str
    about: Mapping[str, Any]
    stack: Stack
    speculation: Literal["auto", "off"]

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        name: str,
        target: Path,
        draft: str,
        dtype: str,
        verifier_options: tuple[str, ...],
        speculation: Literal["auto", "off"],
    ) -> Iterator[Ours]:
        with Stack.start(target, draft, dtype=dtype, verifier_options=verifier_options) as stack:
            flags = {
                "draft": Path(draft).name,
                "dtype": dtype,
                "verifier_options": verifier_options,
                "speculation": speculation,
            }
            yield cls(name, {"flags": flags}, stack, speculation)

    def run(self, load: Load) -> float:
        return asyncio.run(self._run(load))

    async def _run(self, load: Load) -> float:
        async with AsyncClient(self.stack.address, timeout=ANSWER_SECONDS) as client:
            await client.models()  # connected before the clock starts

            async def one(number: int, prompt: list[int]) -> int:
                tokens = 0
                async with client.generate(
                    tokens=prompt,
                    max_tokens=load.max_tokens,
                    temperature=load.temperature,
                    seed=number,
                    ignore_end_token=True,
                    speculation=self.speculation,
                ) as stream:
                    async for chunk in stream:
                        tokens += len(chunk.tokens)
                return tokens

            begin = time.perf_counter()
            counts = await asyncio.gather(*(one(*each) for each in enumerate(load.prompts)))
            seconds = time.perf_counter() - begin
        _complete(self.name, sum(counts), load)
        return seconds

    def sessions(self) -> Iterable[int]:
        return [child.process.pid for child in self.stack.children.values()]


@dataclass
class Peer:
    """A program of `bench.peers`."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    about: Mapping[str, Any] = field(default_factory=dict)
    lines: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)

    @classmethod
    @contextlib.contextmanager
    def start(cls, name: str, python: str, module: str, options: list[str]) -> Iterator[Peer]:
        """Start it, wait until its model is loaded, and end it on leaving."""
        with tempfile.TemporaryDirectory() as folder, open(log := Path(folder, "stderr"), "w") as stderr:
            process = subprocess.Popen(
                [python, "-m", f"bench.peers.{module}", *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )
            peer = cls(name, process, log)
            threading.Thread(target=peer._pump, daemon=True).start()
            try:
                peer.about = peer._answer(LOAD_SECONDS)
                yield peer
            finally:
                peer._stop()

    def run(self, load: Load) -> float:
        assert self.process.stdin is not None
        request = {"prompts": load.prompts, "max_tokens": load.max_tokens, "temperature": load.temperature}
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise SubjectError("its program has ended") from error
        answer = self._answer(ANSWER_SECONDS)
        _complete(self.name, answer["tokens"], load)
        return float(answer["seconds"])

    def sessions(self) -> Iterable[int]:
        return [self.process.pid]

    def _pump(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self.lines.get(timeout=seconds)
        except queue.Empty as error:
            raise SubjectError(f"no answer within {seconds:.0f} s") from error
        if line is None:
            said = self.log.read_text(errors="replace").strip().splitlines()
            raise SubjectError(f"its program ended: {said[-1][:300] if said else 'without a word'}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SubjectError(answer["error"])
        return answer

    def _stop(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _complete(name: str, tokens: int, load: Load) -> None:
    wanted = len(load.prompts) * load.max_tokens
    if tokens != wanted:
        raise SubjectError(f"{name} gave {tokens} tokens instead of {wanted}")
