"""Run all checks that need a GPU, within ten minutes, and write one report: report.md and report.json.

    make gpu                                       with .venv, or else `make gpu PYTHON=python3`
    python -m bench gpu --only exactness,graphs
    python -m bench gpu --device cpu               a rehearsal: every step on a small scale, without a GPU

First it lists missing requirements, a line each; steps that need them are skipped, and all others run. Each step has a
time limit and runs regardless of the outcome of earlier ones. The steps run the tests; check exact numerics, CUDA
graphs, and that a draft and a verifier on the GPU give the tokens of plain decoding; and measure the time to choose
tokens, step times (over the memory roofline, and by kernel), and tokens a second with and without CUDA graphs. No
network is needed. The exit status is 1 if a step failed or was skipped.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.arguments import names, parser_of
from bench.conditions import machine, versions
from bench.gpu.needs import missing
from bench.gpu.probe import Facts
from bench.gpu.report import write
from bench.gpu.runner import ROOT, Outcome, Runner
from bench.gpu.steps import STEPS, Step
from bench.report import folder

PROBE_SECONDS = 120.0
"""Timeout for importing torch and for the GPU's response."""


def probed() -> Facts:
    """Return the facts about this machine."""
    command = [sys.executable, "-m", "bench.gpu.probe"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PROBE_SECONDS, check=True)
    found: Facts = json.loads(done.stdout.splitlines()[-1])
    return found


def parsed(given: Sequence[str]) -> argparse.Namespace:
    known = [step.name for step in STEPS]
    parser = parser_of("gpu", __doc__)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a small rehearsal (default: %(default)s)"
    )
    parser.add_argument("--only", type=names, default=known, metavar="STEPS", help=f"from {','.join(known)}")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="time limit of the whole run (default: %(default)g)"
    )
    parser.add_argument("--out", type=folder, default="build/gpu", help="folder for the report (default: %(default)s)")
    args = parser.parse_args(given)
    if unknown := set(args.only) - set(known):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    if not 0 < args.minutes < float("inf"):
        parser.error(f"--minutes is {args.minutes:g}, must be above 0")
    return args


def run(steps: Sequence[Step], facts: Facts, device: str, out: Path, seconds: float) -> list[Outcome]:
    """Run the steps, report each, and write the report after each; Ctrl-C ends the run with the results so far."""
    for line in missing([need for step in steps for need in step.needs], facts, device):
        print(f"missing: {line}", flush=True)
    about = {
        "device": device,
        "began": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": machine(),
        "versions": versions(),
    }
    runner, outcomes = Runner(facts, device, out, seconds), list[Outcome]()
    write(out, about, facts, outcomes)
    for step in steps:
        print(f"{step.name}: {step.about} ...", flush=True)
        outcomes.append(outcome := runner.run(step))
        print(f"{step.name}: {outcome.status}, {outcome.seconds:.0f} s. {outcome.reason}".rstrip(), flush=True)
        write(out, about, facts, outcomes)
    return outcomes


def main(given: Sequence[str]) -> None:
    args = parsed(given)
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exception, so that the step ends too
    try:
        facts = probed()
        seconds = 60 * args.minutes - (time.monotonic() - begin)
        chosen = [step for step in STEPS if step.name in args.only]
        outcomes = run(chosen, facts, args.device, args.out.resolve(), seconds)
    except subprocess.SubprocessError as error:
        sys.exit(f"bench gpu: this machine cannot be inspected: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"report: {args.out / 'report.md'}")
    sys.exit(any(outcome.status != "passed" for outcome in outcomes))
