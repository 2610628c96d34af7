"""Grammars are tried in a process of its own, which may be slow, or die, and is then another one."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import pytest

from orchestrator import grammar_check
from orchestrator.grammar_check import GrammarCheck
from specdec.grammar.grammar import Grammar, Kind
from specdec.local import DEMO
from specdec.serving.errors import InvalidRequestError, OverloadedError
from tests.stack import until

GOOD = Grammar(Kind.REGEX, ("a+",))
WRONG = Grammar(Kind.REGEX, ("(",))


@contextlib.asynccontextmanager
async def checking(seconds: float = 20.0) -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck(DEMO / "target", seconds)
    try:
        yield check
    finally:
        await check.close()


async def test_outcomes_are_told_and_remembered() -> None:
    async with checking() as check:
        await asyncio.gather(*(check.check(GOOD, "grammar.regex") for _ in range(4)))
        with pytest.raises(InvalidRequestError, match=r"grammar.regex: cannot be used: error: unclosed group"):
            await check.check(WRONG, "grammar.regex")
        await check.close()  # whatever is asked now is remembered
        await check.check(GOOD, "grammar.regex")
        with pytest.raises(InvalidRequestError):
            await check.check(WRONG, "grammar.regex")
        assert check._process is None


async def test_what_takes_too_long_is_ended() -> None:
    async with checking() as check:
        await check.check(GOOD, "grammar.regex")
        check._seconds = 0.0
        with pytest.raises(InvalidRequestError, match="takes longer than 0 s to compile, or too much memory"):
            await check.check(WRONG, "grammar.regex")
        assert check._process is None
        check._seconds = 20.0
        with pytest.raises(InvalidRequestError, match="unclosed group"):  # what took too long is tried again
            await check.check(WRONG, "grammar.regex")
        await check.check(Grammar(Kind.REGEX, ("b+",)), "grammar.regex")


async def test_a_process_that_dies_takes_one_grammar_with_it() -> None:
    """It dies of memory; here it is killed while it works on the grammar."""
    async with checking() as check:
        await check.check(GOOD, "grammar.regex")
        process = check._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        asked = asyncio.create_task(check.check(WRONG, "grammar.regex"))
        await until(lambda: check._turn.locked())
        process.kill()
        with pytest.raises(InvalidRequestError, match="or too much memory"):
            await asked
        await check.check(Grammar(Kind.REGEX, ("b+",)), "grammar.regex")


@pytest.mark.parametrize("started", [False, True])
async def test_who_leaves_gets_nobody_anothers_answer(started: bool) -> None:
    """Whether it leaves while the process starts, or while its grammar is tried."""
    async with checking() as check:
        if started:
            await check.check(GOOD, "grammar.regex")
        asked = asyncio.create_task(check.check(WRONG, "grammar.regex"))
        while check._process is None or not check._trials:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        await check.check(Grammar(Kind.REGEX, ("b+",)), "grammar.regex")
        with pytest.raises(InvalidRequestError, match="unclosed group"):
            await check.check(WRONG, "grammar.regex")


async def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 1)
    async with checking() as check:
        first = asyncio.create_task(check.check(GOOD, "grammar.regex"))
        await until(lambda: check._turn.locked())
        with pytest.raises(OverloadedError):
            await check.check(WRONG, "grammar.regex")
        await first
