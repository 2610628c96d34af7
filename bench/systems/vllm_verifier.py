"""specdec's verifier with vLLM as its engine, and vLLM with our draft service as its remote drafter.

    python -m bench.systems.vllm_verifier PYTHON --model DIR ...

takes the place of `python -m verifier_service` in a Stack, under the interpreter of an environment that has vLLM, with
OpenMP as vLLM wants it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.systems.program import Program
from bench.systems.specdec import Specdec
from bench.systems.system import Configuration, Launch, Setup
from bench.systems.vllm import openmp, options_of
from specdec.local import PROGRAMS
from specdec.local.child import Child, stop

START_SECONDS = 120.0


def launches(setup: Setup, python: str) -> list[Launch]:
    """Return the systems; `python` is the interpreter that has vLLM."""
    programs = PROGRAMS | {"verifier": ("bench.systems.vllm_verifier", python)}
    start = partial(Specdec.start, setup, verifier_options=("--engine", "vllm", "--compile"), programs=programs)
    plain = Configuration("vLLM served by specdec", "off")
    found = [Launch("vLLM served by specdec", start, (plain,))]
    if setup.draft is not None:
        drafted = Configuration("vLLM served by specdec, drafted", "draft", adaptive=True)
        found += [
            Launch("vLLM served by specdec, draft service", partial(start, setup.draft), (drafted,)),
            Launch("vLLM remote draft", partial(_remote, setup, python), (Configuration("vLLM remote draft"),)),
        ]
    return found


@contextlib.contextmanager
def _remote(setup: Setup, python: str) -> Iterator[Program]:
    """Run vLLM with a draft service beside it."""
    draft = Child.start("draft", "-m", "draft_service", "--port", "0", "--threads", "1", "--model", str(setup.draft))
    try:
        while (address := draft.ready_at()) is None:
            if (ending := draft.ending()) is not None:
                raise RuntimeError(f"the draft service does not start: {ending}")
        options = [*options_of(setup), "--speculation", "remote", "--drafts", address]
        with Program.start("vLLM", python, "bench.systems.vllm", options) as program:
            yield program
    finally:
        stop([draft])


def main() -> None:
    python, *options = sys.argv[1:]
    # Threads are bound to cores, one to each: their number does not change.
    spared = int("--threads-while-drafting" in options)
    os.environ |= openmp(Path(python).parents[1], spared)
    threads = str(max(1, len(os.sched_getaffinity(0)) - spared))
    os.execv(python, [python, "-m", "verifier_service", *options, "--threads", threads])


if __name__ == "__main__":
    main()
