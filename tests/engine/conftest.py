"""To export a graph takes ten seconds: where it has nothing new in it, `make verify` does it."""

from __future__ import annotations

import pytest

EXPORTED_LATER = {"gemma3", "llama", "mistral", "qwen2"}
"""Their parts are in the graphs of gemma2, qwen3 and opt."""


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            chosen = item.callspec.params
            exports = "onnx_directory" in item.fixturenames or chosen.get("subject") == "onnx"
            if exports and chosen.get("model") in EXPORTED_LATER:
                item.add_marker(pytest.mark.verify)
