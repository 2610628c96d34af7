"""The progress of an evaluation: the share done, and an estimate of the remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from specdec.cli.failure import say
from specdec.progress import left

Heard = Callable[[int], None]
"""Called when a text is complete, with the tokens planned for it."""

LINE_SECONDS = 15.0
"""Minimum seconds between two lines of progress, if there is no terminal for a bar."""


class Progress:
    """The progress of work measured in `tokens` to generate: a bar on a terminal, else lines on stderr. Used as a
    context manager. It runs in real time, even while virtual time replaces `time.monotonic`."""

    def __init__(self, tokens: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._total = tokens
        self._done = 0
        self._clock = clock
        self._begin = self._printed_at = clock()
        columns = (SpinnerColumn(), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
        self._at_terminal = sys.stderr.isatty()
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True, disable=not self._at_terminal)
        self._task = self._bar.add_task(f"{tokens} tokens to generate", total=tokens)

    def __enter__(self) -> Self:
        if not self._at_terminal:
            say(f"evaluate: {self._total} tokens to generate")
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def heard(self, tokens: int) -> None:
        """Count a complete text, with the tokens planned for it."""
        self._done += tokens
        now = self._clock()
        rest = left(self._done, self._total, now - self._begin)
        self._bar.update(self._task, completed=self._done, total=self._total, description=rest)
        if not self._at_terminal and now - self._printed_at >= LINE_SECONDS:
            self._printed_at = now
            say(f"evaluate: {100 * self._done / self._total:.0f} %, {rest}")

    def not_needed(self, tokens: int) -> None:
        """Subtract planned work that has become unnecessary."""
        self._total -= tokens
