"""Padded batches have one mask for all layers with a sliding window."""

from __future__ import annotations

import pytest
import torch

from specdec.engine.hf.pretrained import LayerAttention
from specdec.engine.padded.backend import PaddedBackend
from specdec.engine.unsupported import UnsupportedModelError


def backend(*windows: int | None) -> PaddedBackend:
    layers = [LayerAttention(1, 1, 4, 4, 1.0, window) for window in windows]
    return PaddedBackend(layers, 2, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("windows", "window"), [([None, None], None), ([None, 8, 8], 8)])
def test_layers_share_the_window(windows: list[int | None], window: int | None) -> None:
    assert backend(*windows).packer(None).window == window


def test_windows_of_several_sizes_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="sliding windows of 8 to 24 tokens"):
        backend(8, None, 24)
