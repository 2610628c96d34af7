"""The report of the cost benchmark: tables of rates and of capacities."""

from __future__ import annotations

from typing import Any

from bench import markdown


def _device(report: dict[str, Any]) -> str:
    """Return the unit of cost: a device, or a device weighted by price."""
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
        f"The target's device costs 1, a draft's own device {report['draft_price']:g}.",
        "",
    ]
    lines += markdown.table(
        ["streams", "deployment", "tokens/s", f"tokens per {_device(report)}-second", "ms per token of a stream"],
        (
            [
                row["streams"],
                row["deployment"],
                f"{row['tokens_per_second']:.0f}",
                f"{row['tokens_per_device_second']:.0f}",
                f"{row['ms_per_token']:.1f}",
            ]
            for row in sorted(report["rows"], key=lambda row: int(row["streams"]))
        ),
    )
    lines += [
        "",
        f"Capacity: most streams that keep to a time per token (precision 1/16); in brackets, per {_device(report)}.",
        "",
    ]
    lines += markdown.table(
        ["deployment", *(f"{latency:.3g} ms" for latency in latencies)],
        (
            [name, *(f"{_streams(entry, report['most'])} ({entry['per_device']:.3g})" for entry in entries)]
            for name, entries in capacities.items()
        ),
    )
    return "\n".join(lines) + "\n"
