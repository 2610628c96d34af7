"""Versions that leave without their memory being freed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from draft_service import version_follower


@pytest.fixture(autouse=True)
def frees_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the garbage of dropped versions: in a test process, collecting it takes a second."""
    nothing = SimpleNamespace(unfreeze=lambda: None, collect=lambda: 0, freeze=lambda: None)
    monkeypatch.setattr(version_follower, "gc", nothing)
    monkeypatch.setattr(version_follower, "give_freed_memory_back", lambda: None)
