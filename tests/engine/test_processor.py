"""Whether the processor has native bfloat16, and its kind, by which libraries choose their kernels."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.engine.processor import CPUINFO, computes_bfloat16, cpu_kind, gpu_kind


@pytest.mark.parametrize(
    ("flags", "found"),
    [("fpu avx512f avx512_bf16 amd_lbr_v2", True), ("fpu amx_tile amx_bf16", True), ("fpu avx2 avx512f", False)],
)
def test_linux_names_the_instructions(tmp_path: Path, flags: str, found: bool) -> None:
    (file := tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: bf16\nflags\t\t: {flags}\n\n")
    assert computes_bfloat16(file, "x86_64") is found


def test_what_cannot_be_asked_is_trusted(tmp_path: Path) -> None:
    assert computes_bfloat16(tmp_path / "none", "x86_64")
    assert computes_bfloat16(CPUINFO, "arm64")


def test_torch_finds_the_same() -> None:
    by_torch = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert computes_bfloat16(CPUINFO, "x86_64") is by_torch


TWO_CORES = "processor\t: 0\nmodel name\t: A CPU\ncpu MHz\t\t: {mhz}\nflags\t\t: {flags}\n\nprocessor\t: 1\n"


def test_processors_with_other_instructions_are_other_kinds(tmp_path: Path) -> None:
    def kind(mhz: int, flags: str) -> str:
        (tmp_path / "cpuinfo").write_text(TWO_CORES.format(mhz=mhz, flags=flags))
        return cpu_kind(tmp_path / "cpuinfo")

    assert kind(2000, "avx2") == kind(3000, "avx2") != kind(2000, "avx2 avx512_vnni")
    assert cpu_kind(tmp_path / "none") == platform.machine()


class Driver:
    """A fake CUDA driver with one device."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        return 0 if index == 0 else 101

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:
        name.value = b"NVIDIA L4"
        return 0


def test_a_gpu_is_named_by_its_driver() -> None:
    assert gpu_kind(0, Driver()) == "NVIDIA-L4"
    assert gpu_kind(1, Driver()) == "unknown"
