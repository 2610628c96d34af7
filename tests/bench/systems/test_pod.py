"""Benchmark variants of verifier and draft can replace the services of a stack: they take the same options and give the
same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.systems.long_steps import write_devices
from specdec.client import Client
from specdec.local import DEMO, PROGRAMS, Stack
from verifier_service.costs.step_latency import StepLatency

pytestmark = pytest.mark.timeout(900)  # several processes start, slowly on a busy machine

TOKENS = 24


@pytest.mark.verify
@pytest.mark.parametrize("variant", ["--devices", "--step-ms"])
def test_a_variant_gives_the_tokens_of_plain_decoding(variant: str, tmp_path: Path) -> None:
    latency = StepLatency((1, 256), [0.001, 0.02])
    write_devices(tmp_path / "devices", dict.fromkeys(("target", "draft", "local draft"), latency), slower=2.0)
    given = {"--devices": str(tmp_path / "devices"), "--step-ms": "5"}[variant]
    programs = PROGRAMS | {role: ("bench.systems.pod", role, variant, given) for role in ("verifier", "draft")}
    with (
        Stack.start(
            DEMO / "target",
            str(DEMO / "draft"),
            local_draft=DEMO / "draft",
            dtype="float32",
            verifier_options=("--threads", "1"),
            programs=programs,
        ) as stack,
        Client(stack.address) as client,
    ):
        plain, drafted = (
            client.complete("def main(", max_tokens=TOKENS, temperature=0.8, seed=5, speculation=speculation)
            for speculation in ("off", "always")
        )
    assert drafted.completions[0].text == plain.completions[0].text
