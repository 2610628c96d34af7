"""A draft's logits on ONNX Runtime's device, with shortlists that a small graph computes there for the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.draft_logits import Shortlists, shortlists
from specdec.decoding.processing import Logits
from specdec.engine.onnx_runtime import ort


class OnnxDraftLogits:
    """The wanted rows of a pass as float32 logits [n, V] on the device, and shortlists computed by the graph
    `finding`."""

    def __init__(self, logits: ort.OrtValue, finding: ort.InferenceSession) -> None:
        self._logits = logits
        binding = finding.io_binding()
        binding.bind_ortvalue_input("logits", logits)
        for name in ("values", "ids", "broken"):
            binding.bind_output(name, "cpu")
        finding.run_with_iobinding(binding)
        values, ids, broken = (output.numpy() for output in binding.get_outputs())
        self._shortlists = Shortlists(values, ids)
        for row in np.flatnonzero(broken).tolist():  # TopK's behaviour with NaN is undefined
            (found,) = zip(*shortlists(self.whole([row])), strict=True)
            values[row], ids[row] = found

    def shortlists(self, rows: Sequence[int]) -> Shortlists:
        return self._shortlists.of(rows)

    def whole(self, rows: Sequence[int]) -> Sequence[Logits]:
        return [self._on_host[row] for row in rows]

    @cached_property
    def _on_host(self) -> NDArray[np.float32]:
        """All rows, copied on first use, since ONNX Runtime cannot copy a part of a value."""
        return np.asarray(self._logits.numpy())
