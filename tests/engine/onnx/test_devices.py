"""The ONNX engine computes on the requested device in the requested dtype, or refuses at start with the reason.

In float16, results are compared with the model's own float32 forward pass, within float16 rounding.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from specdec.decoding.draft_logits import shortlists
from specdec.engine.batch import Packer
from specdec.engine.engine import draft_pass_of
from specdec.engine.engines.loading import load_engine
from specdec.engine.hf.reference_check import ReferenceCheck
from specdec.engine.kv.slots import KVPool
from specdec.engine.memory import free_by_driver, free_bytes
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.onnx.draft_logits import OnnxDraftLogits
from specdec.engine.onnx.engine import OnnxEngine
from specdec.engine.onnx.export import export
from specdec.engine.onnx.providers import CPU, CUDA, OnnxDevice, check_started, parse_device, providers
from specdec.engine.onnx_runtime import ort
from specdec.engine.placement import Placement
from specdec.engine.unsupported import UnsupportedModelError
from tests.models import make, save

HALF_TOLERANCE = 0.03
"""Error relative to the largest logit: float16 has 11 bits, and 0.005 was measured."""


def has_driver() -> bool:
    try:
        return free_bytes("cuda") > 0
    except UnsupportedModelError:
        return False


HAS_PROVIDER = CUDA in ort.get_available_providers()
QUIETLY = ("--port", "0", "--log-level", "error")
without_cuda = pytest.mark.skipif(HAS_PROVIDER, reason="this onnxruntime has a CUDA provider")
with_cuda = pytest.mark.skipif(
    not (HAS_PROVIDER and has_driver()), reason="needs onnxruntime-gpu and a GPU: no CUDA provider here"
)
"""Used instead of the mark `gpu`, which asks torch: ONNX Runtime needs a GPU, but no CUDA build of torch."""

TEXT = [int(token) for token in np.random.default_rng(1).integers(3, 320, 60)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models") / "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def half(llama: Path) -> Path:
    """The model exported in float16."""
    target = llama.with_name("half")
    export(ModelDirectory(llama), target, "float16")
    return target


class TestProviders:
    def test_devices(self) -> None:
        assert parse_device("cpu") == ("cpu", 0)
        assert parse_device("cuda") == ("cuda", 0)
        assert parse_device("cuda:3") == ("cuda", 3)

    @pytest.mark.parametrize("device", ["", "cuda:", "cuda:x", "cpu:1", "mps", "cuda:1:2"])
    def test_no_devices(self, device: str) -> None:
        with pytest.raises(UnsupportedModelError, match="the ONNX engine supports cpu, cuda"):
            parse_device(device)

    def test_the_cpu_alone_even_beside_a_gpu(self) -> None:
        assert providers(OnnxDevice("cpu", 0), [CUDA, CPU]) == [(CPU, {})]

    def test_cuda_before_the_cpu(self) -> None:
        (first, options), second = providers(OnnxDevice("cuda", 2), ["Other", CPU, CUDA])
        assert (first, options["device_id"], second) == (CUDA, "2", (CPU, {}))

    def test_cuda_is_not_built_in(self) -> None:
        with pytest.raises(
            UnsupportedModelError, match=r"no CUDAExecutionProvider: replace onnxruntime with onnxruntime-gpu"
        ):
            providers(OnnxDevice("cuda", 0), [CPU])

    def test_cuda_did_not_start(self) -> None:
        """onnxruntime falls back to the CPU with only a log line."""
        check_started(OnnxDevice("cuda", 0), [CUDA, CPU])
        check_started(OnnxDevice("cpu", 0), [CPU])
        with pytest.raises(UnsupportedModelError, match="cuda:1: onnxruntime could not start"):
            check_started(OnnxDevice("cuda", 1), [CPU])


class TestWithoutCuda:
    @without_cuda
    def test_it_is_refused_before_anything_is_exported(
        self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(UnsupportedModelError, match=r"specdec-serve\[draft-gpu\]"):
            load_engine(ModelDirectory(llama), Placement("onnx", device="cuda", kv_tokens=64), threads=(1,))
        assert not list(tmp_path.iterdir())

    @without_cuda
    def test_a_draft_service_says_so_in_one_line(self, llama: Path) -> None:
        ended = subprocess.run(
            [sys.executable, "-m", "draft_service", "--model", llama, "--device", "cuda:1", *QUIETLY],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert ended.returncode == 1
        assert "ready" not in ended.stdout
        (line,) = ended.stderr.strip().splitlines()
        assert "device cuda:1" in line


class TestFloat16:
    def test_logits_after_chunks_and_a_copy(self, llama: Path, half: Path) -> None:
        """On the CPU, onnxruntime computes most operations in float32, with rounded inputs and outputs."""
        engine = load_engine(ModelDirectory(half), Placement("onnx", kv_tokens=256), threads=(1,))
        check_text(engine, llama)
        assert "/CPUExecutionProvider/" in engine.numerics
        assert "/float16/" in engine.numerics

    def test_another_dtype_than_the_exports_is_refused(self, half: Path) -> None:
        with pytest.raises(ModelDirectoryError, match=r"exported in float16, not float32; run `specdec export --dtype"):
            load_engine(ModelDirectory(half), Placement("onnx", "float32", kv_tokens=64), threads=(1,))

    def test_no_bfloat16(self, half: Path) -> None:
        with pytest.raises(UnsupportedModelError, match="float32 and float16, not bfloat16"):
            load_engine(ModelDirectory(half), Placement("onnx", "bfloat16", kv_tokens=64), threads=(1,))

    def test_a_model_that_overflows_is_refused(self, llama: Path, tmp_path: Path) -> None:
        """This is typical of models trained in bfloat16, which has float32's range."""
        model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight *= 1e6
        large = save(model, tmp_path / "large")
        with pytest.raises(UnsupportedModelError, match="not finite in float16, with a maximum of 65504"):
            export(ModelDirectory(large), tmp_path / "exported", "float16")
        assert not (tmp_path / "exported").exists()
        ReferenceCheck.of(model, ModelDirectory(large))  # finite in float32


