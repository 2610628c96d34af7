"""`python -m tests.services.a_path_off PACKAGE OPTIONS`: a service with one fast path disabled."""

from __future__ import annotations

import importlib
import sys

from specdec.command_line import run_command
from specdec.engine import fast_paths

if __name__ == "__main__":
    _, package, *options = sys.argv
    fast_paths.found_off("test", "it is off here", "it costs nothing")
    run_command(importlib.import_module(f"{package}.__main__").main, "service", options)
