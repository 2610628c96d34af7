"""A system under test in its own program, which receives loads as lines of JSON (`protocol.py`).

The system is called directly, inside the program's process, so it needs no network protocol. The program may run under
another interpreter than the benchmark.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.systems.system import ANSWER_SECONDS, LOAD_SECONDS, STOP_SECONDS, Answer, Load, NotServingError

ROOT = Path(__file__).parents[2]


@dataclass
class Program:
    """A running program that answers loads."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    about: Mapping[str, Any] = field(default_factory=dict)
    lines: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)

    @classmethod
    @contextlib.contextmanager
    def start(cls, name: str, python: str, module: str, options: Sequence[str]) -> Iterator[Program]:
        """Start `python -m MODULE`, wait until its model is loaded, and end it when the context exits; NotServingError
        if it cannot serve."""
        with tempfile.TemporaryDirectory() as folder, open(log := Path(folder, "stderr"), "w") as stderr:
            process = subprocess.Popen(
                [python, "-m", module, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )
            program = cls(name, process, log)
            threading.Thread(target=program._pump, daemon=True).start()
            try:
                program.about = program._answer(LOAD_SECONDS)
                yield program
            finally:
                program._stop()

    def run(self, load: Load, mode: str = "") -> Answer:
        assert self.process.stdin is not None
        request = asdict(load) | {"mode": mode}
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise NotServingError("its program has ended") from error
        said = self._answer(ANSWER_SECONDS)
        return Answer(said["seconds"], said["arrivals"], said["steps"]).checked(self.name, load)

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
            raise NotServingError(f"no answer within {seconds:.0f} s") from error
        if line is None:
            said = self.log.read_text(errors="replace").strip().splitlines()
            raise NotServingError(f"its program ended: {said[-1][:300] if said else 'no output'}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NotServingError(answer["error"])
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
