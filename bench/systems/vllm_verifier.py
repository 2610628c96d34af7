"""specdec's verifier with vLLM as its engine, and vLLM with our draft service as its remote drafter.

    python -m bench.systems.vllm_verifier PYTHON --model DIR ...

replaces `python -m verifier_service` in a Stack, under the interpreter of an environment with vLLM, with OpenMP set as
for vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.systems.program import Program
from bench.systems.specdec import Specdec
from bench.systems.system import LOAD_SECONDS, Configuration, Launch, Setup
from bench.systems.vllm import openmp, options_of, threads_of
from specdec.local import PROGRAMS
from specdec.local.child import Child, stop

SERVED = "vLLM served by specdec"
"""Prefix of configurations' names."""
REMOTE = "vLLM remote draft"


def is_of_both(name: str) -> bool:
    """Return whether a configuration combines specdec and vLLM."""
    return name.startswith((SERVED, REMOTE))


def launches(setup: Setup, python: str) -> list[Launch]:
    """Return the systems; `python` is the interpreter with vLLM."""
    setup = replace(setup, weights="stored")  # vLLM quantises nothing at start
    programs = PROGRAMS | {"verifier": ("bench.systems.vllm_verifier", python)}
    start = partial(Specdec.start, setup, verifier_options=("--engine", "vllm", "--compile"), programs=programs)
    found = [Launch(SERVED, start, (Configuration(SERVED, "off"),))]
    if setup.draft is not None:
        drafted = (
            Configuration(f"{SERVED}, drafted", "draft", adaptive=True),
            Configuration(f"{SERVED}, drafted + n-gram", "auto", adaptive=True),
        )
        found += [
            Launch(f"{SERVED}, draft service", partial(start, setup.draft), drafted),
            Launch(REMOTE, partial(_remote, setup, python), (Configuration(REMOTE),)),
        ]
    return found


@contextlib.contextmanager
def _remote(setup: Setup, python: str) -> Iterator[Program]:
    """Run vLLM with a draft service beside it; LocalError if that does not start."""
    draft = Child.start("draft", "-m", "draft_service", "--port", "0", "--threads", "1", "--model", str(setup.draft))
    try:
        address = draft.until_ready(LOAD_SECONDS)
        options = [*options_of(setup, threads_of(setup, 1)), "--speculation", "remote", "--drafts", address]
        with Program.start("vLLM", python, "bench.systems.vllm", options) as program:
            yield program
    finally:
        stop([draft])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--threads-while-drafting", type=int)
    args, options = parser.parse_known_args()
    # Threads are bound to cores, one each: their number is fixed.
    threads = args.threads_while_drafting or args.threads
    os.environ |= openmp(Path(args.python).parents[1], threads)
    os.execv(args.python, [args.python, "-m", "verifier_service", *options, "--threads", str(threads)])


if __name__ == "__main__":
    main()