class TestCuda:
    @with_cuda
    def test_logits_after_chunks_and_a_copy(self, llama: Path, half: Path) -> None:
        engine = OnnxEngine(ModelDirectory(half), capacity=256, threads=1, device="cuda")
        check_text(engine, llama)
        assert "/CUDAExecutionProvider/" in engine.numerics

    @with_cuda
    def test_a_draft_s_pass_has_the_shortlists_of_its_logits(self, half: Path) -> None:
        engine = OnnxEngine(ModelDirectory(half), capacity=256, threads=1, device="cuda")
        packer, again = packed(engine, 0, TEXT[:9], np.arange(1, 10)), packed(engine, 0, TEXT[:9], np.arange(1, 10))
        want = shortlists(list(engine.forward(packer.pack())))
        got = draft_pass_of(engine)(again.pack())
        assert isinstance(got, OnnxDraftLogits)
        np.testing.assert_array_equal(got.shortlists([0]).values, want.values)

    @with_cuda
    def test_memory_is_sized_by_the_device(self, half: Path) -> None:
        assert OnnxEngine(ModelDirectory(half), capacity=None, threads=1, device="cuda:0").capacity >= 512


def check_text(engine: Any, directory: Path) -> None:
    """Compare with the model's own forward pass: a prompt in two chunks, then, moved by one slot, one more token."""
    pool = KVPool(256)
    slots = pool.take(len(TEXT) + 1)
    for start, end in ((0, 31), (31, 59)):
        got = forward(engine, start, TEXT[start:end], slots[:end])
        assert difference(got, own_logits(directory, TEXT[:end])) < HALF_TOLERANCE
    engine.copy(slots[:59], slots[1:60])
    got = forward(engine, 59, TEXT[59:], slots[1:61])
    assert difference(got, own_logits(directory, TEXT)) < HALF_TOLERANCE


def forward(engine: Any, start: int, tokens: list[int], slots: NDArray[np.int64]) -> NDArray[np.float32]:
    (got,) = engine.forward(packed(engine, start, tokens, slots).pack())
    assert got.dtype == np.float32
    return np.asarray(got)


def packed(engine: Any, start: int, tokens: list[int], slots: NDArray[np.int64]) -> Packer:
    packer: Packer = engine.packer()
    rows = packer.add_rows(tokens, start, slots[start:])
    packer.add_path(slots, rows)
    packer.want(rows[-1])
    return packer


def own_logits(directory: Path, text: list[int]) -> NDArray[np.float32]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return np.asarray(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].numpy())


def difference(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


class Driver:
    """A fake CUDA driver with free memory of two devices."""

    FREE = (3 << 30, 5 << 30)

    def __init__(self, status: int = 0) -> None:
        self.current: list[int] = []
        self.retained: list[int] = []
        self._status = status  # of a query of the free memory

    def cuInit(self, _flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index + 10
        return 0 if index < len(self.FREE) else 101  # CUDA_ERROR_INVALID_DEVICE

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = device.value + 100
        self.retained.append(device.value)
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        self.retained.remove(device.value)
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.current.append(context.value)
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        free._obj.value = self.FREE[self.current[-1] - 110]
        total._obj.value = 80 << 30
        return self._status

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        context._obj.value = self.current.pop()
        return 0


def test_free_memory_of_a_device_without_torch() -> None:
    driver = Driver()
    assert free_by_driver(driver, 1) == 5 << 30
    assert driver.current == driver.retained == []
    with pytest.raises(UnsupportedModelError, match="cuda:7: the CUDA driver's cuDeviceGet failed with status 101"):
        free_by_driver(driver, 7)


def test_a_device_without_an_answer_keeps_no_context() -> None:
    driver = Driver(status=999)  # CUDA_ERROR_UNKNOWN
    with pytest.raises(UnsupportedModelError, match="cuda:1: the CUDA driver's cuMemGetInfo_v2 failed with status 999"):
        free_by_driver(driver, 1)
    assert driver.current == driver.retained == []
