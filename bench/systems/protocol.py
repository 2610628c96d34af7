"""The protocol of programs under test: one line of JSON in, one out, for as long as stdin is open.

Once its model is loaded, a program first writes hello, {"versions": {...}, "flags": {...}}, or the reason why it cannot
serve, {"error": "..."}. Then it answers {"prompts": [[ids]...], "max_tokens": n, "temperature": t, "mode": "..."} with
{"seconds": s, "arrivals": [[[s, n]...]...], "steps": n}, or with {"error": "..."}. Arrivals are, for each prompt,
(seconds since it was sent, number of tokens). Steps are the target's, summed over all prompts, or null if they are not
counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Arrivals = list[list[tuple[float, int]]]


@dataclass(frozen=True)
class Request:
    prompts: list[list[int]]
    max_tokens: int
    temperature: float
    mode: str  # if the program has several


@dataclass
class Record:
    """A record of arrivals, in seconds since its creation."""

    prompts: int
    begin: float = field(default_factory=time.perf_counter)
    steps: int | None = None

    def __post_init__(self) -> None:
        self.arrivals: Arrivals = [[] for _ in range(self.prompts)]

    def add(self, prompt: int, tokens: int, when: float | None = None) -> None:
        """Record more tokens of a prompt, now or at a time of perf_counter."""
        self.arrivals[prompt].append(((time.perf_counter() if when is None else when) - self.begin, tokens))

    def add_each(self, prompt: int, times: Sequence[float]) -> None:
        """Record one token at each time."""
        for when in times:
            self.add(prompt, 1, when)


Generate = Callable[[Request, Record], None]
"""Handles a request; on return all its tokens are recorded."""
Start = Callable[[contextlib.ExitStack], tuple[dict[str, Any], Generate]]
"""Loads the model and returns (hello, function). Resources to close at the end go on the stack."""


def serve(start: Start) -> None:
    """Load, say hello, and answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with answers

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    with contextlib.ExitStack() as exits:
        try:
            hello, generate = start(exits)
            answer(hello)
            for line in sys.stdin:
                request = Request(**json.loads(line))
                record = Record(len(request.prompts))
                generate(request, record)
                seconds = time.perf_counter() - record.begin
                answer({"seconds": seconds, "arrivals": record.arrivals, "steps": record.steps})
        except Exception as error:
            answer({"error": _reason(error)})
            raise


def _reason(error: Exception) -> str:
    """Return the error in one line, without a library's trailing advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"
