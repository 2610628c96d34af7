"""Recordings of both loops with their costs, for comparison before and after a change.

    python -m tests.replay keep                        # write the recordings that the tests read
    python -m tests.replay record build/before         # write them, with costs.json, into a folder
    python -m tests.replay record build/before --target DIR --draft DIR --dtype bfloat16 --fast --threads 2
    python -m tests.replay compare build/before build/after

Recordings of real models are reproducible on one machine only, despite the virtual clock.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from specdec.engine.engine import Engine
from specdec.engine.engines.loading import load_engine
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement
from specdec.engine.working_memory import MAX_STEP_CANDIDATES
from tests.replay.deployment import Engines, Recording, made_up, record
from tests.replay.scenarios import SCENARIOS, Scenario

KEPT = Path(__file__).parent / "recordings"
MESSAGES = KEPT / "messages.txt"
"""The messages of the scenario SPELT_OUT, byte by byte."""

SPELT_OUT = "drafted"

MAX_COST_RATIO = 1.02
"""Limit on the cost per committed token, relative to the earlier recording."""


def file_name(scenario: str) -> str:
    return scenario.replace(" ", "-") + ".txt"


def written(recording: Recording) -> str:
    return "\n".join(recording.lines) + "\n"


def real_engines(args: argparse.Namespace) -> Engines:
    """Return a factory of engines of real models, loaded once; each scenario limits the target's memory."""
    threads = tuple(range(args.threads, 0, -1))
    directories = [ModelDirectory(args.target), ModelDirectory(args.draft), ModelDirectory(args.draft)]
    placement = Placement("torch", args.dtype, kv_tokens=1 << 15)
    target, draft, local = (
        load_engine(directory, placement, threads=threads[:1], exact=not args.fast and not i)
        for i, directory in enumerate(directories)
    )

    def engines(scenario: Scenario) -> tuple[Engine, Engine, Engine | None]:
        target.capacity = scenario.blocks * BLOCK + MAX_STEP_CANDIDATES
        return target, draft, local if scenario.local_draft else None

    return engines


def keep() -> None:
    KEPT.mkdir(exist_ok=True)
    for name, scenario in SCENARIOS.items():
        recording = record(scenario, made_up)
        (KEPT / file_name(name)).write_text(written(recording))
        if name == SPELT_OUT:
            MESSAGES.write_text("\n".join(recording.messages) + "\n")


def save(args: argparse.Namespace) -> None:
    engines = made_up if args.target is None else real_engines(args)
    args.folder.mkdir(parents=True, exist_ok=True)
    costs = {}
    for name, scenario in SCENARIOS.items():
        recording = record(scenario, engines, count_calls=True)
        (args.folder / file_name(name)).write_text(written(recording))
        costs[name] = asdict(recording.costs)
    (args.folder / "costs.json").write_text(json.dumps(costs, indent=1) + "\n")


def compare(before: Path, after: Path) -> int:
    """Print differences; return 1 if a recording differs or a token costs more."""
    differing = 0
    for name in SCENARIOS:
        old, new = ((folder / file_name(name)).read_text().splitlines() for folder in (before, after))
        if old != new:
            differing += 1
            print(f"{name}: differs")
            print("\n".join([*difflib.unified_diff(old, new, lineterm="", n=0)][:12]))
    print(f"{len(SCENARIOS) - differing} of {len(SCENARIOS)} recordings are equal")
    old_costs, new_costs = (json.loads((folder / "costs.json").read_text()) for folder in (before, after))
    dearer = False
    print("\n| scenario | " + " | ".join(kinds := [k for k in next(iter(old_costs.values())) if k != "tokens"]) + " |")
    print("|---" * (1 + len(kinds)) + "|")
    for name in SCENARIOS:
        old, new = old_costs[name], new_costs[name]
        ratios = [(new[k] / new["tokens"]) / (old[k] / old["tokens"]) if old[k] else 1.0 + new[k] for k in kinds]
        dearer |= max(ratios) > MAX_COST_RATIO
        print(f"| {name} | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + " |")
    return int(dearer or differing > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("keep")
    saving = commands.add_parser("record")
    saving.add_argument("folder", type=Path)
    saving.add_argument("--target", type=Path)
    saving.add_argument("--draft", type=Path)
    saving.add_argument("--dtype", default="float32")
    saving.add_argument("--fast", action="store_true")
    saving.add_argument("--threads", type=int, default=1)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    args = parser.parse_args(arguments)
    match args.command:
        case "keep":
            keep()
        case "record":
            save(args)
        case _:
            return compare(args.before, args.after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
