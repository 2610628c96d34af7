"""Quick recovery from shortages of memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specdec.serving import engine_worker


@pytest.fixture(autouse=True)
def quick_shortages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses after a shortage, and free no memory: in a test process, collecting garbage takes a second."""
    pauses = tuple(pause / 10 for pause in engine_worker.SHORTAGE_PAUSES)
    monkeypatch.setattr(engine_worker, "SHORTAGE_PAUSES", pauses)
    monkeypatch.setattr(engine_worker, "gc", SimpleNamespace(collect=lambda: 0))
    monkeypatch.setattr(engine_worker, "give_freed_memory_back", lambda: None)
