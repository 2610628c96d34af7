"""Grammars are tried in a process of its own, which may be slow, or die, and is then another one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator

import pytest

from orchestrator import grammar_check
from orchestrator.grammar_check import GrammarCheck
from specdec.grammar.grammar import Grammar, Kind
from specdec.local import DEMO
from specdec.serving.errors import InvalidRequestError, OverloadedError, TenantLimitError
from tests.stack import until

GOOD = Grammar(Kind.REGEX, ("a+",))
WRONG = Grammar(Kind.REGEX, ("(",))
PROPERTIES = {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n % 40}}}$"} for n in range(9999)}
LONG = Grammar(Kind.JSON_SCHEMA, (json.dumps({"properties": PROPERTIES}),))
"""It takes many seconds of a processor."""


@contextlib.asynccontextmanager
async def checking(seconds: float = 20.0, patience: float = 60.0) -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck(DEMO / "target", seconds, patience)
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


async def test_what_takes_too_much_of_a_processor_is_ended() -> None:
    async with checking(seconds=0.4) as check:
        for _ in range(2):  # which is remembered
            with pytest.raises(InvalidRequestError, match=r"more than 0.4 s of a processor to compile, or"):
                await check.check(LONG, "grammar.json_schema")
            assert check._process is None
        await check.check(GOOD, "grammar.regex")


async def test_a_processor_that_is_busy_with_other_things_refuses_no_grammar() -> None:
    """The process is stopped for longer than a grammar may take."""
    async with checking(seconds=0.1) as check:
        await check.check(GOOD, "grammar.regex")
        process = check._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        asked = asyncio.create_task(check.check(Grammar(Kind.REGEX, ("b+",)), "grammar.regex"))
        await asyncio.wait([asked], timeout=0.3)
        assert not asked.done()
        process.send_signal(signal.SIGCONT)
        await asked


async def test_what_cannot_be_tried_in_time_may_come_again() -> None:
    async with checking() as check:
        await check.check(GOOD, "grammar.regex")
        process, check._patience = check._process, 0.2
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(OverloadedError, match=r"a grammar could not be tried within 0.2 s"):
            await check.check(WRONG, "grammar.regex")
        assert check._process is None
        check._patience = 60.0
        with pytest.raises(InvalidRequestError, match="unclosed group"):
            await check.check(WRONG, "grammar.regex")


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


async def test_what_took_too_much_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "AGAIN_SECONDS", 0.0)
    async with checking(seconds=0.4) as check:
        with pytest.raises(InvalidRequestError, match=r"more than 0.4 s of a processor to compile, or"):
            await check.check(LONG, "grammar.json_schema")
        again = asyncio.create_task(check.check(LONG, "grammar.json_schema"))
        await until(lambda: bool(check._trials))
        with pytest.raises(InvalidRequestError):
            await again


async def test_a_tenant_has_a_share_of_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with grammars whose requests have left: each takes the process's time all the same."""
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 16)
    async with checking() as check:
        for number in range(2):
            left = asyncio.create_task(check.check(Grammar(Kind.REGEX, (f"a{number}",)), "grammar.regex", "greedy"))
            await until(lambda number=number: len(check._trials) > number)  # type: ignore[misc]
            left.cancel()
            await asyncio.wait([left])
        with pytest.raises(TenantLimitError, match=r"tenant 'greedy': 2 of its grammars are waiting already"):
            await check.check(WRONG, "grammar.regex", "greedy")
        await check.check(GOOD, "grammar.regex", "another")
        await check.check(GOOD, "grammar.regex", "greedy")


async def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 1)
    async with checking() as check:
        first = asyncio.create_task(check.check(GOOD, "grammar.regex"))
        await until(lambda: check._turn.locked())
        with pytest.raises(OverloadedError):
            await check.check(WRONG, "grammar.regex")
        await first
