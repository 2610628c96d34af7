"""Compiled closures and their parts behave like the same functions in Python, errors included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.engine.cpu.compiling import closed, part


def unclosed(loop: bool) -> Any:
    @part(loop=loop)
    def inner(numbers: Any, limit: Any) -> Any:
        total = 0.0
        for number in numbers:
            if number > limit:
                raise ValueError("beyond the limit")
            total += number
        return total

    return inner


INNER = {"a loop": unclosed(loop=True), "no loop": unclosed(loop=False)}


def outer(kind: str) -> Any:
    inner = INNER[kind]

    def whole(numbers: Any, limit: Any) -> Any:
        return inner(numbers, limit) + inner(numbers[1:], limit)

    return closed(f"test-{kind}")(whole)


@pytest.mark.parametrize("kind", INNER)
def test_a_part_is_called_from_compiled_code(kind: str) -> None:
    assert outer(kind)(np.arange(4.0), 10.0) == 12.0


@pytest.mark.parametrize("kind", INNER)
def test_its_errors_reach_python(kind: str) -> None:
    with pytest.raises(ValueError, match="beyond the limit"):
        outer(kind)(np.arange(4.0), 2.0)


@pytest.mark.parametrize("kind", INNER)
def test_it_cannot_be_called_from_python(kind: str) -> None:
    with pytest.raises(TypeError):
        INNER[kind](np.arange(4.0), 10.0)
