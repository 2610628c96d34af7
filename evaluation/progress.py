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
from specdec.progress import ProgressLines

Heard = Callable[[int], None]
"""Called when a text is complete, with the tokens planned for it."""


class Progress:
    """The progress of work measured in `tokens` to generate: a bar on a terminal, else lines on stderr. Used as a
    context manager. It runs in real time, even while virtual time replaces `time.monotonic`."""

    def __init__(self, tokens: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._done = 0
        self._lines = ProgressLines(say, tokens, clock=clock)
        columns = (SpinnerColumn(), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
        self._at_terminal = sys.stderr.isatty()
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True, disable=not self._at_terminal)
        self._task = self._bar.add_task(f"{tokens} tokens to generate", total=tokens)

    def __enter__(self) -> Self:
        if not self._at_terminal:
            say(f"evaluate: {self._lines.total} tokens to generate")
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def heard(self, tokens: int) -> None:
        """Count a complete text, with the tokens planned for it."""
        self._done += tokens
        self._show()

    def not_needed(self, tokens: int) -> None:
        """Subtract planned work that has become unnecessary."""
        if tokens:
            self._lines.total -= tokens
            self._show()

    def _show(self) -> None:
        done, total = self._done, self._lines.total
        if self._at_terminal:
            self._bar.update(self._task, completed=done, total=total, description=self._lines.left(done))
        else:
            self._lines.heard(done, f"evaluate: {100 * done / total:.0f} %")
