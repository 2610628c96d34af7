"""A grammar is compiled once for all sessions, and delays other sessions only briefly."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from specdec.grammar.compiler import GrammarRoomError
from specdec.grammar.grammar import Grammar, GrammarError
from specdec.serving import grammars as module
from specdec.serving.errors import GrammarPendingError, InvalidRequestError, OverloadedError, TenantLimitError
from specdec.serving.grammar_trials import TrialResult
from specdec.serving.grammars import THREADS, Grammars
from specdec.v2 import model_pb2
from tests.stack import until


class Compiler:
    """Compiles sources that begin with "slow" once `may` is set, and fails on those that begin with "wrong"."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.begun: list[str] = []
        self.weights: dict[str, int] = {}
        self._kept: set[tuple[Grammar, str]] = set()

    def kept(self, grammar: Grammar, owner: str = "") -> str | None:
        return grammar.source[0] if (grammar, owner) in self._kept else None

    def compile(self, grammar: Grammar, owner: str = "", weight: int = 0) -> str:
        (source,) = grammar.source
        self.weights[source] = weight
        if source.startswith("full"):
            raise GrammarRoomError(1 << 20, of_owner=source.endswith("own"))
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
    asking[0].cancel()  # the others go on waiting
    await asyncio.wait([asking[0]])
    compiler.may.set()
    await asyncio.gather(*asking[1:])
    assert compiler.begun == ["slow"]
    await grammars.close()


async def test_who_finds_all_threads_at_work_is_refused_unless_its_own_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.05)
    grammars, compiler = made()
    await grammars.prepare(regex("a"))
    asking = [asyncio.create_task(grammars.prepare(regex(f"slow{number}"))) for number in range(THREADS)]
    await until(lambda: len(compiler.begun) == 1 + THREADS)
    await grammars.prepare(regex("a"))
    with pytest.raises(GrammarPendingError, match="no thread for grammars became free"):
        await grammars.prepare(regex("b"))
    compiler.may.set()
    await asyncio.gather(*asking)
    await grammars.prepare(regex("b"))
    await grammars.close()


async def test_what_is_wrong_is_told_and_compiled_once() -> None:
    grammars, compiler = made()
    with pytest.raises(InvalidRequestError, match=r"grammar\.regex: is wrong"):
        await grammars.prepare(regex("wrong"))
    assert compiler.begun == ["wrong"]
    await grammars.close()


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


class Trials:
    """Trials without known verdicts, which return `results` in order once `may` is set."""

    def __init__(self, *results: TrialResult | Exception) -> None:
        self.results = list(results)
        self.may = asyncio.Event()
        self.may.set()

    def known(self, grammar: Grammar, owner: str = "") -> TrialResult | None:
        return None

    async def verdict(self, grammar: Grammar, owner: str = "") -> TrialResult:
        await self.may.wait()
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def close(self) -> None:
        pass


def tried(*results: TrialResult | Exception) -> tuple[Grammars, Any, Trials]:
    compiler: Any = Compiler()
    trials: Any = Trials(*results)
    return Grammars(compiler, trials), compiler, trials


async def test_what_does_not_pass_its_trial_is_not_compiled() -> None:
    grammars, compiler, _ = tried(TrialResult("is nested too deeply"))
    with pytest.raises(InvalidRequestError, match=r"grammar\.regex: is nested too deeply"):
        await grammars.prepare(regex("a"))
    assert compiler.begun == []
    await grammars.close()


async def test_a_grammar_is_charged_what_its_trial_found() -> None:
    grammars, compiler, _ = tried(TrialResult(bytes=12345))
    await grammars.prepare(regex("a"), "me")
    assert compiler.weights == {"a": 12345}
    await grammars.close()


async def test_a_pod_says_in_time_that_it_is_not_done_and_is_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation continues even if no session is waiting any more."""
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.05)
    grammars, compiler, trials = tried(TrialResult())
    trials.may.clear()
    with pytest.raises(GrammarPendingError, match="is being checked and compiled"):
        await grammars.prepare(regex("a"))
    trials.may.set()
    await until(lambda: compiler.begun == ["a"])
    await grammars.prepare(regex("a"))
    assert compiler.begun == ["a"]
    await grammars.close()


@pytest.mark.parametrize(
    ("source", "owner", "result", "refusal"),
    [
        ("a", "", OverloadedError("64 grammars are waiting"), GrammarPendingError),
        ("a", "me", TenantLimitError("me", "8 are waiting", 1.0), GrammarPendingError),
        ("full", "", TrialResult(), GrammarPendingError),
        ("full of its own", "me", TrialResult(), TenantLimitError),
    ],
)
async def test_want_of_room_for_grammars_refuses_texts_with_grammars_alone(
    source: str, owner: str, result: TrialResult | Exception, refusal: type[OverloadedError]
) -> None:
    """An OverloadedError would make an orchestrator send no texts for a while, with or without a grammar."""
    grammars, _, _ = tried(result)
    with pytest.raises(OverloadedError) as refused:
        await grammars.prepare(regex(source), owner)
    assert type(refused.value) is refusal
    await grammars.close()
