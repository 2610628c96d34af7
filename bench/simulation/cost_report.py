"""The report of the cost benchmark: tables of rates and of capacities."""

from __future__ import annotations

from typing import Any


def _device(report: dict[str, Any]) -> str:
    """Return the unit by which figures are divided: devices, equal or weighted by price."""
    return "device" if report["draft_price"] == 1 else "priced device"


def _streams(found: dict[str, Any], most: int) -> str:
    """Return a capacity as text, with "or more" at the search's limit."""
    return f"{found['streams']}" + (" or more" if found["streams"] == most else "")


def _by_deployment(entries: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        found.setdefault(entry["deployment"], []).append(entry)
    return found


def table(report: dict[str, Any]) -> str:
    capacities = _by_deployment(report["capacity"])
    latencies = [entry["latency_ms"] for entry in next(iter(capacities.values()))]
    lines = [
        f"SIMULATED: {report['preset']}, the draft's best token is right {report['acceptance']:.0%} of the time. "
        f"The target's device counts 1, one of the draft's own {report['draft_price']:g}.",
        "",
        f"| streams | deployment | tokens/s | tokens per {_device(report)}-second | ms per token of a stream |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['streams']} | {row['deployment']} | {row['tokens_per_second']:.0f} | "
        f"{row['tokens_per_device_second']:.0f} | {row['ms_per_token']:.1f} |"
        for row in sorted(report["rows"], key=lambda row: int(row["streams"]))
    ]
    lines += [
        "",
        f"Capacity: the most streams within a time per token, to a sixteenth; in brackets those per {_device(report)}.",
        "",
        "| deployment | " + " | ".join(f"{latency:.3g} ms" for latency in latencies) + " |",
        "|---" * (1 + len(latencies)) + "|",
    ]
    lines += [
        f"| {name} | " + " | ".join(f"{_streams(e, report['most'])} ({e['per_device']:.3g})" for e in entries) + " |"
        for name, entries in capacities.items()
    ]
    return "\n".join(lines) + "\n"
