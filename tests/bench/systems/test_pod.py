"""Benchmarks' variants of verifier and draft take the place of the services in a stack: the same options, the same
tokens."""

from __future__ import annotations

import pytest

from specdec.client import Client
from specdec.local import DEMO, PROGRAMS, Stack

TOKENS = 24


@pytest.mark.parametrize("variant", [("--slower", "2"), ("--step-ms", "5")], ids=" ".join)
def test_a_variant_gives_the_tokens_of_plain_decoding(variant: tuple[str, ...]) -> None:
    programs = PROGRAMS | {role: ("bench.systems.pod", role, *variant) for role in ("verifier", "draft")}
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
