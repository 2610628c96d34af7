"""The torch noise equals the NumPy noise: equal words, and Gumbel values equal to an ulp."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding import noise
from specdec.engine.gpu import noise as torch_noise
from tests.choices import gumbel, words


def signed(seed: int, position: int) -> torch.Tensor:
    return torch.from_numpy(np.array([noise.stream(seed, position)], dtype=np.uint64).view(np.int64))


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**31), ids=st.lists(st.integers(0, 2**31), max_size=64))
def test_words_are_identical(seed: int, position: int, ids: list[int]) -> None:
    want = words(seed, position, np.asarray(ids, dtype=np.int64))
    got = torch_noise.token_words(signed(seed, position), torch.tensor(ids, dtype=torch.int64))
    assert got.numpy().view(np.uint64).tolist() == want.tolist()


def test_gumbel_values_agree() -> None:
    ids = np.arange(50_000)
    got = torch_noise.gumbel(signed(123, 45), torch.from_numpy(ids)).numpy()
    np.testing.assert_allclose(got, gumbel(123, 45, ids), rtol=1e-13, atol=1e-15)
