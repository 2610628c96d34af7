"""Fixtures. Exporting a graph takes ten seconds, so `make test` exports one graph; the others are left to
`make verify`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models import make

EXPORTED = "gemma2"
"""The architecture whose graph `make test` exports: it has the most parts, windows and caps among them. The padded
engine, whose passes are traced, runs on the others as well."""


@pytest.hookimpl(tryfirst=True)  # before deselection
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            chosen = item.callspec.params
            exports = "onnx_directory" in item.fixturenames or chosen.get("subject") == "onnx"
            if exports and chosen["model"] != EXPORTED:
                item.add_marker(pytest.mark.verify)


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Run torch on one thread: with small matrices on a shared machine, more threads only contend."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def directory(saved_llama: Path, tmp_path: Path) -> Path:
    """A model directory for a test to break."""
    return Path(shutil.copytree(saved_llama, tmp_path / "llama"))
