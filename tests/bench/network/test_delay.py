"""The cost of delay between services: its round trips, and a target's steps as seen by clients."""

from __future__ import annotations

from bench.network.delay import parsed


def test_no_delay_is_always_measured() -> None:
    """Rates are divided by those without delay."""
    assert parsed(["--round-trips", "0.5,0.3"]).round_trips == [0.0, 0.3, 0.5]
    assert parsed(["--round-trips", "0,0.3"]).round_trips == [0.0, 0.3]
