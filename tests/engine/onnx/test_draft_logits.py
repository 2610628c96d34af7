"""A graph's shortlists equal those of the host. Here the graph runs on the CPU, elsewhere on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.decoding.draft_logits import MAX_DRAFT_LOGITS, shortlists
from specdec.engine.onnx.draft_logits import OnnxDraftLogits
from specdec.engine.onnx.export import shortlists_graph
from specdec.engine.onnx.providers import CPU
from specdec.engine.onnx_runtime import ort


@pytest.mark.parametrize("vocabulary", [40, 1000])
def test_they_are_those_of_rows_in_memory(vocabulary: int) -> None:
    finding = ort.InferenceSession(shortlists_graph().SerializeToString(), providers=[CPU])
    logits = np.random.default_rng(0).normal(0, 3, (7, vocabulary)).astype(np.float32)
    logits[:, 3::7] = logits[:, 3:4]
    logits[1, 5:] = -np.inf
    logits[2, 9] = np.nan
    logits[3, vocabulary - 1] = -np.nan
    logits[4, 9] = np.inf
    logits[5, [8, 20]] = 40.0
    got, rows = OnnxDraftLogits(ort.OrtValue.ortvalue_from_numpy(logits), finding), [6, 5, 4, 3, 2, 1, 0]
    want = shortlists(list(logits[rows]))
    assert got.shortlists(rows).ids.shape[1] == min(vocabulary, MAX_DRAFT_LOGITS)
    finite = want.values > want.values[:, -1:]  # any of the ids tied with the last entry may be listed
    np.testing.assert_array_equal(got.shortlists(rows).values, want.values)
    np.testing.assert_array_equal(got.shortlists(rows).ids[finite], want.ids[finite])
    np.testing.assert_array_equal(got.whole(rows), logits[rows])


def test_a_pass_may_want_no_rows() -> None:
    finding = ort.InferenceSession(shortlists_graph().SerializeToString(), providers=[CPU])
    assert not OnnxDraftLogits(ort.OrtValue.ortvalue_from_numpy(np.zeros((0, 300), np.float32)), finding).whole([])
