"""A draft service whose every forward pass takes at least 50 ms."""

from __future__ import annotations

import time
from typing import Any

from specdec.engine.onnx.engine import OnnxEngine

STEP_SECONDS = 0.05

_forward = OnnxEngine.forward


def _slowly(self: OnnxEngine, batch: Any) -> Any:
    begin = time.monotonic()
    logits = _forward(self, batch)
    time.sleep(max(0.0, begin + STEP_SECONDS - time.monotonic()))
    return logits


if __name__ == "__main__":
    OnnxEngine.forward = _slowly  # type: ignore[method-assign]
    from draft_service.__main__ import main
    from specdec.command_line import run_command

    run_command(main, service="draft")
