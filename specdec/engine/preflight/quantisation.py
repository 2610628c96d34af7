"""Supported methods of quantising weights. transformers runs them, each with its own packages.

Only torchao's method is tested here. docs/which-models-run.md has this table.
"""

from __future__ import annotations

from typing import NamedTuple

from specdec.engine.model_directory import ModelDirectory
from specdec.engine.preflight.device import installed
from specdec.engine.unsupported import UnsupportedModelError


class Method(NamedTuple):
    """A quantisation method known to transformers."""

    packages: dict[str, str]
    """Module -> pip requirement."""
    gpu: bool = False
    """True if its kernels run on GPUs only."""
    refused: str | None = None
    note: str = ""


ACCELERATE = {"accelerate": "accelerate"}
WIDENED = "on CPUs transformers computes with the weights in bfloat16"

METHODS: dict[str, Method] = {
    "aqlm": Method({"aqlm": "aqlm[gpu,cpu]", **ACCELERATE}),
    "auto-round": Method({"auto_round": "auto-round"}),
    "awq": Method({"gptqmodel": "gptqmodel", **ACCELERATE}),
    "bitnet": Method(ACCELERATE),
    "bitsandbytes": Method({"bitsandbytes": "bitsandbytes", **ACCELERATE}, note="8 bits: llm_int8_threshold 0 only"),
    "compressed-tensors": Method({"compressed_tensors": "compressed-tensors"}),
    "eetq": Method({}, refused="transformers downloads its kernels from a hub; specdec runs no downloaded code"),
    "fbgemm_fp8": Method({"fbgemm_gpu": "fbgemm-gpu", **ACCELERATE}, gpu=True),
    "fouroversix": Method({"fouroversix": "fouroversix"}),
    "fp8": Method(ACCELERATE, note=WIDENED),
    "fp_quant": Method({"fp_quant": "fp_quant"}, gpu=True),
    "gemma": Method({}),
    "gguf": Method({}, refused="give the GGUF file itself, which is converted"),
    "gptq": Method({"gptqmodel": "gptqmodel", "optimum": "optimum"}),
    "higgs": Method({"flute": "flute-kernel", "fast_hadamard_transform": "fast-hadamard-transform"}, gpu=True),
    "hqq": Method({"hqq": "hqq"}),
    "metal": Method({}, note="its kernels are Apple's: elsewhere transformers dequantises the weights"),
    "mxfp4": Method(ACCELERATE, note=WIDENED),
    "mxfp8": Method(ACCELERATE, note=WIDENED),
    "nvfp4": Method({}, refused="transformers cannot load weights already quantised this way"),
    "quanto": Method({"optimum.quanto": "optimum-quanto", **ACCELERATE}),
    "quark": Method({"quark": "amd-quark"}),
    "sinq": Method({"sinq": "sinq"}),
    "spqr": Method({"spqr_quant": "spqr_quant[gpu]", **ACCELERATE}, gpu=True),
    "torchao": Method({"torchao": "torchao"}, note="tested, with int8"),
    "vptq": Method({"vptq": "vptq", **ACCELERATE}, gpu=True),
}
"""`quant_method` of quantization_config -> its requirements."""


def quantised_by(directory: ModelDirectory) -> str | None:
    """Return the quantisation method of a model's weights; None if they are not quantised."""
    quantisation = directory.quantisation
    return None if quantisation is None else str(quantisation.get("quant_method"))


def check_quantisation(directory: ModelDirectory, device: str) -> None:
    """Raise UnsupportedModelError, naming the method, if a model's quantised weights cannot run here."""
    name = quantised_by(directory)
    if name is None:
        return
    subject = f"{directory.name}: quantised by {name}"
    method = METHODS.get(name)
    if method is None:
        raise UnsupportedModelError(f"{subject}, which transformers does not support; it supports {', '.join(METHODS)}")
    if method.refused is not None:
        raise UnsupportedModelError(f"{subject}: {method.refused}")
    check_outliers(directory)
    if method.gpu and device == "cpu":
        raise UnsupportedModelError(f"{subject}, which runs only on GPUs: use --device cuda")
    missing = [requirement for module, requirement in method.packages.items() if not installed(module)]
    if missing:
        raise UnsupportedModelError(
            f"{subject}, which needs more packages: pip install {' '.join(map(_quoted, missing))}"
        )


def check_outliers(directory: ModelDirectory) -> None:
    """Raise UnsupportedModelError for 8-bit weights whose products depend on the whole batch."""
    quantisation = directory.quantisation or {}
    if quantisation.get("load_in_8bit") and quantisation.get("llm_int8_threshold", 6.0):
        raise UnsupportedModelError(
            f"{directory.name}: bitsandbytes' 8-bit mode detects outliers over the whole batch, so a session's "
            "tokens would depend on other sessions (llm_int8_threshold 0 turns this off)"
        )


def _quoted(requirement: str) -> str:
    return f"'{requirement}'" if "[" in requirement else requirement
