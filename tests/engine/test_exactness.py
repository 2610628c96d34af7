"""Exactness, bit by bit: a text's logits are the same alone, batched with others, in chunks, token by token, as
candidates of a tree, and after a prefix computed by another session.

On some machines all kernels are exact already; the fickle model (`odd_models.py`) never is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.engine.batch import Packer
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.kv.slots import Slots
from specdec.engine.model_directory import ModelDirectory
from tests.engine import odd_models
from tests.models import ARCHITECTURES, CONTEXT, VOCABULARY, make

CAPACITY = 2048
LENGTH = 140
"""Length of the text: several windows, more than a tile."""

Logits = NDArray[np.float32]


SCATTERED: Slots = 1 + np.random.default_rng(7).permutation(LENGTH)
ELSEWHERE: Slots = LENGTH + SCATTERED
"""Two places for a text. Other texts use the end of the memory."""


def logits(engine: CpuEngine, packer: Packer) -> Logits:
    wanted = len(packer.wanted)
    return engine.forward(packer.pack())[:wanted].copy()


def compute(engine: CpuEngine, tokens: list[int], start: int, slots: Slots, *, strangers: int = 0) -> Logits:
    """Return the logits of tokens[start:], with keys and values in their slots, packed after other texts' prompts."""
    packer = engine.packer()
    add_strangers(packer, strangers)
    rows = packer.add_rows(tokens[start:], start, slots[start : len(tokens)])
    packer.add_path(slots[: len(tokens)], rows)
    for row in rows:
        packer.want(row)
    return logits(engine, packer)


def add_strangers(packer: Packer, rows: int) -> None:
    """Add rows of other texts: prompts, long ones first."""
    slot = CAPACITY - rows
    while rows:
        count = min(CONTEXT, 1 + rows * 2 // 3)
        slots = np.arange(slot, slot + count)
        packer.add_path(slots, packer.add_rows([(7 * i) % VOCABULARY for i in range(count)], 0, slots))
        slot, rows = slot + count, rows - count


DTYPES = ("float32", "bfloat16")
EARLY = {"llama": DTYPES, "gemma2": DTYPES, "gpt2": ("float32",), "qwen3": ("float32",)}
"""Dtypes of the architectures that `make test` tries; the others run the same code of ours."""


def kinds() -> Iterator[Any]:
    """Yield every architecture with every dtype."""
    for name in ARCHITECTURES:
        for dtype in DTYPES:
            early = dtype in EARLY.get(name, ())
            yield pytest.param(f"{name}-{dtype}", marks=[] if early else [pytest.mark.verify])
    yield from ("fickle-float32", "fickle-bfloat16")


@pytest.fixture(scope="module", params=kinds())
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    name, dtype = request.param.split("-")
    maker = make if name in ARCHITECTURES else odd_models.make
    directory = maker(name, tmp_path_factory.mktemp(name))
    loaded = CpuEngine(ModelDirectory(directory), capacity=CAPACITY, dtype=dtype, exact=True, threads=(1,))
    if not loaded.exact:
        pytest.skip(f"{loaded.numerics}: the check at start found that rows depend on their batch here")
    return loaded


@pytest.fixture(scope="module")
def text() -> list[int]:
    return [int(token) for token in np.random.default_rng(3).integers(3, VOCABULARY, LENGTH)]


@pytest.fixture(scope="module")
def alone(engine: CpuEngine, text: list[int]) -> Logits:
    """Logits of all rows of the text as one prompt."""
    found = compute(engine, text, 0, np.arange(1, 1 + LENGTH))
    assert len(np.unique(found[-1])) > VOCABULARY // 2  # they are not degenerate
    return found


@pytest.mark.parametrize("strangers", [1, 5, 130, 900])
def test_beside_strangers(engine: CpuEngine, text: list[int], alone: Logits, strangers: int) -> None:
    assert np.array_equal(compute(engine, text, 0, SCATTERED, strangers=strangers), alone)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (64, 7), (37,)], ids=str)
