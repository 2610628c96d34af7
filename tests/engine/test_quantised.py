"""A quantised target runs with its own quantised layers, or is refused on loading, with the reason.

The tests run torchao's int8; transformers looks for the packages of other methods, and names them.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.hf.linear import PackedLinear, is_plain
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.unsupported import UnsupportedModelError
from specdec.v2 import generation_pb2, model_pb2
from tests.margins import Oracle
from tests.models import VOCABULARY, make, near, save
from tests.services.test_equality import slow_target
from tests.stack import stack

OFF = generation_pb2.Speculation(off=True)
ALWAYS = generation_pb2.Speculation(drafters=[model_pb2.DRAFTER_REMOTE], forced=True)

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def int8(llama: Path) -> Path:
    """The model with int8 weights, as written by torchao."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao warns about itself
        from torchao.quantization import Int8WeightOnlyConfig

        quantised = TorchAoConfig(quant_type=Int8WeightOnlyConfig())
        model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16, quantization_config=quantised)
        return save(model, llama.with_name("int8"))


@needs_torchao
class TestTorchao:
    def test_packed_logits_are_the_quantised_models_own(self, int8: Path) -> None:
        engine = CpuEngine(ModelDirectory(int8), capacity=64)
        text = np.random.default_rng(1).integers(3, VOCABULARY, 40).tolist()
        packer = engine.packer()
        rows = packer.add_rows(text, 0, np.arange(1, 41))
        packer.add_path(np.arange(1, 41), rows)
        packer.want(rows[-1])
        (got,) = engine.forward(packer.pack())
        own = AutoModelForCausalLM.from_pretrained(int8, dtype=engine.model.dtype, attn_implementation="eager").eval()
        with torch.inference_mode():
            want = own(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].float().numpy()
        assert np.abs(got - want).max() / np.abs(want).max() < 1e-4

    def test_quantised_layers_stay_what_they_are(self, int8: Path) -> None:
        engine = CpuEngine(ModelDirectory(int8), capacity=64)
        products: Any = engine.model.model.layers[0].mlp
        assert type(products.up_proj) is torch.nn.Linear
        assert type(products.up_proj.weight).__module__.startswith("torchao")
        assert not is_plain(products.up_proj)
        assert "/layers/" in engine.numerics

    async def test_a_draft_changes_no_token(self, llama: Path, int8: Path, tmp_path: Path) -> None:
        """Except at ties: in float32, such layers are not exact. The target is slowed so that candidates arrive in
        time."""
        draft = near(llama, tmp_path / "draft", noise=0.02)
        oracle, accepted = Oracle(int8), 0
        async with stack(int8, draft, capacity=1024, target_delay=slow_target) as services:
            for seed in range(2):
                prompt = np.random.default_rng(seed).integers(3, VOCABULARY, 60).tolist()
                plain = await services.generate(prompt, max_tokens=40, speculation=OFF)
                drafted = await services.generate(prompt, max_tokens=40, speculation=ALWAYS)
                oracle.same(prompt, list(plain.tokens), list(drafted.tokens), RequestSampler(Sampling()), "int8")
                accepted += drafted.finish.speculation.accepted
        assert accepted > 0


class TestRefusals:
    @staticmethod
    def refused(directory: Path, **quantisation: object) -> ModelDirectory:
        """Return the model labelled as quantised."""
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
        return ModelDirectory(directory)

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        return make("llama", tmp_path / "llama")

    @pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is not None, reason="gptqmodel is installed")
    def test_a_package_that_is_missing_is_named(self, model: Path) -> None:
        with pytest.raises(UnsupportedModelError, match=r"llama: quantised by awq, .*: pip install gptqmodel"):
            CpuEngine(self.refused(model, quant_method="awq"), capacity=64)

    def test_an_unknown_method(self, model: Path) -> None:
        with pytest.raises(
            UnsupportedModelError, match="llama: quantised by magic, which transformers does not support"
        ):
            CpuEngine(self.refused(model, quant_method="magic"), capacity=64)

    def test_outliers_of_the_whole_batch(self, model: Path) -> None:
        """LLM.int8 (Dettmers et al. 2022) computes a column differently if any row of the batch is large in it."""
        directory = self.refused(model, quant_method="bitsandbytes", load_in_8bit=True)
        with pytest.raises(UnsupportedModelError, match="would depend on other sessions"):
            CpuEngine(directory, capacity=64)


class TestPlainLayers:
    def test_of_another_class(self) -> None:
        class Linear8(torch.nn.Linear):
            """Like bitsandbytes' layers."""

        assert is_plain(torch.nn.Linear(2, 3))
        assert not is_plain(Linear8(2, 3))
        assert not is_plain(PackedLinear(torch.nn.Linear(16, 16)))

    def test_with_a_function_of_its_own(self) -> None:
        """Like compressed-tensors' layers."""
        layer = torch.nn.Linear(2, 3)
        layer.__dict__["forward"] = lambda x: x
        assert not is_plain(layer)

    def test_with_something_before_its_function(self) -> None:
        layer = torch.nn.Linear(2, 3)
        layer.register_forward_pre_hook(lambda _module, _inputs: None)
        assert not is_plain(layer)
