"""The table of services on simulated devices."""

from __future__ import annotations

from bench.serving.device import table


def test_a_table_compares_with_plain_decoding() -> None:
    cell = {
        "streams": 8,
        "temperature": 0.0,
        "tokens_a_second": 100.0,
        "step_ms": 8.0,
        "busy": 0.9,
        "rows": 8.0,
        "tokens_a_step": 1.0,
        "in_time": None,
        "gap_ms": 8.0,
        "gap_p99_ms": 9.0,
        "first_ms": 20.0,
        "cpu_ms_per_1000_tokens": {"verifier": 30.0, "draft": 0.0, "orchestrator": 20.0},
        "stages_us": {"verifier": {"plan": 100.4, "rest": 50.0}, "draft": {"send": 0.0}},
    }
    cells = [cell | {"way": "off"}, cell | {"way": "forced", "tokens_a_second": 150.0, "in_time": 0.5}]
    lines = table({"profile": "p", "about": "a", "source": "s", "cells": cells}).splitlines()
    assert any("| 8 | 0 | forced | 150 | 1.50 | 8.00 | 90 % | 8.0 | 1.00 | 50 % |" in line for line in lines)
    assert lines[-3:] == ["| plan | 100 | 100 |", "| rest | 50 | 50 |", "| all | 150 | 150 |"]
    assert not any("draft's worker" in line for line in lines)  # the worker was idle
