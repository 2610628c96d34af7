"""No attack makes the services log much: a disk fills as easily as memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.cluster import Models
from tests.hostile import vitals
from tests.hostile.attacks import kinds
from tests.hostile.deployment import deployed

ATTACKS = 48
"""Of each kind; most have a handful of messages."""

MAX_BYTES = 500_000
"""Total log bytes of all pods for these attacks: well above one refusal per message, well below the longest strings
sent."""


@pytest.mark.verify
@pytest.mark.timeout(1200)
async def test_no_attack_fills_the_logs(models: Models, tmp_path: Path) -> None:
    """One kind of attack after the other."""
    written = {}
    async with deployed(models, tmp_path) as deployment:
        for kind in kinds():
            fuzzer, cluster = deployment.fuzzer(seed=1), deployment.cluster
            before = sum(vitals.log_bytes(cluster).values())
            await fuzzer.run_only(kind, ATTACKS)
            await vitals.at_rest(cluster)
            written[kind] = sum(vitals.log_bytes(cluster).values()) - before
            print(f"{kind:40} {fuzzer.tally.total:6} messages, {written[kind]:9,} bytes of log")
    assert {kind: size for kind, size in written.items() if size > MAX_BYTES} == {}
