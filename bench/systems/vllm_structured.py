"""vLLM's CPU build with JSON schemas: reads rounds of requests as JSON, prints tokens a second, plain and with n-grams.

python -m bench.systems.vllm_structured --model DIR --streams 16 --tokens 64 < rounds.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.systems.vllm import IN_THIS_PROCESS, NGRAM, prepare_process


def speeds(llm: Any, rounds: list[list[dict[str, Any]]], streams: int, tokens: int) -> list[float]:
    """Return tokens a second of each round except the first, a warm-up."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    found = []
    for asked in rounds:
        begin, count = time.monotonic(), 0
        for start in range(0, len(asked), streams):
            part = asked[start : start + streams]
            sampling = [
                SamplingParams(
                    temperature=0.8,
                    max_tokens=tokens,
                    seed=each["seed"],
                    structured_outputs=StructuredOutputsParams(json=each["json_schema"]),
                )
                for each in part
            ]
            prompts = [{"prompt_token_ids": each["tokens"]} for each in part]
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            count += sum(len(output.outputs[0].token_ids) for output in outputs)
        found.append(count / (time.monotonic() - begin))
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    args = parser.parse_args()
    os.environ |= IN_THIS_PROCESS
    import vllm

    rounds = json.load(sys.stdin)
    print(f"{args.streams} streams")
    for name, speculation in (
        ("vLLM", None),
        ("vLLM n-gram", {"method": "ngram", "num_speculative_tokens": 5, **NGRAM}),
    ):
        llm = vllm.LLM(
            model=str(args.model),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=args.streams,
            enable_prefix_caching=False,
            speculative_config=speculation,
            structured_outputs_config={"backend": "guidance", "disable_any_whitespace": True},
        )
        found = sorted(speeds(llm, rounds, args.streams, args.tokens))
        print(f"  {name:16} {median(found):7.1f} tokens/s ({found[0]:.1f} to {found[-1]:.1f})", flush=True)
        del llm


if __name__ == "__main__":
    prepare_process(len(os.sched_getaffinity(0)))
    main()
