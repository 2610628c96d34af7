"""Runs the check of one client, given as a module: `python -m tests.clients.checks tests.clients.checks.openai`.

Each use adds a line of JSON to the file named by SPECDEC_CLIENT_RESULTS: `use`, and `error`, which is null if the use
worked. A check that cannot even be imported has one use, "import".
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.clients.checks.uses import USES

RESULTS = "SPECDEC_CLIENT_RESULTS"
SECONDS_A_USE = 120
MAX_ERROR_CHARACTERS = 300


def attempt(function: Callable[[], Any]) -> str | None:
    """Call a function; return its error as one line, or None."""
    signal.alarm(SECONDS_A_USE)
    try:
        if inspect.iscoroutinefunction(function):
            asyncio.run(function())
        else:
            function()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {' '.join(lines)}"[:MAX_ERROR_CHARACTERS]
    finally:
        signal.alarm(0)
    return None


def main(module: str) -> None:
    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"did not end within {SECONDS_A_USE} s")

    signal.signal(signal.SIGALRM, late)
    with Path(os.environ[RESULTS]).open("a", buffering=1) as results:

        def record(use: str, error: str | None) -> None:
            results.write(json.dumps({"use": use, "error": error}) + "\n")

        failed = attempt(lambda: importlib.import_module(module))
        if failed is not None:
            record("import", failed)
        for use, function in USES.items():
            record(use, attempt(function))
    sys.stdout.flush()
    os._exit(0)  # threads and telemetry of some clients would keep the process alive


if __name__ == "__main__":
    main(sys.argv[1])
