"""Measure a draft's step time by its rows, t_d(n), with both engines, for rows of one session or of many.

    python -m bench.draft_step

Each row is a node at the end of its session's text. Figures are medians; the sizes take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from draft_service.expansion_width import siblings
from specdec.engine.batch import PackedBatch
from specdec.engine.engine import Engine
from specdec.engine.loading import Dtype, Kind, load_engine
from specdec.engine.model_directory import ModelDirectory
from specdec.local import DEMO

ROWS = (1, 2, 4, 8, 16, 32)
ROWS_PER_SESSION = 4


def batch(engine: Engine, rows: int, rows_per_session: int, text: int) -> PackedBatch:
    """Return `rows` sibling nodes after texts of `text` tokens, `rows_per_session` for each session."""
    packer = engine.packer()
    slot = 1
    for first in range(0, rows, rows_per_session):
        count = min(rows_per_session, rows - first)
        siblings(packer, count, np.arange(slot, slot + text + count))
        slot += text + count
    return packer.pack()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "draft")
    parser.add_argument("--text", type=int, default=200, help="tokens before the rows")
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    kinds: list[tuple[Kind, Dtype]] = [("onnx", "float32"), ("torch", "float32"), ("torch", "bfloat16")]
    print("| engine | rows of a session | " + " | ".join(f"{rows} rows, ms" for rows in ROWS) + " |")
    print("|---|---|" + "---|" * len(ROWS))
    for kind, dtype in kinds:
        engine = load_engine(kind, ModelDirectory(args.model), capacity=16384, threads=(1,), dtype=dtype)
        for rows_per_session in (ROWS[-1], ROWS_PER_SESSION):
            seconds: dict[int, list[float]] = defaultdict(list)
            for _ in range(args.rounds):
                for rows in ROWS:
                    packed = batch(engine, rows, rows_per_session, args.text)
                    begin = time.perf_counter()
                    engine.forward(packed)
                    seconds[rows].append(time.perf_counter() - begin)
            cells = " | ".join(f"{1e3 * statistics.median(seconds[rows]):.2f}" for rows in ROWS)
            print(f"| {kind} {dtype} | {rows_per_session} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
