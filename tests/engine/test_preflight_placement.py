"""A model's requirements are checked before torch is imported; refusals have a name, a value and a remedy."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from specdec.engine.memory import free_on_host
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.placement import Kind, Placement
from specdec.engine.preflight import architectures
from specdec.engine.preflight.check import Wanted, check, check_memory
from specdec.engine.preflight.device import check_cuda
from specdec.engine.preflight.memory_needed import memory_needed
from specdec.engine.preflight.quantisation import METHODS
from specdec.engine.unsupported import UnsupportedModelError
from specdec.engine.working_memory import ATTENTION_BYTES, ATTENTION_COPIES
from tests.models import make

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "demo"


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies the demo's target with other fields in its configuration."""

    def make(**fields: Any) -> Path:
        folder = Path(shutil.copytree(DEMO / "target", tmp_path / "model"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    return make


def test_the_table_holds_every_architecture_of_transformers() -> None:
    groups = [architectures.TESTED, architectures.RAN, architectures.UNTRIED, frozenset(architectures.REFUSED)]
    assert sum(map(len, groups)) == len(frozenset().union(*groups))
    assert frozenset().union(*groups) == frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_the_table_holds_every_method_of_quantisation() -> None:
    known = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZER_MAPPING}
    assert known == METHODS.keys()


def test_the_page_has_the_tables() -> None:
    page = (ROOT / "docs" / "which-models-run.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for reason, names in architectures.REASONS.items():
        (row,) = (each for each in rows if reason in each)
        assert set(re.findall(r"`([\w-]+)`", row)) == set(names.split())
    for group in (architectures.TESTED, architectures.RAN, architectures.UNTRIED):
        assert any(set(re.findall(r"`([\w-]+)`", row)) >= group for row in rows)
    for name, method in METHODS.items():
        (row,) = (each for each in rows if each.startswith(f"| `{name}` |"))
        assert all(part in row for part in (*method.packages.values(), method.refused or method.note))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "mamba"}, "architecture mamba is not supported: it does not use transformers' attention"),
        ({"model_type": "gpt_oss"}, "its attention has sinks"),
        ({"model_type": "t5"}, "architecture t5 .* is not a causal language model"),
        ({"model_type": 3}, "model_type is 3, must be a string"),
        ({"attention_chunk_size": 8}, "chunked attention is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}, "rope_parameters": None}, "longrope rotary embeddings"),
        ({"quantization_config": {"quant_method": "magic"}}, "quantised by magic, which transformers does not support"),
        ({"quantization_config": {"quant_method": "nvfp4"}}, "quantised by nvfp4: transformers cannot load weights"),
        (
            {"quantization_config": {"quant_method": "eetq"}},
            "quantised by eetq: transformers downloads its kernels from a hub",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by awq, .* pip install gptqmodel"),
        ({"vocab_size": 100}, "must have 100, vocab_size in config.json"),
    ],
)
def test_a_model_that_cannot_run_is_refused(configured: Callable[..., Path], fields: Any, said: str) -> None:
    with pytest.raises((ModelDirectoryError, UnsupportedModelError), match=said):
        check(Wanted(configured(**fields)))


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (Placement(device="abacus"), "device abacus: cpu, cuda and cuda:N are supported"),
        (Placement(dtype="float16"), "dtype float16: is for GPUs"),
        (Placement("onnx", dtype="bfloat16"), "dtype bfloat16: the ONNX engine"),
        (Placement(kv_tokens=1 << 31), "tokens of keys and values.* free: use fewer --kv-tokens"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(placement: Placement, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        check(Wanted(DEMO / "target", placement))


@pytest.mark.parametrize(
    ("placement", "remedy"),
    [
        (Placement(dtype="float32"), "use --dtype bfloat16"),
        (Placement("vllm", dtype="float32"), "use --dtype bfloat16"),
        (Placement(dtype="float32", weights="int8"), "use a smaller model"),
        (Placement("onnx"), "use a smaller model"),  # it refuses bfloat16
        (Placement(dtype="bfloat16"), "use a smaller model"),
    ],
)
def test_only_weights_that_bfloat16_shrinks_are_recommended_to_use_it(placement: Placement, remedy: str) -> None:
    assert memory_needed(ModelDirectory(DEMO / "target"), placement).remedy == remedy


def test_bfloat16_is_not_recommended_for_a_quantised_checkpoint(configured: Callable[..., Path]) -> None:
    directory = ModelDirectory(configured(quantization_config={"quant_method": "torchao"}))
    assert memory_needed(directory, Placement(dtype="float32")).remedy == "use a smaller model"


@pytest.mark.parametrize(("hip", "kind"), [(None, "CPU"), ("7.1", "ROCm")])
def test_a_torch_that_cannot_use_the_device_is_named(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, kind: str
) -> None:
    build = {"__version__": "2.13.0", "cuda": None, "hip": hip}
    monkeypatch.setattr("specdec.engine.preflight.device.torch_build", lambda: build)
    reason = f"^device cuda: torch 2.13.0 is a {kind} build: install a CUDA build$"
    with pytest.raises(UnsupportedModelError, match=reason):
        check_cuda(Placement(device="cuda"), 0)


def test_the_demo_pair_passes_on_one_machine() -> None:
    target, draft = check(Wanted(DEMO / "target"), Wanted(DEMO / "draft", Placement("onnx")))
    assert (target.path, draft.path) == (DEMO / "target", DEMO / "draft")


def test_memory_is_that_of_the_weights_in_the_dtype_and_of_the_tokens() -> None:
    """And of the output head in float32: the demo's head is tied to its embeddings, so that this is a copy."""
    directory = ModelDirectory(DEMO / "target")
    wide, narrow = (memory_needed(directory, Placement(dtype=dtype)) for dtype in ("float32", "bfloat16"))
    more = memory_needed(directory, Placement(dtype="float32", kv_tokens=1024))
    head = directory.vocabulary * directory.config["hidden_size"] * 4
    assert wide.weights - head == 2 * (narrow.weights - head) > 0
    assert wide.kv == 2 * narrow.kv == more.kv // 2 > 0
    assert wide.total == wide.process + wide.weights + wide.working + wide.kv
    beside = memory_needed(directory, Placement(dtype="float32", beside=True))
    assert beside.total == wide.total - wide.process


def test_attention_on_a_gpu_needs_the_same_memory_for_any_text() -> None:
    """16,384 partials: for each query head a weighted sum of values and two more numbers."""
    directory = ModelDirectory(DEMO / "target")
    heads, hidden = (directory.config[name] for name in ("num_attention_heads", "hidden_size"))
    kinds: dict[Kind, int] = {"torch": 16_384, "eager": 0}
    for kind, partials in kinds.items():
        for tokens in (None, 1 << 20):
            needed = memory_needed(directory, Placement(kind, dtype="bfloat16", device="cuda", kv_tokens=tokens))
            assert needed.working == partials * (hidden + 2 * heads) * 4


def test_attention_of_an_exported_model_is_limited(tmp_path: Path) -> None:
    directory = ModelDirectory(make("llama", tmp_path / "long", max_position_embeddings=1 << 20))
    sizes = [
        memory_needed(directory, Placement("onnx", kv_tokens=tokens)).working
        for tokens in (512, 1024, 1 << 19, 1 << 20)
    ]
    assert sizes[0] < sizes[1] < sizes[2] == sizes[3] < sizes[0] + ATTENTION_COPIES * ATTENTION_BYTES


def test_a_head_of_its_own_takes_what_float32_is_more(tmp_path: Path) -> None:
    fields = {"vocab_size": 1000, "tie_word_embeddings": False}
    directory = ModelDirectory(make("llama", tmp_path / "untied", **fields))
    wide, narrow = (memory_needed(directory, Placement(dtype=dtype)).weights for dtype in ("float32", "bfloat16"))
    table = 1000 * directory.config["hidden_size"]
    assert narrow == wide // 2 + 2 * table


def test_more_memory_is_told_as_more_keys_values_and_sessions(tmp_path: Path) -> None:
    """Up to the free memory, if the minimum fits."""
    directory = ModelDirectory(make("llama", tmp_path / "wide", vocab_size=100_000, max_position_embeddings=4096))
    least = memory_needed(directory, Placement()).total
    told = [memory_needed(directory, Placement(), free) for free in range(2 * least, 20 * least, least)]
    assert [each.total for each in told] == sorted(each.total for each in told)
    assert all(each.total <= free for each, free in zip(told, range(2 * least, 20 * least, least), strict=True))
    few, many = (memory_needed(directory, Placement(sessions=count), 20 * least) for count in (1, 512))
    assert few.working < many.working


def test_what_vllm_puts_on_gpus_is_its_own_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may split a target over GPUs, and quantise it while loading."""
    monkeypatch.setattr("specdec.engine.preflight.check.free_bytes", lambda device: 1)
    directory = ModelDirectory(DEMO / "target")
    check_memory([Wanted(directory.path, Placement("vllm", device="cuda"))], [directory])
    for placement in (Placement("torch", device="cuda"), Placement("vllm")):
        with pytest.raises(UnsupportedModelError, match="free"):
            check_memory([Wanted(directory.path, placement)], [directory])


@pytest.mark.parametrize(
    ("version", "membership", "files"),
    [
        (2, "0::/a\n", {"memory.max": "3000", "memory.current": "2000"}),
        (1, "4:memory:/a\n", {"memory.limit_in_bytes": "3000", "memory.usage_in_bytes": "2000"}),
        (
            1,
            "4:memory:/a\n",
            {
                "memory.limit_in_bytes": "3000",
                "memory.usage_in_bytes": "2000",
                "memory.stat": "inactive_file 1\nactive_file 1\ntotal_inactive_file 200\ntotal_active_file 300\n",
            },
        ),
    ],
    ids=["version 2", "version 1", "version 1 with subgroups"],
)
def test_the_limits_of_cgroups_hold(tmp_path: Path, version: int, membership: str, files: dict[str, str]) -> None:
    """Cached files count as free, whether they were read once or more often."""
    folder = tmp_path / "mount" / ("memory" if version == 1 else "") / "a"
    folder.mkdir(parents=True)
    (tmp_path / "self").write_text(membership)
    for name, text in ({"memory.stat": "inactive_file 200\nactive_file 300\n"} | files).items():
        (folder / name).write_text(text)
    assert free_on_host(tmp_path / "mount", tmp_path / "self") == 1500
