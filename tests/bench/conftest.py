"""Looks only briefly whether the machine is quiet: no test depends on it."""

from __future__ import annotations

import pytest

from bench.systems import processor_time


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_time, "_SAMPLE_SECONDS", 0.01)
