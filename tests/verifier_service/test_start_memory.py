"""Memory of a verifier: a first start and its texts stay within the preflight's estimate."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.client import Client
from specdec.engine.memory import free_bytes
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement, WantedDtype
from specdec.engine.preflight.memory_needed import memory_needed
from specdec.local.child import Child, stop
from tests import models

HIDDEN = 640
"""Width of Gemma 3 270M: with a large vocabulary, the output head is most of such a model."""

KV_TOKENS = 4096

TOLERANCE = 1.1
"""Limit on the process's memory, as a multiple of the estimate."""

DRAFT_KV_TOKENS = 2048

READY_SECONDS = 300.0

CGROUPS = Path("/sys/fs/cgroup/memory")


def model(folder: Path, vocabulary: int, dtype: torch.dtype, *, tied: bool) -> Path:
    """Write a model of two layers whose weights are stored in `dtype`."""
    fields = {"hidden_size": HIDDEN, "intermediate_size": 1024, "max_position_embeddings": 2048}
    # With this width and the usual random weights, bfloat16's rounding errors grow to what the reference check refuses.
    weights = {"vocab_size": vocabulary, "tie_word_embeddings": tied, "initializer_range": 0.05}
    made = models.ARCHITECTURES["llama"](**fields, **weights)
    return models.save(made.to(dtype), folder / "model")


class Watch:
    """Samples a process's private memory; mapped files belong to the page cache."""

    def __init__(self, process: int) -> None:
        self.peak = 0
        self._file = Path(f"/proc/{process}/status")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError, KeyError, IndexError):  # the process has ended
            while not self._over.wait(0.005):
                numbers = dict(line.split(":", 1) for line in self._file.read_text().splitlines())
                self.peak = max(self.peak, 1024 * int(numbers["RssAnon"].split()[0]))


@contextlib.contextmanager
def limited(process: int, size: int) -> Iterator[None]:
    """Limit a process's memory, page cache included, if this process may set limits."""
    group = CGROUPS / f"specdec-test-{os.getpid()}"
    with contextlib.suppress(OSError):
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(size))
        (group / "cgroup.procs").write_text(str(process))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def told(path: Path, dtype: WantedDtype) -> int:
    return memory_needed(ModelDirectory(path), Placement(dtype=dtype, kv_tokens=KV_TOKENS), free_bytes("cpu")).total


def peak_of(path: Path, dtype: WantedDtype) -> int:
    """Start a verifier within the estimated memory, generate texts, and return its peak."""
    options = ("--dtype", dtype, "--threads", "1", "--kv-tokens", str(KV_TOKENS))
    common = ("--port", "0", "--stop-with-stdin", "--model", str(path))
    verifier = Child.start("verifier", "-m", "verifier_service", *common, *options)
    children = [verifier]
    process = verifier.process.pid
    with limited(process, int(TOLERANCE * told(path, dtype))), Watch(process) as watch:
        try:
            peers = ("--verifier", verifier.until_ready(READY_SECONDS))
            children.append(Child.start("orchestrator", "-m", "orchestrator", *common, *peers))
            with Client(children[1].until_ready(READY_SECONDS)) as client:
                for prompt, temperature in (("def main(", 0.0), ("a" * 500, 1.0)):
                    result = client.complete(
                        prompt, temperature=temperature, logprobs=5, max_tokens=20, n=4, ignore_end_token=True
                    )
                    assert [len(each.tokens) for each in result.completions] == [20] * 4
        finally:
            stop(children)
    assert watch.peak > 0
    return watch.peak


@pytest.mark.verify
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_draft_is_exported_and_served_within_what_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = model(tmp_path, 151_936, torch.bfloat16, tied=tied)
    placement = Placement("onnx", kv_tokens=DRAFT_KV_TOKENS, is_draft=True)
    most = int(TOLERANCE * memory_needed(ModelDirectory(path), placement, free_bytes("cpu")).total)
    options = ("--port", "0", "--stop-with-stdin", "--model", str(path), "--kv-tokens", str(DRAFT_KV_TOKENS))
    draft = Child.start("draft", "-m", "draft_service", *options)
    with limited(draft.process.pid, most), Watch(draft.process.pid) as watch:
        try:
            draft.until_ready(READY_SECONDS)
        finally:
            stop([draft])
    assert 0 < watch.peak < most


@pytest.mark.verify
def test_a_large_vocabulary_starts_and_serves_within_what_is_told(tmp_path: Path) -> None:
    """This includes the reference check: no result of it is cached for this model."""
    path = model(tmp_path, 151_936, torch.float32, tied=True)
    assert peak_of(path, "auto") < TOLERANCE * told(path, "auto")


@pytest.mark.verify
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("vocabulary", [32_000, 50_257, 151_936, 262_144])
def test_a_first_start_and_its_texts_take_what_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary: int, stored: torch.dtype, tied: bool
) -> None:
    """For weights stored in each dtype: float16 is computed in float32 on CPUs."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    path = model(tmp_path, vocabulary, stored, tied=tied)
    assert peak_of(path, "auto") < TOLERANCE * told(path, "auto")
