"""How a command fails: with one line on stderr."""

from __future__ import annotations

import sys
from typing import NoReturn


def fail(message: str) -> NoReturn:
    """End the process with a message for a person."""
    print(f"specdec: {message}", file=sys.stderr)
    raise SystemExit(1)
