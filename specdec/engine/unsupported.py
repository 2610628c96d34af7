"""The error for models that an engine cannot run. The module has no dependencies, so that checks before a start need no
packages."""

from __future__ import annotations


class UnsupportedModelError(Exception):
    """Raised, with a one-line reason, if a model cannot run as requested: in a packed batch, on this device, with these
    options, or in this memory."""
