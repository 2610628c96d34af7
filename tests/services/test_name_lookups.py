"""No process of a deployment looks up any name except its peers'. A resolver in a separate network sees all lookups."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from testing.own_network import PEERS, problem, run

PROBLEM = problem()
needs_network = pytest.mark.skipif(PROBLEM is not None, reason=f"no network of its own: {PROBLEM}")

IDLE_SECONDS = 30.0
"""ONNX Runtime's telemetry, left on, looks up its host within some seconds."""

LOOK_UP = "import socket, sys; print(*(a[4][0] for a in socket.getaddrinfo(sys.argv[1], 443, socket.AF_INET, 1)))"


@needs_network
def test_the_resolver_sees_and_knows_names() -> None:
    found = run(sys.executable, "-c", LOOK_UP, f"One{PEERS}", seconds=60)
    assert (found.status, found.names, found.printed) == (0, {f"one{PEERS}"}, "127.0.0.1\n")


@needs_network
def test_a_foreign_name_would_be_seen() -> None:
    found = run(sys.executable, "-c", LOOK_UP, "reports.example", seconds=60)
    assert (found.status, found.names) == (1, {"reports.example"})


@needs_network
@pytest.mark.verify
def test_telemetry_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime, as its maker ships it."""
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    for name in ("HOME", "XDG_CACHE_HOME"):  # telemetry writes an id of the device there
        monkeypatch.setenv(name, str(tmp_path))
    script = f"import onnxruntime, time; time.sleep({IDLE_SECONDS})"
    found = run(sys.executable, "-c", script, seconds=120)
    assert any(name.endswith("microsoft.com") for name in found.names), found


@needs_network
@pytest.mark.verify
@pytest.mark.timeout(600)
def test_a_deployment_looks_up_its_peers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle, busy and idle again."""
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)  # of this process; services set their own
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    found = run(sys.executable, "-m", "tests.services.busy_and_idle", str(IDLE_SECONDS), seconds=580)
    assert found.status == 0, found.printed
    assert "64 tokens by HTTP" in found.printed
    assert sum(map(int, re.findall(r"(\d+) candidates offered", found.printed))) > 0
    assert found.names == {f"pod{PEERS}"}
    assert os.listdir(tmp_path) == ["specdec"]  # the cache folder; telemetry would keep an id of the device
