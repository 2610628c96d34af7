"""Compare the speed of specdec with other systems: the same models, prompts and machine, in one run.

    python -m bench speed --out build/speed
    python -m bench speed --target DIR --draft DIR --vllm-python build/vllm/bin/python --out build/speed
    python -m bench speed --vllm-python build/vllm/bin/python --peers none --only vLLM --dtype float32
    python -m bench speed --llama-server PATH --llama-gguf TARGET.gguf --llama-draft-gguf DRAFT.gguf
    python -m bench speed --target build/padded-1b --draft demo/draft --device cuda --peers none --quick
    python -m bench speed --vllm-python build/vllm/bin/python --peers none --only vLLM --threads 1 --over vLLM
    python -m bench speed --quick
    python -m bench speed --target DIR --draft DIR --apart --prompts human-eval mt-bench --prompt-tokens 256
    python -m bench speed --peers none --kinds code --streams 1 --bad-drafts
    python -m bench speed --peers none --kinds code --streams 1 --windows 2,2,1 5,3,5 7,4,7 15,5,15

At each temperature there is one stream at a time for each kind of prompt, then several concurrent ones of all kinds
mixed. specdec runs as its three services, used over gRPC by a streaming client, whose work is part of the measured
time. Its configurations are plain decoding at its best (no draft, fast numerics, no speculation requested, all cores),
the verifier's own proposals (lookahead), the draft alone, both, and the verifier's proposals with a local draft.
--bad-drafts adds drafts that are slow, random, or of another tokenizer: none may be slower than no draft. --windows
adds lookahead windows of these sizes, in every step, whether or not they pay. --threads sets the threads of all
targets, with or without a draft service; drafts and everything else use the other cores, as if targets had their own
device. --device puts the target, and a local draft, on a GPU, and adds plain decoding without CUDA graphs; the draft
service stays on the CPU.

The other systems are called inside their own processes, which saves them a network protocol: transformers' `generate`
(plain, assisted with its own schedule and with a fixed length, prompt lookup; one stream only), its continuous
batching, and vLLM's CPU build (plain, n-grams, draft model, our draft service as its remote drafter), installed by
`make bench-peers`. vLLM also runs as the engine of specdec's verifier. llama.cpp's `llama-server` (plain, n-grams,
draft model) is started if its path is given, and used over HTTP, as a server.

All systems are loaded first and then take turns: in a round all get the same prompts, which are new in every round. The
first round warms up; in it, configurations that adapt their speculation while serving first get other prompts for some
seconds. The report has medians over rounds (and kinds), ratios within a round, and, for specdec, efficiency: the rate
divided by an ideal system's rate, given the step times of the same round (`step_times.py`) and the acceptance of the
same answer. Writes speed.json, .md and .png.

If memory is too small for all systems, --apart loads one at a time: each is loaded, warmed up and ended in every round,
and no step times are measured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from bench.arguments import parser_of
from bench.conditions import machine, versions
from bench.report import CUT_OFF, Report, publish
from bench.speed.comparison import Comparison, launches
from bench.speed.config import SpeedConfig, parsed
from bench.speed.report import model_label, plot, table
from bench.speed.step_times import StepTimes


def measure(config: SpeedConfig, console: Console) -> Report:
    """Measure and return the report. Ctrl-C ends the measurement early, or raises if nothing is measured yet."""
    step_times = None
    if not config.apart:
        text = config.prompt_tokens + config.tokens // 2
        placed = config.device, config.threads, config.weights
        step_times = StepTimes(config.target, config.draft, config.dtype, text, *placed)
    comparison, cut_off = Comparison(config, launches(config), step_times), False
    try:
        comparison.run(console)
    except KeyboardInterrupt:
        if not comparison.measurements:
            raise
        cut_off = True
    return {
        "systems": comparison.about,
        "peak_bytes": comparison.peak_bytes,
        "step_times": comparison.times,
        "failed": {name: _published(reason, config) for name, reason in comparison.failed.items()},
        "measurements": [asdict(each) for each in comparison.measurements],
    } | ({CUT_OFF: True} if cut_off else {})


def _published(reason: str, config: SpeedConfig) -> str:
    """Return the reason with names instead of this machine's paths."""
    paths = [config.target, config.draft]
    if config.llama is not None:
        paths += [config.llama.server, config.llama.target, config.llama.draft]
    for path in filter(None, paths):
        for given in (path.resolve(), path):
            reason = reason.replace(str(given), path.name)
    return reason


def main(given: Sequence[str]) -> None:
    config = parsed(given, __doc__)
    measured_ones = [each.name for launch in launches(config) for each in launch.configurations]
    if config.over not in measured_ones:
        parser_of("speed", __doc__).error(f"--over: {config.over} is none of {', '.join(measured_ones)}")
    try:
        measured = measure(config, Console(stderr=True))
    except KeyboardInterrupt:
        sys.exit(130)
    report = {
        "model": model_label(config.target),
        "draft": None if config.draft is None else model_label(config.draft),
        "machine": machine(),
        "versions": versions(),
        **config.asked,
        **measured,
    }
    publish(report, config.out, "speed", table, plot)
