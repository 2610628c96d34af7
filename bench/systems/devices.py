"""Devices as pass times in a file, so that several processes can share them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from bench.systems.long_steps import Lasting
from verifier_service.costs.step_latency import MEASURED_ROWS, StepLatency


def write_devices(file: Path, latencies: Mapping[str, StepLatency], slower: float) -> None:
    """Write devices by name, each slower than measured by the factor `slower`."""
    times = {name: [slower * latency.of(rows) for rows in MEASURED_ROWS] for name, latency in latencies.items()}
    file.write_text(json.dumps(times))


def read_device(file: Path, name: str) -> Lasting:
    return StepLatency(MEASURED_ROWS, json.loads(file.read_text())[name]).of
