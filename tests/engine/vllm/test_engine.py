"""The engine's calls to vLLM, and its handling of errors; vLLM itself is not needed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.engine.kv.blocks import BLOCK
from specdec.engine.memory import free_bytes
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import BYTES
from specdec.engine.unsupported import UnsupportedModelError
from specdec.engine.vllm.engine import SamplingVllmEngine, environment, memory_options, reason_of
from specdec.engine.vllm.layout import BlockPacker
from specdec.engine.vllm.options import MIN_SEQUENCES
from tests.models import CONTEXT, make
from verifier_service.costs.step_latency import MEASURED_ROWS


def test_processes_that_are_started_have_variables_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_TEST_SET", "before")
    monkeypatch.delenv("SPECDEC_TEST_UNSET", raising=False)
    with contextlib.suppress(RuntimeError), environment({"SPECDEC_TEST_SET": "2", "SPECDEC_TEST_UNSET": "3"}):
        assert (os.environ["SPECDEC_TEST_SET"], os.environ["SPECDEC_TEST_UNSET"]) == ("2", "3")
        raise RuntimeError("it does not start")
    assert os.environ["SPECDEC_TEST_SET"] == "before"
    assert "SPECDEC_TEST_UNSET" not in os.environ


def test_memory_is_left_for_the_weights(tmp_path: Path) -> None:
    """Weights are not loaded yet: a file with a header and no content stands in for them."""
    directory = ModelDirectory(make("llama", tmp_path))
    assert memory_options(directory, None, "float32", "cpu", {})["max_model_len"] == CONTEXT
    numbers = 2 * free_bytes("cpu") // BYTES["float32"]  # more than all memory
    size = numbers * BYTES["float32"]
    header = json.dumps({"large": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    with pytest.raises(UnsupportedModelError, match=r"room for a KV cache of \d+ tokens"):
        memory_options(directory, None, "float32", "cpu", {})
    assert memory_options(directory, 16 * BLOCK, "float32", "cpu", {})["num_gpu_blocks_override"] == 16


def test_a_gpu_whose_blocks_are_counted_is_not_profiled(tmp_path: Path) -> None:
    """For profiling, vLLM would try graphs with another KV cache, of up to 32,768 tokens."""
    directory = ModelDirectory(make("llama", tmp_path))
    assert memory_options(directory, 16 * BLOCK, "float32", "cuda", {})["kv_cache_memory_bytes"] > 0
    assert memory_options(directory, None, "float32", "cuda", {}) == {"max_model_len": -1}


class FailedPass(SamplingVllmEngine):
    """An engine in this process whose passes fail."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def _compute_here(self) -> None: ...

    def _start(self, method: str, *given: Any) -> Callable[[], Any]:
        self.called.append(method)
        raise MemoryError


def test_nothing_is_chosen_from_a_pass_that_failed() -> None:
    """The logits of the last good pass are still there, and may have fewer rows."""
    engine = FailedPass()
    with pytest.raises(MemoryError):
        engine.launch(BlockPacker())  # type: ignore[arg-type]
    assert engine.called == ["specdec_step"]


def test_buffers_are_enough_for_what_is_measured_at_start() -> None:
    assert MEASURED_ROWS[-1] <= MIN_SEQUENCES


def test_what_vllm_says_of_memory_names_our_option() -> None:
    out = "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 39.38 GiB"
    assert reason_of(RuntimeError(out)) == ("CUDA out of memory: use fewer --kv-tokens, or --no-cuda-graphs")
    told = "Available memory on node 0 (1/2 GiB) on kv cache allocation is less than requested memory for kv (3 GiB)."
    assert reason_of(ValueError(told)) == f"{told[:-1]}, or use fewer --kv-tokens"
    assert reason_of(ValueError("\nit is broken.\nIn many lines")) == "it is broken."
