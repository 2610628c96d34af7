"""Grammars of sessions are compiled once for all who want them, and hold up nobody else for long."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from specdec.grammar.grammar import Grammar, GrammarError
from specdec.serving import grammars as module
from specdec.serving.errors import InvalidRequestError, OverloadedError
from specdec.serving.grammars import THREADS, Grammars
from specdec.v2 import model_pb2
from tests.stack import until


class Compiler:
    """Compiles what begins with "slow" when it may, and nothing that begins with "wrong"."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.begun: list[str] = []
        self._kept: set[tuple[Grammar, str]] = set()

    def keeps(self, grammar: Grammar, owner: str = "") -> bool:
        return (grammar, owner) in self._kept

    def compile(self, grammar: Grammar, owner: str = "") -> str:
        (source,) = grammar.source
        self.begun.append(source)
        if source.startswith("slow"):
            assert self.may.wait(60)
        if source.startswith("wrong"):
            raise GrammarError("is wrong")
        self._kept.add((grammar, owner))
        return source


def regex(source: str) -> model_pb2.Grammar:
    return model_pb2.Grammar(regex=source)


def made() -> tuple[Grammars, Compiler]:
    compiler: Any = Compiler()
    return Grammars(compiler), compiler


async def test_all_who_want_one_wait_for_it_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    grammars, compiler = made()
    asking = [asyncio.create_task(grammars.prepare(regex("slow"))) for _ in range(5)]
    await until(lambda: compiler.begun == ["slow"])
    asking[0].cancel()  # it leaves; the others go on waiting
    await asyncio.wait([asking[0]])
    compiler.may.set()
    await asyncio.gather(*asking[1:])
    assert compiler.begun == ["slow"]
    grammars.close()


async def test_who_finds_all_threads_at_work_is_refused_unless_its_own_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.05)
    grammars, compiler = made()
    await grammars.prepare(regex("a"))
    asking = [asyncio.create_task(grammars.prepare(regex(f"slow{number}"))) for number in range(THREADS)]
    await until(lambda: len(compiler.begun) == 1 + THREADS)
    await grammars.prepare(regex("a"))
    with pytest.raises(OverloadedError, match="grammars are worked on"):
        await grammars.prepare(regex("b"))
    compiler.may.set()
    await asyncio.gather(*asking)
    await grammars.prepare(regex("b"))
    grammars.close()


async def test_what_is_wrong_is_told_and_compiled_once() -> None:
    grammars, compiler = made()
    with pytest.raises(InvalidRequestError, match=r"grammar\.regex: is wrong"):
        await grammars.prepare(regex("wrong"))
    assert compiler.begun == ["wrong"]
    grammars.close()


@pytest.mark.parametrize(
    ("message", "owner"),
    [
        (model_pb2.Grammar(choice=model_pb2.Choice()), ""),
        (regex("a" * 200_000), ""),
        (regex("a"), "o" * 300),
        (model_pb2.Grammar(), ""),
    ],
    ids=["no texts", "too large", "an owner's name", "none"],
)
async def test_what_the_checks_of_a_message_refuse_is_not_compiled(message: model_pb2.Grammar, owner: str) -> None:
    grammars, compiler = made()
    await grammars.prepare(message, owner)
    assert compiler.begun == []
