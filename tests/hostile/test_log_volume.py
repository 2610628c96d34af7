"""No attack makes the services write much: a disk is as easily filled as a memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.cluster import Models
from tests.hostile import vitals
from tests.hostile.attacks import Attack, kinds
from tests.hostile.deployment import deployed, fuzzer_of

MESSAGES = 300
"""Of each kind of attack."""

MOST_BYTES = 500_000
"""Written by all pods together about these: as much as a refusal of a few hundred bytes for each, and a great deal less
than an attacker sends who sends much."""


@pytest.mark.verify
@pytest.mark.timeout(1200)
async def test_no_attack_fills_the_logs(models: Models, tmp_path: Path) -> None:
    """One kind of attack after the other."""
    written = {}
    async with deployed(models, tmp_path) as cluster:
        for kind in kinds():
            fuzzer = fuzzer_of(cluster, seed=1)

            def is_wanted(attack: Attack, kind: str = kind) -> bool:
                return attack.kind == kind

            before = sum(vitals.log_bytes(cluster).values())
            await fuzzer.run(MESSAGES, is_wanted)
            await vitals.at_rest(cluster)
            written[kind] = sum(vitals.log_bytes(cluster).values()) - before
            print(f"{kind:40} {fuzzer.tally.total:6} messages, {written[kind]:9,} bytes of log")
    assert {kind: size for kind, size in written.items() if size > MOST_BYTES} == {}
