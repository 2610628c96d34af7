"""A two-rank engine matches the model's own forward pass, with equal bits in any batch; models that cannot be split are
refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from specdec.engine.engine import UnsupportedModelError
from specdec.engine.hf.shards import check_plan
from tests.engine.parts import BRANCH, Case, branch, run_all, text
from tests.models import make
from tests.ranks import launched

pytest.importorskip("accelerate", reason="transformers cuts models with it: specdec-serve[parallel]")

TOLERANCE = 1e-4
"""Relative to the largest logit. Float32 rounding is about 1e-6 of it, a wrong shard more than 1e-2."""

UNEVEN: dict[str, Any] = {"vocab_size": 323, "intermediate_size": 97, "attention_bias": True, "mlp_bias": True}
"""One rank has one more of everything than the other; and biases must be added once."""

WIDE: dict[str, Any] = {"intermediate_size": 128}
"""torch's activations round differently in the remainder of a row beyond whole vectors."""

MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama": ("llama", UNEVEN, False),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}, False),
    "gemma2": ("gemma2", WIDE, True),
    "gpt2": ("gpt2", {}, False),
}
"""(architecture, changed fields, padded batches) by name. For gpt2, transformers has no tensor-parallel plan."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make(kind, root / name, **own) for name, (kind, own, _) in MODELS.items()}


def run_in(parts: int, cases: list[Case], root: Path) -> dict[str, dict[str, Any]]:
    """Return the results of `parts` ranks by model."""
    with launched(parts, root / "logs", run_all, cases, root) as ranks:
        codes = ranks.exit_codes()
        assert codes == [0] * parts, "".join(map(ranks.said, range(parts)))
    return {case.name: dict(np.load(root / f"{case.name}.npz")) for case in cases}


@pytest.fixture(scope="module")
def results(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = [Case(name, directory, padded=MODELS[name][2]) for name, directory in directories.items()]
    return run_in(2, cases, tmp_path_factory.mktemp("results"))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt2"])
def test_the_logits_are_the_models(name: str, directories: dict[str, Path], results: dict[str, dict[str, Any]]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directories[name], dtype=torch.float32)
    tokens = text()
    with torch.inference_mode():
        whole, side = (
            model.eval()(input_ids=torch.tensor([each]), use_cache=False).logits[0].numpy()
            for each in (tokens, tokens[:-BRANCH] + branch())
        )
    found = results[name]
    wanted = {"whole": whole, "crowded": whole[:-1], "branched": side[-BRANCH:], "alone": whole[-1:]}
    for way, want in wanted.items():
        assert found[way].shape == want.shape
        difference = np.abs(found[way] - want).max() / np.abs(want).max()
        assert difference < TOLERANCE, f"{way}: off by {difference:.2g} of the largest logit"


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt2"])
def test_rank_0_has_the_hidden_states(
    name: str, directories: dict[str, Path], results: dict[str, dict[str, Any]]
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directories[name], dtype=torch.float32)
    with torch.inference_mode():
        base = model.eval().base_model(input_ids=torch.tensor([text()]), use_cache=False)
    want, found = base.last_hidden_state[0].numpy(), results[name]
    assert found["hidden"].shape == want.shape
    assert np.abs(found["hidden"] - want).max() < TOLERANCE * np.abs(want).max()
    assert np.array_equal(found["beside"], found["whole"])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt2"])
def test_exact_in_parts(name: str, results: dict[str, dict[str, Any]]) -> None:
    found = results[name]
    assert "parallel-2" in str(found["numerics"]).split("/")
    if not found["exact"]:
        pytest.skip(f"{found['numerics']}: the check at start found that rows depend on their batch here")
    assert np.array_equal(found["crowded"], found["whole"][:-1])
    assert np.array_equal(found["alone"], found["whole"][-1:])


def test_exact_in_four_parts(tmp_path: Path) -> None:
    """With more than two ranks a collective's sums are not exact: their order depends on the position in the tensor."""
    directory = make("llama", tmp_path / "model", num_key_value_heads=4, intermediate_size=256)
    found = run_in(4, [Case("llama", directory)], tmp_path)["llama"]
    if not found["exact"]:
        pytest.skip(f"{found['numerics']}: the check at start found that rows depend on their batch here")
    assert np.array_equal(found["crowded"], found["whole"][:-1])
    assert np.array_equal(found["alone"], found["whole"][-1:])


def test_what_has_no_plan_is_refused(results: dict[str, dict[str, Any]]) -> None:
    """By all ranks together, which continue with the next model; rank 0 gives the reason."""
    assert str(results["gpt2"]["refusal"]) == "gpt2: transformers has no tensor parallel plan for gpt2"


@pytest.mark.parametrize(
    ("configuration", "degree", "reason"),
    [
        (transformers.LlamaConfig(hidden_size=96, num_attention_heads=6), 4, "6 attention heads"),
        (transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=2), 4, "2 key/value heads"),
        (transformers.MixtralConfig(), 2, "moe_tp_experts"),
        (transformers.OPTConfig(), 2, "no tensor parallel plan"),
        (transformers.LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4}), 2, "quantised"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_by_configuration(configuration: Any, degree: int, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_plan("it", configuration, degree)


def test_what_can_be_cut_is_not_refused() -> None:
    check_plan("it", transformers.Qwen3Config(num_attention_heads=8, num_key_value_heads=4), 4)
