"""transformers' own continuous batching as a system under test, the basis of `generate_batch` and `transformers serve`.

    python -m bench.systems.transformers_batching --model DIR --dtype bfloat16

is the program that answers loads. Its manager runs across calls, as in a server: `generate_batch` would start and stop
its thread in every call, which costs a tenth of a second. When idle, the manager looks for requests ten times a second.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.systems.program import Program
from bench.systems.protocol import Generate, Record, Request, serve
from bench.systems.system import Configuration, Launch, Setup

# The fastest settings of those tried on CPU: "sdpa" over "paged|eager", pages of 256 tokens over 32, no compilation.
ATTENTION, PAGE_TOKENS = "sdpa", 256


def launches(setup: Setup) -> list[Launch]:
    options = ["--model", str(setup.target.resolve()), "--dtype", setup.dtype]
    options += ["--streams", str(setup.streams), "--context", str(setup.context)]
    start = partial(Program.start, "batching", sys.executable, "bench.systems.transformers_batching", options)
    return [Launch("transformers batching", start, (Configuration("transformers batching"),))]


def start(args: argparse.Namespace, exits: ExitStack) -> tuple[dict[str, Any], Generate]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(os.cpu_count() or 1)
    options: dict[str, Any] = {
        "max_requests_per_batch": args.streams,
        "num_blocks": args.streams * -(-args.context // PAGE_TOKENS),
        "page_size": PAGE_TOKENS,
        "allow_block_sharing": False,
    }
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), attn_implementation=ATTENTION
    ).eval()
    managers: dict[float, Any] = {}  # by temperature; one at most

    def stop() -> None:
        for manager in managers.values():
            manager.stop(block=True)
        managers.clear()

    exits.callback(stop)

    def manager_for(temperature: float) -> Any:
        if temperature not in managers:
            stop()
            sampling = {"do_sample": True, "temperature": temperature, "top_k": None} if temperature else {}
            manager = model.init_continuous_batching(
                GenerationConfig(eos_token_id=-1, pad_token_id=0, **sampling), ContinuousBatchingConfig(**options)
            )
            manager.start()
            managers[temperature] = manager
        return managers[temperature]

    def generate(request: Request, record: Record) -> None:
        manager = manager_for(request.temperature)
        ids = manager.add_requests(request.prompts, max_new_tokens=request.max_tokens, record_timestamps=True)
        for result in results(manager, ids):
            record.add_each(ids.index(result.request_id), result.timestamps)
        record.steps = sum(map(len, record.arrivals))

    flags = options | {"attention": ATTENTION, "threads": torch.get_num_threads()}
    return {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "flags": flags,
    }, generate


def results(manager: Any, ids: Sequence[str]) -> Iterator[Any]:
    """Yield the results of these requests as they finish; RuntimeError if one fails or the generation ends."""
    waiting = set(ids)
    while waiting:
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("the generation thread ended")
        if result is not None and result.error is not None:
            raise RuntimeError(result.error)
        if result is not None and result.is_finished():
            waiting.remove(result.request_id)
            yield result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--streams", type=int, default=64, help="maximum concurrent sequences")
    parser.add_argument("--context", type=int, default=256, help="maximum tokens of a sequence")
    args = parser.parse_args()
    serve(lambda exits: start(args, exits))


if __name__ == "__main__":
    main()
