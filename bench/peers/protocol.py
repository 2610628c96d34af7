"""How the benchmark talks to a peer: one line of JSON in, one out, for as long as stdin is open.

A peer first says hello, {"versions": {...}, "flags": {...}}, once its model is loaded, or says why it
cannot serve, {"error": "..."}. Then it answers {"prompts": [[ids]...], "max_tokens": n, "temperature": t}
with {"seconds": s, "tokens": n}, or with {"error": "..."}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int, float], int]
"""(prompts, most tokens for each, temperature) -> tokens generated, all prompts together."""
Start = Callable[[contextlib.ExitStack], tuple[dict[str, Any], Generate]]
"""Loads the model: -> (hello, function). What must be ended after the last answer is put on the stack."""


def serve(start: Start) -> None:
    """Load, say hello, and answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the libraries print is no answer

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    with contextlib.ExitStack() as exits:
        try:
            hello, generate = start(exits)
            answer(hello)
            for line in sys.stdin:
                request = json.loads(line)
                begin = time.perf_counter()
                tokens = generate(request["prompts"], request["max_tokens"], request["temperature"])
                answer({"seconds": time.perf_counter() - begin, "tokens": tokens})
        except Exception as error:
            answer({"error": _reason(error)})
            raise


def _reason(error: Exception) -> str:
    """One line; a library's advice after it is left out."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"
