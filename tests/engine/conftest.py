"""Exporting a graph takes ten seconds: graphs without new parts are left to `make verify`."""

from __future__ import annotations

import pytest

EXPORTED_LATER = {"gemma3", "llama", "mistral", "qwen2"}
"""Their parts occur in the graphs of gemma2, qwen3 and opt."""


@pytest.hookimpl(tryfirst=True)  # before deselection
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            chosen = item.callspec.params
            exports = "onnx_directory" in item.fixturenames or chosen.get("subject") == "onnx"
            if exports and chosen.get("model") in EXPORTED_LATER:
                item.add_marker(pytest.mark.verify)
