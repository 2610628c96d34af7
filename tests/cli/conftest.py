"""Commands that tests start can be interrupted."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def heeding_interrupts() -> Iterator[None]:
    """A test run in the background ignores SIGINT, and so would the processes that it starts. They take up its default
    if it has a handler here. To say so between fork and exec instead is not safe beside gRPC's threads: now and then
    the child aborts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
