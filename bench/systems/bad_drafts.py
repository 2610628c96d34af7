"""specdec with bad drafts: slow ones, a random one, one that cannot be paired.

No bad draft may be slower than no draft. A slow draft sleeps until the end of each step's minimum time.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from bench.systems.altered import other_tokenizer, random_weights
from bench.systems.specdec import Specdec
from bench.systems.system import Configuration, Launch, Setup
from specdec.local import PROGRAMS

MIN_STEP_MS = (1.0, 5.0, 50.0)
"""Minimum milliseconds of a slow draft's step."""


def launches(setup: Setup) -> list[Launch]:
    """Return a system for each bad draft, made from the setup's; its requests use the draft alone."""

    def launch(kind: str, start: Callable[[], AbstractContextManager[Specdec]]) -> Launch:
        return Launch(f"specdec, {kind}", start, (Configuration(f"specdec {kind}", "draft", adaptive=True),))

    slow = [launch(f"draft of {least:g} ms a step", partial(_slow, setup, least)) for least in MIN_STEP_MS]
    others = {"random draft": random_weights, "draft of another tokenizer": other_tokenizer}
    return slow + [launch(kind, partial(_replaced, setup, make)) for kind, make in others.items()]


def _slow(setup: Setup, least: float) -> AbstractContextManager[Specdec]:
    programs = PROGRAMS | {"draft": ("bench.systems.pod", "draft")}
    return Specdec.start(setup, setup.draft, draft_options=("--step-ms", str(least)), programs=programs)


@contextlib.contextmanager
def _replaced(setup: Setup, make: Callable[[Path, Path], Path]) -> Iterator[Specdec]:
    """Run specdec with a draft made from the setup's draft. Only the draft service gets it: `Stack` sees the setup's
    draft, and so passes no `--target-tokenizer` for a draft of another tokenizer."""
    assert setup.draft is not None
    with tempfile.TemporaryDirectory() as folder:
        other = make(setup.draft, Path(folder, "draft"))
        with Specdec.start(setup, setup.draft, draft_options=("--model", str(other))) as system:
            yield system
