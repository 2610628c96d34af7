"""The error for models that an engine cannot run. The module has no dependencies, so that checks before a start need no
packages."""

from __future__ import annotations


class UnsupportedModelError(Exception):
    """Raised, with the reason, if a model cannot run in a packed batch."""
