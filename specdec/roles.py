"""The place of the three services' code: folders beside this package in a checkout, inside it in a wheel.

Whoever installs specdec for its client gets one top-level package. Code of a service is put on the path of its own
process only.
"""

from __future__ import annotations

import os
from pathlib import Path

_INSTALLED = Path(__file__).parent / "roles"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parent.parent
"""The folder that holds `draft_service`, `verifier_service` and `orchestrator`."""


def environment() -> dict[str, str]:
    """Return the environment of a process that runs a service by `python -m`."""
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}
