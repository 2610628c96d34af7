"""The location of the three services' code: folders next to this package in a checkout, inside it in a wheel.

A wheel installs one top-level package, `specdec`. The services' code is on the path only of processes that call `load`
or were started with `environment`.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

_INSTALLED = Path(__file__).parent / "roles"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parent.parent
"""The parent folder of `draft_service`, `verifier_service` and `orchestrator`."""

PACKAGES = {
    "verifier": "verifier_service",
    "draft": "draft_service",
    "orchestrator": "orchestrator",
    "openai": "specdec.openai_api",
}
"""The package of each role of `specdec up`; `python -m` runs it."""


PYTHON = (sys.executable, "-P")
"""The interpreter for child processes, without the working directory on its path: a user's `queue.py` must not run in
place of the library's. With `environment()` it finds the packages of a checkout."""


def environment() -> dict[str, str]:
    """Return the environment for running a service by `python -m`."""
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}


def load(module: str) -> ModuleType:
    """Import a module from the folder, which stays on the path of this process and its children."""
    sys.path.insert(0, str(FOLDER))
    os.environ.update(environment())
    return importlib.import_module(module)
