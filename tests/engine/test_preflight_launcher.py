"""A verifier started by torchrun is refused: only vLLM splits a target over GPUs."""

from __future__ import annotations

import pytest

from specdec.engine.preflight.device import WORLD_SIZE, check_launcher
from specdec.engine.unsupported import UnsupportedModelError


def test_a_part_of_a_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORLD_SIZE, "4")
    with pytest.raises(
        UnsupportedModelError, match=r"^WORLD_SIZE is 4, .*: leave out torchrun, .* --engine vllm --vllm"
    ):
        check_launcher()


@pytest.mark.parametrize("size", [None, "1"])
def test_a_single_process_is_not(monkeypatch: pytest.MonkeyPatch, size: str | None) -> None:
    monkeypatch.delenv(WORLD_SIZE, raising=False)
    if size is not None:
        monkeypatch.setenv(WORLD_SIZE, size)
    check_launcher()
