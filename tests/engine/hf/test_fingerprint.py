"""Devices have different names if bits may differ."""

from __future__ import annotations

import pytest

from specdec.engine.hf import fingerprint
from specdec.engine.hf.fingerprint import device_kind


def test_processors_with_other_flags_are_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives a processor with AMX the same name as one with AVX-512 alone."""
    kinds = set()
    for kind in ("x86_64-aaaa", "x86_64-bbbb"):
        monkeypatch.setattr(fingerprint, "cpu_kind", lambda kind=kind: kind)
        kinds.add(device_kind("cpu"))
    assert len(kinds) == 2
