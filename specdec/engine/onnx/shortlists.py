"""Shortlists of logits that ONNX Runtime left on its device: a small graph finds them there, and the host gets them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from specdec.decoding.draft_logits import Shortlists, shortlists
from specdec.decoding.processing import Logits


class OnnxDraftLogits:
    """The wanted rows of a pass as float32 logits [n, V] on the device, and what the graph `finding` says of them."""

    def __init__(self, logits: ort.OrtValue, finding: ort.InferenceSession) -> None:
        self._logits = logits
        binding = finding.io_binding()
        binding.bind_ortvalue_input("logits", logits)
        for name in ("values", "ids", "broken"):
            binding.bind_output(name, "cpu")
        finding.run_with_iobinding(binding)
        values, ids, broken = (output.numpy() for output in binding.get_outputs())
        self._shortlists = Shortlists(values, ids)
        for row in np.flatnonzero(broken).tolist():  # what TopK does with NaN is undefined
            (found,) = zip(*shortlists(self.whole([row])), strict=True)
            values[row], ids[row] = found

    def shortlists(self, rows: Sequence[int]) -> Shortlists:
        own = np.asarray(rows, dtype=np.int64)
        return Shortlists(self._shortlists.values[own], self._shortlists.ids[own])

    def whole(self, rows: Sequence[int]) -> Sequence[Logits]:
        return [self._on_host[row] for row in rows]

    @cached_property
    def _on_host(self) -> NDArray[np.float32]:
        """All rows, copied when the first is needed: ONNX Runtime copies no part of a value."""
        return np.asarray(self._logits.numpy())
