"""An engine works again only after a pass with finite logits; then the failed pass's slots are overwritten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.engine.kv.blocks import BLOCK
from specdec.engine.kv.slots import PADDING_SLOT
from specdec.engine.padded.layout import PaddedPacker
from specdec.engine.probe import EngineProbe


class Engine:
    """Its passes give these logits, one after another; it records its calls."""

    def __init__(self, *logits: float) -> None:
        self.capacity = 4 * BLOCK
        self.calls: list[str] = []
        self.overwritten: list[list[int]] = []
        self._logits = iter(logits)

    def packer(self) -> PaddedPacker:
        return PaddedPacker()

    def forward(self, batch: Any) -> NDArray[np.float32]:
        self.calls.append("forward")
        return np.full((1, 8), next(self._logits), np.float32)

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        self.calls.append("copy")
        assert set(source.tolist()) <= {PADDING_SLOT}
        self.overwritten.append(target.tolist())


def test_slots_are_kept_until_a_probe_succeeds() -> None:
    engine = Engine(np.nan, 0.5)
    probe = EngineProbe(engine)  # type: ignore[arg-type]
    probe.pass_failed([BLOCK, BLOCK + 1])
    assert not probe.recovers()
    assert engine.calls == ["forward"]  # the padding slot may hold a NaN, too
    probe.sessions_ended()
    assert probe.recovers()
    assert engine.calls == ["forward", "forward", "copy"]
    assert engine.overwritten == [list(range(BLOCK, 2 * BLOCK))]


def test_an_engine_that_raises_does_not_work() -> None:
    def fail() -> None:
        raise RuntimeError("lost")

    probe = EngineProbe(SimpleNamespace(packer=fail))
    assert not probe.recovers()
