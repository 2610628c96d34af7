"""Devices by the times of their passes, in a file: several processes can have the same ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from bench.systems.long_steps import Lasting
from verifier_service.costs.step_latency import MEASURED_ROWS, StepLatency


def write_devices(file: Path, latencies: Mapping[str, StepLatency], slower: float) -> None:
    """Write devices by name, each so many times slower than was measured."""
    times = {name: [slower * latency.of(rows) for rows in MEASURED_ROWS] for name, latency in latencies.items()}
    file.write_text(json.dumps(times))


def read_device(file: Path, name: str) -> Lasting:
    """Return how long passes take on the device of this name."""
    return StepLatency(MEASURED_ROWS, json.loads(file.read_text())[name]).of
