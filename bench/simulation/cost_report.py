"""The report of the cost benchmark: tables of rates and of capacities, and a plot."""

from __future__ import annotations

from pathlib import Path
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


def plot(report: dict[str, Any], file: Path) -> None:
    """Plot tokens a device-second over streams, and capacities."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rates, bars) = pyplot.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    for name, rows in _by_deployment(report["rows"]).items():
        rates.plot([r["streams"] for r in rows], [r["tokens_per_device_second"] for r in rows], marker="o", label=name)
    rates.set_xscale("log", base=2)
    rates.set_xticks([row["streams"] for row in rows], [str(row["streams"]) for row in rows])
    rates.set_xlabel("streams")
    rates.set_ylabel(f"tokens per {_device(report)}-second")
    rates.legend(fontsize=8)
    capacities = _by_deployment(report["capacity"])
    width = 0.8 / len(capacities)
    for number, entries in enumerate(capacities.values()):
        places = [place + (number - (len(capacities) - 1) / 2) * width for place in range(len(entries))]
        bars.bar(places, [entry["streams"] for entry in entries], width)
    bars.set_xticks(range(len(entries)), [f"{entry['latency_ms']:.3g}" for entry in entries])
    bars.set_xlabel("ms per token of a stream at most")
    bars.set_ylabel("streams at most")
    figure.suptitle(
        f"SIMULATED: {report['preset']}, acceptance {report['acceptance']:g}, "
        f"a device of the draft's own counts {report['draft_price']:g}",
        fontsize=9,
    )
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
