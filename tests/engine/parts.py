"""Tensor-parallel engines, as a program run by every rank: rank 0 writes the results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.engine.cpu.backend import RaggedBackend
from specdec.engine.distributed.ranks import Ranks
from specdec.engine.engine import Engine, UnsupportedModelError, hidden_states
from specdec.engine.engines.parallel_engine import FollowingCpuEngine, FollowingEngine, LeadingCpuEngine
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.padded.backend import PaddedBackend
from tests.models import VOCABULARY

CAPACITY = 512
BRANCH = 5
"""Tokens of a branch near the end of the text."""

NEXT = "next"

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """A model, and how to run it."""

    name: str
    directory: Path
    padded: bool = False


def text() -> list[int]:
    return [int(token) for token in np.random.default_rng(5).integers(3, VOCABULARY, 60)]


def branch() -> list[int]:
    """Return the branch that replaces the last tokens of the text."""
    return [(token + 7) % VOCABULARY for token in text()[-BRANCH:]]


def compute(engine: Engine) -> dict[str, Logits]:
    """Return the logits of every token of the text, and of a branch in it, in several ways; and hidden states with
    logits."""
    tokens, side = text(), branch()
    length, fork = len(tokens), len(tokens) - BRANCH
    own, theirs = np.arange(1, 1 + length), np.arange(100, 100 + BRANCH)

    def run(packer: Any, rows: range) -> Logits:
        for row in rows:
            packer.want(row)
        return engine.forward(packer.pack())[: len(rows)].copy()

    packer = engine.packer()
    rows = packer.add_rows(tokens, 0, own)
    packer.add_path(own, rows)
    whole = run(packer, rows)

    packer = engine.packer()  # all but the last, then the last, after a copy, next to the branch
    for start in (0, 1, 2):
        other = packer.add_rows(tokens[start:], 0, np.arange(200 + 64 * start, 200 + 64 * start + length - start))
        packer.add_path(np.arange(200 + 64 * start, 200 + 64 * start + length - start), other)
    rows = packer.add_rows(tokens[:-1], 0, own[:-1])
    packer.add_path(own[:-1], rows)
    crowded = run(packer, rows)
    moved = np.arange(430, 430 + fork)
    engine.copy(own[:fork], moved)
    packer = engine.packer()
    rows = packer.add_rows(side, fork, theirs)
    packer.add_path(np.concatenate([moved, theirs]), rows)
    last = packer.add_row(tokens[-1], length - 1, int(own[-1]))
    packer.add_path(own, [last])
    branched = run(packer, range(rows[0], last + 1))

    packer = engine.packer()
    rows = packer.add_rows(tokens, 0, own)
    packer.add_path(own, rows)
    for row in rows:
        packer.want(row)
    beside, hidden = (found[:length] for found in hidden_states(engine).forward_hidden(packer.pack()))
    ways = {"whole": whole, "crowded": crowded, "branched": branched[:BRANCH], "alone": branched[BRANCH:]}
    return ways | {"hidden": hidden, "beside": beside}


def run_all(cases: list[Case], results: Path) -> None:
    """Write the results of each case, or the reason of its refusal."""
    with Ranks.joined("cpu") as ranks:
        kind = FollowingCpuEngine if ranks.rank else LeadingCpuEngine
        for case in cases:
            backend = PaddedBackend if case.padded else RaggedBackend
            options: dict[str, Any] = {"capacity": CAPACITY, "backend": backend, "threads": (1,)}
            try:
                engine = kind(ModelDirectory(case.directory), ranks=ranks, **options)
            except UnsupportedModelError as error:
                if ranks.rank == 0:
                    np.savez(results / f"{case.name}.npz", refusal=np.asarray(str(error)))
                continue
            if isinstance(engine, FollowingEngine):
                for name, *arguments in ranks.commands():
                    if name == NEXT:
                        break
                    getattr(engine, name)(*arguments)
                continue
            found = compute(engine)
            facts = {"numerics": np.asarray(engine.numerics), "exact": np.asarray(engine.exact)}
            np.savez(results / f"{case.name}.npz", allow_pickle=False, **facts, **found)
            ranks.tell(NEXT)
        if ranks.rank:
            ranks.await_end()
