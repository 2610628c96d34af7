"""The error of what an engine cannot run. It stands by itself, so that checks before a start need no package for it."""

from __future__ import annotations


class UnsupportedModelError(Exception):
    """An error that says why a model cannot run in a packed batch."""
