"""Run a verifier or a draft as a process, in the variants compared by benchmarks.

    python -m bench.systems.pod verifier --model demo/target [--synchronous] [--step-ms 30]

replaces `python -m verifier_service` in a Stack; `draft` replaces the draft service. `--synchronous` serves
the baseline of `bench.systems.synchronous`. `--step-ms` makes every forward pass as long as a larger model's;
`--devices FILE` makes it as long as on a device in that file (`bench.systems.long_steps`): `target`, `draft` or `local
draft`. With `--profile` nothing is computed: the device is simulated (`bench.systems.simulated_gpu`).
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import get_args

from bench.systems import stages, synchronous
from bench.systems.long_steps import at_least, read_device, with_long_steps
from bench.systems.profiles import PROFILES
from bench.systems.simulated_gpu import SimulatedGpu
from draft_service.draft_loop import DraftLoop
from draft_service.language_model import LanguageModelDrafter
from draft_service.pass_times import measured_width
from draft_service.servicer import DraftLimits, DraftServicer
from specdec.engine.engine import Engine
from specdec.engine.engines.loading import load_engine
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement, WantedDtype
from specdec.serving.identity import identity_of
from specdec.serving.process.server import ServerSettings, Service, in_temporary_thread, run
from verifier_service.proposers.draft_model import DraftModelProposer
from verifier_service.servicer import VerifierLimits, VerifierServicer
from verifier_service.settings.tuning import DEFAULTS
from verifier_service.step_loop import StepLoop

FAR = 32
"""A rank that no branch of a draft's tree reaches."""

RANKS = tuple(random.Random(0).sample([0] * 24 + [1] * 3 + [2] + [FAR] * 4, k=32))
"""Ranks that a simulated draft gives the target's tokens: its first guess is right at three of four positions, and side
branches hold the right token at half of the others. The demo pair at temperature 0.7 has an acceptance of 0.79 with
chains and 0.90 with trees (docs/benchmarks/acceptance.md)."""


def verifier(args: argparse.Namespace) -> Service:
    directory = ModelDirectory(args.model)
    threads = (args.threads, min(args.threads, args.threads_while_drafting or args.threads))

    def loaded(model: ModelDirectory, *, exact: bool) -> Engine:
        placement = Placement("torch", args.dtype, args.device, args.kv_tokens)
        return load_engine(model, placement, threads=threads, exact=exact)

    engine = loaded(directory, exact=True) if args.profile is None else _simulated(directory, args)
    local = None
    if args.draft_model is not None:
        small = ModelDirectory(args.draft_model)
        local = DraftModelProposer(_paced(loaded(small, exact=False), args, "local draft"), small.context)
    tuning = synchronous.TUNING if args.synchronous else DEFAULTS
    loop = StepLoop(_paced(engine, args, "target"), draft_model=local, tuning=tuning)
    if args.stages is not None:
        stages.of_verifier(loop).keep(args.stages / "verifier.json")
    loop.start()
    kind = synchronous.VerifierServicer if args.synchronous else VerifierServicer
    limits = VerifierLimits(max_candidates=args.max_candidates)
    return kind(loop, identity_of(directory, engine, loop.context), limits)


def draft(args: argparse.Namespace) -> Service:
    directory = ModelDirectory(args.model)
    if args.profile is None:
        engine = load_engine(
            directory, Placement("onnx", kv_tokens=args.kv_tokens, is_draft=True), threads=(args.threads,)
        )
    else:
        engine = _simulated(directory, args)
    limits = DraftLimits()
    paced = _paced(engine, args, "draft")
    width = measured_width(paced, directory.context, limits.defaults.max_branches)
    loop = DraftLoop(LanguageModelDrafter.of(paced, width))
    if args.stages is not None:
        stages.of_draft(loop).keep(args.stages / "draft.json")
    loop.start()
    kind = synchronous.DraftServicer if args.synchronous else DraftServicer
    return kind(loop, identity_of(directory, engine, args.kv_tokens - 1 - limits.max_nodes), limits)


def _simulated(directory: ModelDirectory, args: argparse.Namespace) -> Engine:
    """Return an engine that only takes time."""
    profile, drafts = PROFILES[args.profile], args.role == "draft"
    return SimulatedGpu(
        directory.vocabulary,
        args.kv_tokens,
        (profile.draft if drafts else profile.target).seconds,
        end_token=min(directory.end_tokens, default=0),
        ranks=RANKS if drafts else (0,),
    )


def _paced(engine: Engine, args: argparse.Namespace, device: str) -> Engine:
    if args.step_ms:
        return with_long_steps(engine, at_least(args.step_ms / 1000))
    return engine if args.devices is None else with_long_steps(engine, read_device(args.devices, device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["verifier", "draft"])
    parser.add_argument("--synchronous", action="store_true")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--step-ms", type=float, default=0.0)
    pace.add_argument("--devices", type=Path)
    pace.add_argument("--profile", choices=list(PROFILES))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft-model", type=Path, help="local draft of a verifier")
    parser.add_argument("--dtype", choices=get_args(WantedDtype), default="auto", help="dtype of a verifier")
    parser.add_argument("--device", default="cpu", help="device of a verifier")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--threads-while-drafting", type=int, help="option of a verifier")
    parser.add_argument("--kv-tokens", type=int, default=16384)
    parser.add_argument(
        "--max-candidates", type=int, default=VerifierLimits.max_candidates, help="option of a verifier"
    )
    parser.add_argument("--stages", type=Path, help="folder for stage times (`bench.systems.stages`)")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--drain-seconds", type=float, default=2.0)
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--stop-with-stdin", action="store_true")
    args = parser.parse_args()
    settings = ServerSettings(
        port=args.port, drain_seconds=args.drain_seconds, log_level=args.log_level, stop_with_stdin=args.stop_with_stdin
    )
    start = {"verifier": verifier, "draft": draft}[args.role]
    run(settings, lambda: in_temporary_thread(lambda: start(args)), args.role)


if __name__ == "__main__":
    main()
