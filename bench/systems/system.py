"""Systems under test: servers that are loaded once and then get a load now and then.

A system under test is specdec, over gRPC, or a peer's program (`bench.systems.protocol`). Each has processes of its
own, in process sessions of their own, so that its processor time can be measured, above all while it is idle: all of
them wait side by side on the same cores.
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
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from bench.systems.protocol import Arrivals, Record
from specdec.client import AsyncClient
from specdec.local import Stack

ROOT = Path(__file__).parents[2]
LOAD_SECONDS = 900.0  # vLLM compiles
ANSWER_SECONDS = 900.0
STOP_SECONDS = 20.0


class SubjectError(Exception):
    """The system under test cannot serve, or has stopped; the message is the reason in one line."""


@dataclass(frozen=True)
class Load:
    """A load: prompts sent at once, each to be continued by `max_tokens`, end tokens ignored."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float


@dataclass(frozen=True)
class Answer:
    """The answer to a load; `arrivals` holds, for each prompt, (seconds since all were sent, tokens)."""

    seconds: float  # until the last token of all prompts
    arrivals: Arrivals
    steps: int | None = None  # of the target, summed over the prompts
    candidates: int | None = None  # verified in these steps
    sources: Mapping[str, int] = field(default_factory=dict)  # number of tokens by token source
    texts: list[list[int]] | None = None

    @property
    def tokens(self) -> int:
        return sum(tokens for stream in self.arrivals for _, tokens in stream)

    @property
    def first(self) -> list[float]:
        """Seconds to each prompt's first token."""
        return [stream[0][0] for stream in self.arrivals]

    @property
    def pauses(self) -> list[float]:
        """Seconds between one arrival and the next of the same text."""
        return [after - before for stream in self.arrivals for (before, _), (after, _) in pairwise(stream)]


class Subject(Protocol):
    """A system under test, loaded."""

    name: str
    about: Mapping[str, Any]  # versions, flags

    def run(self, load: Load, how: str = "") -> Answer:
        """Run a load, in mode `how` if the system has several."""
        ...

    def sessions(self) -> Mapping[str, int]:
        """Return the ids of its process sessions, by name."""
        ...


def stranger() -> str:
    """Return a new tenant, for whom no prompt has been computed yet: peers compute every prompt of a load too."""
    return uuid.uuid4().hex


@dataclass
class Ours:
    """specdec as a system under test: a running stack behind the streaming client, whose work counts. `how` is the
    request's `speculation`."""

    name: str
    about: Mapping[str, Any]
    stack: Stack

    @classmethod
    @contextlib.contextmanager
    def start(
        cls, name: str, target: Path, draft: str, dtype: str, verifier_options: tuple[str, ...] = ()
    ) -> Iterator[Ours]:
        with Stack.start(target, draft, dtype=dtype, verifier_options=verifier_options) as stack:
            flags = {"draft": Path(draft).name, "dtype": dtype, "verifier_options": verifier_options}
            yield cls(name, {"flags": flags}, stack)

    def run(self, load: Load, how: str = "auto") -> Answer:
        return asyncio.run(self._run(load, how))

    async def _run(self, load: Load, how: Any) -> Answer:
        async with AsyncClient(self.stack.address, timeout=ANSWER_SECONDS) as client:
            await client.models()  # connected before the clock starts
            record, finishes = Record(len(load.prompts)), []
            tenant = stranger()
            texts: list[list[int]] = [[] for _ in load.prompts]

            async def one(number: int, prompt: list[int]) -> None:
                async with client.generate(
                    tokens=prompt,
                    max_tokens=load.max_tokens,
                    temperature=load.temperature,
                    seed=number,
                    ignore_end_token=True,
                    speculation=how,
                    tenant=tenant,
                ) as stream:
                    async for chunk in stream:
                        record.add(number, len(chunk.tokens))
                        texts[number] += chunk.tokens
                        if chunk.finish is not None:
                            finishes.append(chunk.finish.speculation)

            await asyncio.gather(*(one(*each) for each in enumerate(load.prompts)))
            seconds = time.perf_counter() - record.begin
        sources: Counter[str] = Counter()
        for finish in finishes:
            sources.update(finish.sources)
        steps, candidates = sum(f.steps for f in finishes), sum(f.offered for f in finishes)
        return complete(self.name, load, Answer(seconds, record.arrivals, steps, candidates, sources, texts))

    def sessions(self) -> Mapping[str, int]:
        return {name: child.process.pid for name, child in self.stack.children.items()}


@dataclass
class Peer:
    """A peer as a system under test: a program that speaks `bench.systems.protocol`."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    about: Mapping[str, Any] = field(default_factory=dict)
    lines: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)

    @classmethod
    @contextlib.contextmanager
    def start(cls, name: str, python: str, module: str, options: list[str]) -> Iterator[Peer]:
        """Start the program, wait until its model is loaded, and end it on leaving."""
        with tempfile.TemporaryDirectory() as folder, open(log := Path(folder, "stderr"), "w") as stderr:
            process = subprocess.Popen(
                [python, "-m", f"bench.systems.{module}", *options],
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

    def run(self, load: Load, how: str = "") -> Answer:
        assert self.process.stdin is not None
        request = asdict(load) | {"how": how}
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise SubjectError("its program has ended") from error
        said = self._answer(ANSWER_SECONDS)
        return complete(self.name, load, Answer(said["seconds"], said["arrivals"], said["steps"]))

    def sessions(self) -> Mapping[str, int]:
        return {"": self.process.pid}

    def _pump(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as said:
            for line in said:
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


def complete(name: str, load: Load, answer: Answer) -> Answer:
    wanted = len(load.prompts) * load.max_tokens
    if answer.tokens != wanted:
        raise SubjectError(f"{name} gave {answer.tokens} tokens instead of {wanted}")
    return answer
