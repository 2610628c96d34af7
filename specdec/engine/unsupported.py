"""The error for models an engine cannot run, in a module without dependencies, so that checks before a start need no
packages."""

from __future__ import annotations


class UnsupportedModelError(Exception):
    """Raised, with the reason, if a model cannot run in a packed batch."""
