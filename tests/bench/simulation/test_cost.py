"""The cost benchmark: capacity from simulated rates, refusals, and sharing of a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.simulation.cost import capacity, deployments, parsed
from bench.simulation.cost_report import table
from bench.simulation.deployment import simulate
from bench.simulation.devices import PRESETS, Device, Hardware
from bench.simulation.scenario import Scenario

PLAIN = Scenario(PRESETS["70b"], sessions=2, drafts=0, warm_up=5, measured=15)
APART = replace(PLAIN, drafts=1, always=True)
SHARED = replace(APART, shared=True)
LOCKSTEP = replace(SHARED, synchronous=True, lockstep=True, nodes=16, branches=1)


@pytest.mark.parametrize("true", [0, 1, 2, 3, 7, 8, 20, 63, 64, 99])
def test_capacity_is_found_to_its_resolution(true: int) -> None:
    asked: list[int] = []

    def rate(streams: int) -> float:
        """Return 100 tokens/s per stream up to the limit, 99 beyond."""
        asked.append(streams)
        return streams * (100.0 if streams <= true else 99.0)

    found = capacity(rate, 0.01, 100)
    assert found <= true < found + 2 + found / 16
    assert len(asked) <= 12
    assert max(asked) <= 100


def test_capacity_ends_at_the_most_that_is_looked_for() -> None:
    assert capacity(lambda streams: 100.0 * streams, 0.01, 48) == 48


def rows(name: str, paid: float, rates: dict[int, float]) -> list[dict[str, Any]]:
    return [
        {
            "deployment": name,
            "streams": streams,
            "tokens_per_second": rate,
            "tokens_per_device_second": rate / paid,
            "ms_per_token": 1000 * streams / rate,
        }
        for streams, rate in rates.items()
    ]


REPORT: dict[str, Any] = {
    "preset": "70b",
    "acceptance": 0.75,
    "draft_price": 1.0,
    "most": 32,
    "rows": rows("plain", 1.0, {1: 33.0, 4: 132.0}) + rows("apart", 2.0, {1: 120.0, 4: 400.0}),
    "capacity": [
        {"deployment": "plain", "latency_ms": 15.01, "streams": 0, "per_device": 0.0},
        {"deployment": "apart", "latency_ms": 15.01, "streams": 32, "per_device": 16.0},
    ],
}


def test_the_table_is_labelled_and_counts_every_device() -> None:
    said = table(REPORT)
    assert said.startswith("SIMULATED: 70b")
    assert "| 4 | apart | 400 | 200 | 10.0 |" in said
    assert "tokens per device-second" in said
    assert "| deployment | 15 ms |" in said
    assert "| plain | 0 (0) |" in said
    assert "| apart | 32 or more (16) |" in said


def test_weighted_devices_are_called_so() -> None:
    assert "tokens per priced device-second" in table(REPORT | {"draft_price": 0.25})


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("--streams", "4,0", "--streams is 0, must be at least 1"),
        ("--streams", "four", "--streams: invalid whole_numbers value: 'four'"),
        ("--drafts", "0", "--drafts is 0, must be at least 1"),
        ("--latency-ms", "15,0", "--latency-ms is 0, must be above 0"),
        ("--draft-price", "-1", "--draft-price is -1, must be at least 0"),
        ("--draft-price", "nan", "--draft-price is nan, must be at least 0"),
        ("--acceptance", "0.99", "--acceptance is 0.99, must be from 0.4 to 0.95"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    option: str, value: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed([option, value])
    assert what in capsys.readouterr().err


def test_latencies_follow_the_preset() -> None:
    assert parsed(["--preset", "demo"]).latency_ms == pytest.approx([1.5, 3.3])


def test_plain_takes_the_targets_time() -> None:
    plain, *_ = deployments(replace(PLAIN, measured=5), [])
    assert plain.rate(4) == pytest.approx(4 / PLAIN.hardware.target.seconds(4), rel=0.1)  # tolerates one step in 12


def test_devices_apart_bring_more_than_one_for_both() -> None:
    apart, shared, plain = (simulate(scenario).rate for scenario in (APART, SHARED, PLAIN))
    assert plain < shared < 0.8 * apart


def test_a_draft_that_takes_no_time_loses_nothing_by_sharing() -> None:
    instant = Hardware(PLAIN.hardware.target, Device(1e-9, 0.0))
    apart, shared = (simulate(replace(scenario, hardware=instant)) for scenario in (APART, SHARED))
    assert shared.rate == pytest.approx(apart.rate, rel=0.05)


def test_a_shared_device_works_for_one_at_a_time() -> None:
    """A shared device's work adds up to the elapsed time. Separate devices are both busy all the time."""
    always_busy = Hardware(Device(0.01, 0.0), Device(0.01, 0.0))

    def work(scenario: Scenario) -> float:
        done = simulate(replace(scenario, hardware=always_busy))
        return (done.steps + done.draft_steps) * 0.01 / done.seconds

    assert work(SHARED) == pytest.approx(1.0, abs=0.1)
    assert work(APART) == pytest.approx(2.0, abs=0.1)


def test_in_lockstep_a_step_has_all_streams() -> None:
    one, free = simulate(LOCKSTEP), simulate(replace(LOCKSTEP, lockstep=False))
    assert one.session_steps == 2 * one.steps
    assert free.session_steps < 1.5 * free.steps  # streams take turns: one stream per step


def test_a_synchronous_draft_answers_with_as_many_candidates_as_it_was_asked_for() -> None:
    assert simulate(replace(LOCKSTEP, nodes=2, branches=0)).candidates_a_step == 2.0
