"""The environment of processes whose start is timed."""

from __future__ import annotations

import os


def as_installed(**variables: str) -> dict[str, str]:
    """Return this process's environment with some variables more, and without the one that keeps Python from storing
    what it compiles of modules: of an installed package that is there already."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | variables
