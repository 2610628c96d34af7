"""Grammars are tried in separate processes; slow and dead ones are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from specdec.engine.model_directory import ModelDirectory
from specdec.grammar.grammar import Grammar, Kind
from specdec.grammar.trial import TrialAnswer, resident_bytes
from specdec.local import DEMO
from specdec.serving import grammar_trials as module
from specdec.serving.errors import InternalError, OverloadedError, TenantLimitError
from specdec.serving.grammar_trials import GrammarTrials, TrialProcess, TrialResult
from specdec.text.tokenizer import Tokenizer
from tests.stack import until

GOOD = Grammar(Kind.REGEX, ("a+",))
OTHER = Grammar(Kind.REGEX, ("b+",))
WRONG = Grammar(Kind.REGEX, ("(",))
PROPERTIES = {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n % 40}}}$"} for n in range(5000)}
LONG = Grammar(Kind.JSON_SCHEMA, (json.dumps({"properties": PROPERTIES}),))
"""Takes many seconds of CPU time."""
DEEP = Grammar(Kind.LARK, ("start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(999)) + 'a999: "x"',))
"""Takes 3.3 MB of stack."""
HEAVY = Grammar(Kind.JSON_SCHEMA, ('{"type": "integer", "multipleOf": 20011}',))


@contextlib.asynccontextmanager
async def trying(seconds: float = 20.0, patience: float = 60.0) -> AsyncIterator[GrammarTrials]:
    trials = GrammarTrials(DEMO / "target", seconds, patience)
    try:
        yield trials
    finally:
        await trials.close()


def only(trials: GrammarTrials) -> TrialProcess:
    (process,) = trials._processes
    return process


async def stopped(trials: GrammarTrials) -> TrialProcess:
    """Stop the only trial process."""
    await trials.verdict(GOOD)
    process = only(trials)
    await stop(process)
    return process


async def stop(process: TrialProcess) -> None:
    """Stop all threads of a process."""
    assert process.process is not None
    process.process.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{process.process.pid}/task")
    await until(lambda: all("State:\tT" in (each / "status").read_text() for each in threads.iterdir()))


async def test_verdicts_are_told_and_remembered() -> None:
    async with trying() as trials:
        good = (await asyncio.gather(*(trials.verdict(GOOD) for _ in range(4))))[0]
        assert good.problem == ""
        assert 10_000 < good.bytes < 5_000_000
        wrong = await trials.verdict(WRONG)
        assert wrong.problem == "cannot be used: error: unclosed group"
        await trials.close()  # from now on, all verdicts are remembered ones
        assert await trials.verdict(GOOD) == good
        assert await trials.verdict(WRONG) == wrong
        assert not trials._processes


@pytest.fixture
def all_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every grammar pass without a process."""

    async def ask(process: TrialProcess, question: dict[str, Any], patience: float) -> TrialAnswer:
        return TrialAnswer(problem="", bytes=1, worn=False)

    monkeypatch.setattr(TrialProcess, "ask", ask)


@pytest.mark.usefixtures("all_pass")
async def test_verdicts_are_an_owners_own() -> None:
    """With shared verdicts, response times would reveal other owners' grammars."""
    async with trying() as trials:
        await trials.verdict(GOOD, "one")
        assert trials.known(GOOD, "one") is not None
        assert trials.known(GOOD, "another") is None
        assert trials.known(GOOD) is None


@pytest.mark.usefixtures("all_pass")
async def test_verdicts_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    async with trying() as trials:
        monkeypatch.setattr(module, "VERDICT_SECONDS", 0.0)
        await trials.verdict(GOOD)
        assert trials.known(GOOD) is None


