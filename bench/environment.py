"""The environment of processes whose start is timed."""

from __future__ import annotations

import os


def as_installed(**variables: str) -> dict[str, str]:
    """Return this process's environment with additional variables, and without PYTHONDONTWRITEBYTECODE, since an
    installed package has its bytecode already."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | variables
