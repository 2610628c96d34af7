"""Whether the processor has native bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.engine.processor import CPUINFO, computes_bfloat16


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