async def test_texts_do_not_wait_while_a_grammar_that_passed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are not refused either if no place is free for the retry; a grammar that failed is retried before use."""
    async with trying() as trials:
        monkeypatch.setattr(module, "VERDICT_SECONDS", 0.0)
        good, wrong = await trials.verdict(GOOD), await trials.verdict(WRONG)
        await stopped(trials)
        trials._patience = 0.2
        # Sizes are not compared: a trial in progress may have ended meanwhile, with another size.
        assert (await trials.verdict(GOOD)).problem == good.problem
        monkeypatch.setattr(module, "MAX_WAITING", 0)
        assert (await trials.verdict(GOOD)).problem == good.problem
        with pytest.raises(OverloadedError):
            await trials.verdict(WRONG)
        assert wrong.problem


async def test_a_process_that_cannot_be_started_is_no_fault_of_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    async with trying() as trials:
        monkeypatch.setattr(module, "PYTHON", ("/nowhere/python", "-P"))
        with pytest.raises(InternalError):
            await trials.verdict(GOOD)
        monkeypatch.undo()
        assert (await trials.verdict(GOOD)).problem == ""


async def test_a_process_runs_no_files_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("open('executed', 'w')")
    monkeypatch.chdir(tmp_path)
    async with trying() as trials:
        assert (await trials.verdict(GOOD)).problem == ""
    assert not (tmp_path / "executed").exists()


@pytest.mark.usefixtures("all_pass")
async def test_an_owner_has_its_own_limit_of_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_VERDICTS_OF_OWNER", 2)
    async with trying() as trials:
        await trials.verdict(GOOD, "quiet")
        for number in range(4):
            await trials.verdict(Grammar(Kind.REGEX, (f"a{number}",)), "busy")
        assert trials.known(GOOD, "quiet") is not None
        known = [trials.known(Grammar(Kind.REGEX, (f"a{number}",)), "busy") is not None for number in range(4)]
        assert known == [False, False, True, True]


async def test_what_takes_too_much_of_a_processor_is_ended() -> None:
    async with trying(seconds=0.2) as trials:
        for _ in range(2):  # the second verdict is remembered
            assert "more than 0.2 s of CPU time to compile, or" in (await trials.verdict(LONG)).problem
            assert not trials._processes
        assert (await trials.verdict(GOOD)).problem == ""


async def test_what_nests_too_deep_is_ended() -> None:
    async with trying() as trials:
        assert "is nested too deeply" in (await trials.verdict(DEEP)).problem
        assert (await trials.verdict(GOOD)).problem == ""


async def test_a_heavy_grammar_is_weighed_and_leaves_nothing_behind() -> None:
    """The process's memory is the same afterwards."""

    def resident(process: TrialProcess) -> int:
        assert process.process is not None
        return int(Path(f"/proc/{process.process.pid}/statm").read_text().split()[1]) * 4096

    assert resident_bytes() > 0
    async with trying() as trials:
        await trials.verdict(HEAVY)
        before = resident(only(trials))
        for number in range(20021, 20023):
            heavy = Grammar(Kind.JSON_SCHEMA, (json.dumps({"type": "integer", "multipleOf": number}),))
            assert (await trials.verdict(heavy)).bytes > 5_000_000
        assert resident(only(trials)) < before + 5_000_000


async def test_a_processor_that_is_busy_with_other_things_refuses_no_grammar() -> None:
    """The process is stopped for longer than the CPU limit."""
    async with trying(seconds=0.1) as trials:
        process = (await stopped(trials)).process
        assert process is not None
        asked = asyncio.create_task(trials.verdict(OTHER))
        await asyncio.wait([asked], timeout=0.3)
        assert not asked.done()
        process.send_signal(signal.SIGCONT)
        assert (await asked).problem == ""


async def test_what_cannot_be_tried_in_time_may_come_again() -> None:
    async with trying() as trials:
        await stopped(trials)
        trials._patience = 0.2
        with pytest.raises(OverloadedError, match=r"the grammar's trial did not finish within 0.2 s"):
            await trials.verdict(WRONG)
        assert not trials._processes
        trials._patience = 60.0
        assert "unclosed group" in (await trials.verdict(WRONG)).problem


async def test_a_process_that_dies_takes_one_grammar_with_it() -> None:
    """A process short of memory aborts; here it gets a signal during the trial."""
    async with trying() as trials:
        process = (await stopped(trials)).process
        assert process is not None
        asked = asyncio.create_task(trials.verdict(WRONG))
        await until(lambda: trials._turns.taken == 1)
        process.send_signal(signal.SIGABRT)
        process.send_signal(signal.SIGCONT)
        assert "or too much memory" in (await asked).problem
        assert (await trials.verdict(OTHER)).problem == ""


async def test_a_process_that_is_killed_says_nothing_of_a_grammar() -> None:
    """As if by the kernel's OOM killer, during a trial or after one."""
    async with trying() as trials:
        process = (await stopped(trials)).process
        assert process is not None
        asked = asyncio.create_task(trials.verdict(OTHER))
        await until(lambda: trials._turns.taken == 1)
        process.kill()
        with pytest.raises(OverloadedError, match="was killed"):
            await asked
        assert (await trials.verdict(OTHER)).problem == ""
        process = only(trials).process
        assert process is not None
        process.kill()
        await process.wait()
        assert "unclosed group" in (await trials.verdict(WRONG)).problem