def test_in_pieces(engine: CpuEngine, text: list[int], alone: Logits, sizes: tuple[int, ...]) -> None:
    """In chunks of varying sizes, each batched with other texts."""
    done, number = 0, 0
    while done < LENGTH:
        end = min(LENGTH, done + sizes[number % len(sizes)])
        got = compute(engine, text[:end], done, SCATTERED, strangers=number % 5)
        assert np.array_equal(got, alone[done:end])
        done, number = end, number + 1


def test_token_by_token(engine: CpuEngine, text: list[int], alone: Logits) -> None:
    start = LENGTH - 20
    compute(engine, text[:start], 0, SCATTERED)
    for end in range(start + 1, LENGTH + 1):
        (got,) = compute(engine, text[:end], end - 1, SCATTERED, strangers=(end * 11) % 40)
        assert np.array_equal(got, alone[end - 1])


@pytest.mark.parametrize("depth", [1, 6])
def test_as_candidates(engine: CpuEngine, text: list[int], alone: Logits, depth: int) -> None:
    """Part of the text is computed as a path of a tree, with a wrong sibling at each level. Then the accepted rows are
    copied to their places and the text continues."""
    tip = LENGTH - depth - 2
    compute(engine, text[:tip], 0, SCATTERED)
    packer = engine.packer()
    add_strangers(packer, 3)
    path = SCATTERED[: tip + 1]
    rows = [packer.add_row(text[tip], tip, int(path[tip]))]
    for level in range(1, depth + 1):
        slot, other = ELSEWHERE[2 * level : 2 * level + 2].tolist()
        sibling = packer.add_row((text[tip + level] + 1) % VOCABULARY, tip + level, other)
        packer.add_path(np.append(path, other), [sibling])
        packer.want(sibling)
        rows.append(packer.add_row(text[tip + level], tip + level, slot))
        path = np.append(path, slot)
    packer.add_path(path, rows)
    for row in rows:
        packer.want(row)
    got = logits(engine, packer)
    assert np.array_equal(got[depth:], alone[tip : tip + 1 + depth])
    assert not np.array_equal(got[0], alone[tip + 1])  # a sibling's logits differ

    engine.copy(path[tip + 1 :], SCATTERED[tip + 1 : tip + 1 + depth])
    (last,) = compute(engine, text, LENGTH - 1, SCATTERED)
    assert np.array_equal(last, alone[-1])


@pytest.mark.parametrize("copied", [0, 1, 40])
def test_after_a_shared_prefix(engine: CpuEngine, text: list[int], alone: Logits, copied: int) -> None:
    """64 tokens read from another session's slots, some more copied, the rest computed in chunks."""
    found = 64 + copied
    compute(engine, [*text[:found], 5, 6, 7], 0, SCATTERED, strangers=9)
    own = np.concatenate([SCATTERED[:64], ELSEWHERE[64:]])
    engine.copy(SCATTERED[64:found], own[64:found])
    got = compute(engine, text[:120], found, own, strangers=2)
    assert np.array_equal(got, alone[found:120])
    assert np.array_equal(compute(engine, text, 120, own), alone[120:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_exactness_is_made(tmp_path: Path, text: list[int], dtype: str) -> None:
    """Without exactness, the tests here would fail for a model with fickle kernels."""
    directory = ModelDirectory(odd_models.make("fickle", tmp_path))
    fast = CpuEngine(directory, capacity=CAPACITY, dtype=dtype, exact=False, threads=(1,))
    whole = compute(fast, text, 0, SCATTERED)
    assert not np.array_equal(compute(fast, text[:5], 0, SCATTERED), whole[:5])
    assert not np.array_equal(compute(fast, text, LENGTH - 1, SCATTERED), whole[-1:])
    assert CpuEngine(directory, capacity=CAPACITY, dtype=dtype, exact=True, threads=(1,)).exact


def test_dtypes_differ(tmp_path: Path, text: list[int]) -> None:
    """Otherwise equal bits would prove nothing."""
    directory = ModelDirectory(make("llama", tmp_path))
    one, other = (
        compute(CpuEngine(directory, capacity=CAPACITY, dtype=dtype, threads=(1,)), text, 0, SCATTERED)
        for dtype in DTYPES
    )
    assert not np.array_equal(one, other)
