"""A shortage of memory is recognized by any library's exception for it, but by no exception about a text."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch

from specdec.engine.shortage import is_shortage

MORE_THAN_THERE_IS = 1 << 55


def raised_by_torch() -> None:
    torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8)


def raised_by_numpy() -> None:
    np.empty(MORE_THAN_THERE_IS, np.uint8)


def raised_by_python() -> None:
    bytearray(MORE_THAN_THERE_IS)


def raised_beside_another() -> None:
    try:
        raised_by_python()
    finally:
        raise KeyError("of the same pass")


def raised_from_another() -> None:
    try:
        raised_by_numpy()
    except MemoryError as error:
        raise ValueError("a pass has failed") from error


def raised_in_a_group() -> None:
    raise ExceptionGroup("of two tasks", [ValueError("one"), MemoryError()])


def raised_by_the_system() -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize(
    "fails",
    [
        raised_by_torch,
        raised_by_numpy,
        raised_by_python,
        raised_beside_another,
        raised_from_another,
        raised_in_a_group,
        raised_by_the_system,
    ],
)
def test_a_shortage_is_known(fails: object) -> None:
    assert callable(fails)
    with pytest.raises(BaseException) as told:
        fails()
    assert is_shortage(told.value)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("token 'out of memory' is not allowed"),
        RuntimeError("the size of tensor a must match"),
        OSError(errno.ENOENT, "No such file"),
        FloatingPointError("the model's logits are not finite"),
    ],
)
def test_nothing_else_is_one(error: Exception) -> None:
    assert not is_shortage(error)