@pytest.mark.parametrize("started", [False, True])
async def test_a_caller_that_leaves_gets_nobody_anothers_answer(started: bool) -> None:
    """Whether it leaves while the process starts or during the trial."""
    async with trying() as trials:
        process = (await stopped(trials)).process if started else None
        asked = asyncio.create_task(trials.verdict(WRONG))
        await until(lambda: trials._turns.taken == 1)
        asked.cancel()
        await asyncio.wait([asked])
        if process is not None:
            process.send_signal(signal.SIGCONT)
        assert (await trials.verdict(OTHER)).problem == ""
        assert "unclosed group" in (await trials.verdict(WRONG)).problem


async def test_what_took_too_much_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.0)
    async with trying(seconds=0.2) as trials:
        assert "more than 0.2 s" in (await trials.verdict(LONG)).problem
        assert trials.known(LONG) is None


async def test_an_owner_has_a_share_of_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of cancelled requests count too, since they still take the process's time."""
    monkeypatch.setattr(module, "MAX_WAITING", 16)
    async with trying() as trials:
        for number in range(2):
            left = asyncio.create_task(trials.verdict(Grammar(Kind.REGEX, (f"a{number}",)), "greedy"))
            await until(lambda number=number: len(trials._under_way) > number)  # type: ignore[misc]
            left.cancel()
            await asyncio.wait([left])
        with pytest.raises(TenantLimitError, match=r"tenant 'greedy': 2 of its grammars are waiting"):
            await trials.verdict(WRONG, "greedy")
        assert await trials.verdict(GOOD, "another") != TrialResult()
        await until(lambda: not trials._under_way)
        assert (await trials.verdict(GOOD, "greedy")).problem == ""


async def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    async with trying() as trials:
        first = asyncio.create_task(trials.verdict(GOOD))
        await until(lambda: trials._turns.taken == 1)
        with pytest.raises(OverloadedError):
            await trials.verdict(WRONG)
        await first


async def test_a_new_grammar_waits_for_none_of_another_owner() -> None:
    """One owner's grammars take ten seconds each; meanwhile another owner's are tried."""
    async with trying() as trials:
        costly = [
            asyncio.create_task(trials.verdict(Grammar(Kind.JSON_SCHEMA, (LONG.source[0] + " " * number,)), "costly"))
            for number in range(3)
        ]
        await until(lambda: trials._turns.taken == 1)
        for number in range(3):
            assert (await trials.verdict(Grammar(Kind.REGEX, (f"b{number}",)), "other")).problem == ""
        assert not any(trial.done() for trial in costly)
        for trial in costly:
            trial.cancel()


async def test_a_text_is_followed_again_whatever_is_known_of_its_grammar() -> None:
    tokens = Tokenizer(ModelDirectory(DEMO / "target")).encode("a" * 300, special=False)
    async with trying() as trials:
        await trials.verdict(GOOD)
        process = only(trials).process
        assert process is not None
        assert (await trials.replay(GOOD, "", tokens, frozenset({0}))).problem == ""
        await stop(only(trials))
        again = asyncio.create_task(trials.replay(GOOD, "", tokens, frozenset({0})))
        await until(lambda: trials._turns.taken == 1)
        process.send_signal(signal.SIGSEGV)
        process.send_signal(signal.SIGCONT)
        assert "is nested too deeply" in (await again).problem
        assert "is nested too deeply" in (await trials.verdict(GOOD)).problem  # refused from now on


async def test_an_owners_texts_do_not_all_wait_to_be_followed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text under which several pods in a row have died is exempt."""
    monkeypatch.setattr(module, "MAX_REPLAYS", 1)
    async with trying() as trials:
        await stopped(trials)
        first = asyncio.create_task(trials.replay(GOOD, "", [], frozenset({0})))
        await until(lambda: len(trials._replays) == 1)
        with pytest.raises(OverloadedError, match="1 texts are being checked"):
            await trials.replay(GOOD, "", [], frozenset({0}))
        assert (await trials.replay(GOOD, "another", [], frozenset({0}))).problem == ""
        insistent = asyncio.create_task(trials.replay(GOOD, "", [], frozenset({0}), insistent=True))
        for process in trials._processes:
            assert process.process is not None
            process.process.send_signal(signal.SIGCONT)
        assert (await first).problem == (await insistent).problem == ""
