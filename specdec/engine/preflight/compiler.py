"""Checks that vLLM can compile a model here (`--compile`): on a CPU, with a C++ compiler."""

from __future__ import annotations

import os
import shutil

from specdec.engine.placement import Placement
from specdec.engine.unsupported import UnsupportedModelError

INSTALLS = "TORCH_INDUCTOR_INSTALL_GXX"
"""Environment variable that allows torch to install a compiler if it finds none."""


def check_compiler(placement: Placement) -> None:
    """Raise UnsupportedModelError if a model is to be compiled and cannot be here."""
    if not placement.compiled:
        return
    if placement.kind != "vllm":
        raise UnsupportedModelError(
            f"--compile is for --engine vllm, not for {placement.kind}: leave out --compile, or use --engine vllm"
        )
    if placement.device != "cpu":
        raise UnsupportedModelError(f"--compile is for the CPU, not for device {placement.device}: leave out --compile")
    compiler = os.environ.get("CXX") or "g++"  # torch's search order
    if shutil.which(compiler) is None and not os.environ.get(INSTALLS):
        raise UnsupportedModelError(
            f"--compile: there is no C++ compiler {compiler} here: install g++, set CXX to another one, or leave out "
            "--compile"
        )
