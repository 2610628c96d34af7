"""`help`, notebooks and type checkers show every option of a call, with type and meaning."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest

from specdec.client import AsyncClient, Client, GenerateOptions, build_request

CALLS: list[Callable[..., Any]] = [Client.generate, Client.complete, AsyncClient.generate, AsyncClient.complete]
HINTS = get_type_hints(GenerateOptions, include_extras=True)


@pytest.mark.parametrize("call", [*CALLS, build_request], ids=lambda call: call.__qualname__)
def test_every_option_is_a_keyword_parameter_with_its_type_and_meaning(call: Callable[..., Any]) -> None:
    parameters = inspect.signature(call).parameters
    shown = " ".join(pydoc.plain(pydoc.render_doc(call)).split())
    for name, hint in HINTS.items():
        kind, meaning = get_args(hint)
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].annotation == kind
        assert parameters[name].default is None
        assert f"{name}: {meaning}" in shown


def test_all_calls_take_the_same() -> None:
    first, *others = (inspect.signature(call).parameters for call in CALLS)
    assert list(first) == ["self", "prompt", "timeout", "request_id", "metadata", *HINTS]
    assert all(other == first for other in others)


def test_a_meaning_is_one_sentence_or_several() -> None:
    for hint in HINTS.values():
        (meaning,) = get_args(hint)[1:]
        assert meaning[0].isalpha()
        assert meaning.endswith(".")
