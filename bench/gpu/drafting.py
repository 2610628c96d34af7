"""Checks that a draft and a verifier on a GPU give the tokens of plain decoding: `python -m bench.gpu.drafting`.

The three services run as processes, as `specdec up` starts them. The draft computes in float16, exported and run by
ONNX Runtime, or with --engine torch in the GPU engine. Every prompt is completed with and without the draft, greedily
and sampled. The tokens must be the same, and some must come from the draft.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from bench.gpu.results import keep
from demo.prompts import held_out
from specdec.client import Client
from specdec.engine.model_directory import ModelDirectory
from specdec.local import DEMO, Stack

TEMPERATURES = (0.0, 0.8)


def draft_of(engine: str, device: str, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the draft's directory (for ONNX Runtime, a float16 export) and its service's options."""
    on_device = ("--device", device)
    if engine == "torch":
        return DEMO / "draft", ("--engine", "torch", "--dtype", "float32" if device == "cpu" else "float16", *on_device)
    from specdec.engine.onnx.export import export

    target = folder / "draft-float16"
    export(ModelDirectory(DEMO / "draft"), target, "float16")
    return target, ("--engine", "onnx", *on_device)


def compared(address: str, prompts: int, tokens: int) -> dict[str, Any]:
    """Complete all prompts with and without the draft; return the differences, and the draft's contribution."""
    different, offered, sources = [], 0, Counter[str]()
    ways: tuple[Literal["off", "always"], ...] = ("off", "always")
    seconds = dict.fromkeys(ways, 0.0)
    with Client(address) as client:
        for number, prompt in enumerate(held_out(prompts)):
            for temperature in TEMPERATURES:
                texts = {}
                for way in ways:
                    begin = time.perf_counter()
                    answer = client.complete(
                        tokens=prompt,
                        max_tokens=tokens,
                        temperature=temperature,
                        seed=number,
                        ignore_end_token=True,
                        speculation=way,
                    ).completions[0]
                    seconds[way] += time.perf_counter() - begin
                    texts[way] = answer.tokens
                offered += answer.finish.speculation.offered
                sources.update(answer.finish.speculation.sources)
                if texts["off"] != texts["always"]:
                    different.append(f"prompt {number} at T = {temperature:g}")
    return {
        "compared": 2 * prompts,
        "different": different,
        "offered": offered,
        "sources": dict(sources),
        "plain_s": round(seconds["off"], 2),
        "drafted_s": round(seconds["always"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="device of verifier and draft")
    parser.add_argument("--engine", choices=["onnx", "torch"], default="onnx", help="engine of the draft")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, required=True, help="folder for the export and the figures")
    args = parser.parse_args()
    begin = time.perf_counter()
    draft, options = draft_of(args.engine, args.device, args.out)
    found: dict[str, Any] = {"export_s": round(time.perf_counter() - begin, 1)}
    with Stack.start(
        DEMO / "target",
        str(draft),
        dtype="float32" if args.device == "cpu" else "bfloat16",
        verifier_options=("--device", args.device),
        draft_options=options,
    ) as stack:
        found["start_s"] = round(time.perf_counter() - begin - found["export_s"], 1)
        found |= compared(stack.address, args.prompts, args.tokens)
    keep(args.out, found)
    drafted = found["sources"].get("remote_draft", 0)
    if not drafted:
        print("no token came from the draft")
    sys.exit(bool(found["different"]) or not drafted)


if __name__ == "__main__":
    main()
