"""Checks whether the GPU engine is exact on this device, by dtype: `python -m bench.gpu.exactness --dtypes float32`.

The engine's own check decides, as at a verifier's start-up. An independent check adds other texts and sizes: a text's
last logits must have the same bits when computed with the whole prompt and when computed later, beside other texts.
Without a GPU, kernels are interpreted, and the engine's own check is left out, since it would take minutes. Differences
are then reported but do not fail the run, since products are not made exact on a CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.arguments import names
from bench.gpu.results import keep
from specdec.engine.gpu.engine import GpuEngine
from specdec.engine.model_directory import ModelDirectory
from specdec.local import DEMO

TOKENS = 300
"""Tokens of the text: more than one split of keys (`SPLIT`)."""

SMALL_TOKENS = 12
BESIDE = (0, 1, 6, 31)
"""Numbers of other texts beside the last token."""


def text_of(length: int, vocabulary: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, vocabulary, length)]


def last_logits(engine: GpuEngine, text: list[int], beside: int) -> NDArray[np.float32]:
    """Return the logits of a text's last token, computed after the rest of the text, beside this many other texts."""
    slots = np.arange(1, len(text) + 1)
    packer = engine.packer()
    packer.add_path(slots[:-1], packer.add_rows(text[:-1], 0, slots[:-1]))
    packer.want(len(text) - 2)
    engine.forward(packer.pack())
    packer = engine.packer()
    for other in range(beside):
        slot = np.asarray([len(text) + 1 + other])
        packer.add_path(slot, packer.add_rows([other % engine.vocabulary], 0, slot))
    row = packer.add_row(text[-1], len(text) - 1, int(slots[-1]))
    packer.add_path(slots, [row])
    packer.want(row)
    return np.array(engine.forward(packer.pack())[0])


def in_one_prompt(engine: GpuEngine, text: list[int]) -> NDArray[np.float32]:
    slots = np.arange(1, len(text) + 1)
    packer = engine.packer()
    rows = packer.add_rows(text, 0, slots)
    packer.add_path(slots, rows)
    packer.want(rows[-1])
    return np.array(engine.forward(packer.pack())[0])


def measured(directory: ModelDirectory, dtype: str, device: str) -> dict[str, Any]:
    """Return the findings in one dtype."""
    on_gpu = device != "cpu"
    begin = time.perf_counter()
    engine = GpuEngine(directory, capacity=4096 if on_gpu else 1024, dtype=dtype, device=device, exact=on_gpu)
    loaded = time.perf_counter() - begin
    text = text_of(TOKENS if on_gpu else SMALL_TOKENS, engine.vocabulary, seed=5)
    whole = in_one_prompt(engine, text)
    differ = [n for n in (BESIDE if on_gpu else BESIDE[:2]) if not np.array_equal(last_logits(engine, text, n), whole)]
    return {"exact": engine.exact, "numerics": engine.numerics, "load_s": round(loaded, 1), "differs_beside": differ}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "target")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", type=names, default=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    wrong = False
    for dtype in args.dtypes:
        try:
            found[dtype] = measured(ModelDirectory(args.model), dtype, args.device)
        except Exception as error:  # kernels may raise anything; the other dtypes are still checked
            found[dtype] = {"exact": False, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        inexact = not found[dtype]["exact"] or bool(found[dtype].get("differs_beside"))
        wrong |= "error" in found[dtype] or (args.device != "cpu" and inexact)
        keep(args.out, found)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
