"""Makes SIGINT reach the commands that tests start."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def heeding_interrupts() -> Iterator[None]:
    """A test run in the background ignores SIGINT, and its child processes would inherit that. They get the default
    if this process has a handler. Resetting it between fork and exec is not safe beside gRPC's threads: occasionally
    the child aborts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
