"""Grammar trials: each grammar is first compiled in a separate process (`specdec.grammar.trial`), so that an excessive
grammar crashes only that process.

Every service tries a grammar itself before compiling it. Owners take turns, and verdicts are cached per owner:
otherwise response times would reveal which grammars others use.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from specdec.grammar.grammar import Grammar
from specdec.grammar.stacks import TRIAL_STACK_BYTES
from specdec.roles import PYTHON, environment
from specdec.serving.echo import cut
from specdec.serving.errors import PROBLEM_BYTES, InternalError, OverloadedError, TenantLimitError
from specdec.serving.fair_turns import FairTurns
from specdec.serving.futures import retrieve

if TYPE_CHECKING:
    from specdec.grammar.trial import TrialAnswer

log = structlog.get_logger()

SECONDS = 1.0
"""CPU seconds per grammar. Counting CPU time makes the verdict independent of the machine's load."""

PATIENCE = 10.0
"""Wall-clock seconds after which a trial is abandoned, regardless of the CPU time it got."""

START_SECONDS = 30.0
"""Maximum seconds for a process to start."""

PROCESSES = 2
"""Grammars tried concurrently. A named owner has at most one process, so that no other owner waits for its trials."""

MAX_WAITING = 64
"""Maximum number of grammars that are waiting or being tried, including those whose requests were cancelled."""

MAX_REPLAYS = 8
"""Maximum concurrent replays of one owner after a pod has died: each takes some 50 ms."""

TENANT_SHARE = 8
"""A named owner gets 1/TENANT_SHARE of the waiting places."""

AGAIN_SECONDS = 60.0
"""Seconds before retrying a grammar that exceeded its limits: the machine may have been slow or out of memory."""

VERDICT_SECONDS = 600.0
"""Lifetime of a verdict in seconds: machines change, and a wrong verdict must expire."""

FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)
"""Signals that no grammar causes: the machine is short of memory, or the service is ending."""

MAX_VERDICTS, MAX_VERDICTS_OF_OWNER = 4096, 512
"""Maximum number of cached verdicts, in total and per named owner."""


@dataclass(frozen=True)
class TrialResult:
    """The verdict of a trial: the problem with the grammar ("" if none) and its compiled size in bytes."""

    problem: str = ""
    bytes: int = 0


Key = tuple[str, bytes]
"""An owner and the digest of a grammar, since sources may be long."""


def key_of(grammar: Grammar, owner: str) -> Key:
    source = json.dumps({"kind": grammar.kind.value, "source": grammar.source}).encode()
    return owner, hashlib.sha256(source).digest()


class GrammarTrials:
    """Tries grammars for the model in a directory, each with `seconds` of CPU time and `patience` seconds in total."""

    def __init__(self, model: Path, seconds: float = SECONDS, patience: float = PATIENCE) -> None:
        self._model = model
        self._seconds = seconds
        self._patience = patience
        self._turns = FairTurns(PROCESSES, reserve=True)
        self._idle: list[TrialProcess] = []
        self._processes: set[TrialProcess] = set()
        self._under_way: dict[Key, asyncio.Task[TrialResult]] = {}
        self._replays: dict[asyncio.Task[TrialResult], str] = {}  # replays in flight, with their owners
        self._known: OrderedDict[Key, tuple[TrialResult, float]] = OrderedDict()
        """Verdicts and their expiry in monotonic time, least recently requested first."""

    def known(self, grammar: Grammar, owner: str = "") -> TrialResult | None:
        """Return the cached verdict on an owner's grammar, or None. Callable from any thread."""
        verdict, until = self._known.get(key_of(grammar, owner), (None, 0.0))
        return verdict if time.monotonic() < until else None

    async def verdict(self, grammar: Grammar, owner: str = "") -> TrialResult:
        """Return the verdict on an owner's grammar. An expired verdict without a problem is returned at once, while the
        grammar is tried again. TenantLimitError if too many grammars of the owner are waiting; OverloadedError if too
        many are waiting in total, or the machine is too busy; InternalError if no trial process starts. Cancelling the
        caller does not cancel the trial."""
        key = key_of(grammar, owner)
        verdict, until = self._known.get(key, (None, 0.0))
        if verdict is not None:
            self._known.move_to_end(key)
            if time.monotonic() < until:
                return verdict
        outdated = None if verdict is None or verdict.problem else verdict
        if key not in self._under_way:
            try:
                self._check_room(owner)
            except OverloadedError:
                if outdated is not None:
                    return outdated
                raise
            self._under_way[key] = trial = asyncio.create_task(self._try(key, _question(grammar)))
            trial.add_done_callback(lambda _: self._under_way.pop(key))
            trial.add_done_callback(retrieve)
        if outdated is not None:  # it has passed before: texts need not wait for its retrial
            return outdated
        return await asyncio.shield(self._under_way[key])

    async def replay(
        self,
        grammar: Grammar,
        owner: str,
        tokens: Sequence[int],
        end_tokens: frozenset[int],
        *,
        insistent: bool = False,
    ) -> TrialResult:
        """Try a grammar along a text with these tokens, ignoring any cached verdict. OverloadedError if the machine is
        too busy, or if the owner has MAX_REPLAYS replays in flight: more would stall its texts for too long. An
        `insistent` caller is exempt from this limit."""
        key = key_of(grammar, owner)
        own = sum(owner == other for other in self._replays.values())
        if own >= MAX_REPLAYS and not insistent:
            raise OverloadedError(f"{own} texts are being checked against their grammar, the limit is reached")
        self._known.pop(key, None)
        replay = asyncio.create_task(self._try(key, _question(grammar, tokens, end_tokens)))
        self._replays[replay] = owner
        replay.add_done_callback(self._replays.pop)
        replay.add_done_callback(retrieve)
        return await asyncio.shield(replay)

    async def close(self) -> None:
        """End the processes."""
        trials = [*self._under_way.values(), *self._replays]
        for trial in trials:
            trial.cancel()
        await asyncio.gather(*trials, return_exceptions=True)
        for process in list(self._processes):
            await self._end(process)

    def _check_room(self, owner: str) -> None:
        waiting = len(self._under_way)
        if waiting >= MAX_WAITING:
            raise OverloadedError(f"{waiting} grammars are waiting or being tried, the limit is reached")
        own = sum(key[0] == owner for key in self._under_way)
        if owner and own >= max(1, MAX_WAITING // TENANT_SHARE):
            problem = f"{own} of its grammars are waiting or being tried, the limit is reached"
            raise TenantLimitError(owner, problem, retry_after=1.0)

    async def _try(self, key: Key, question: dict[str, Any]) -> TrialResult:
        """Try a grammar and cache the verdict."""
        owner, _ = key
        try:
            async with asyncio.timeout(self._patience + START_SECONDS):
                await self._turns.acquire(owner)
        except TimeoutError:
            raise OverloadedError("too many other grammars are queued for a trial") from None
        try:
            answer = await self._answer(question)
        finally:
            self._turns.release(owner)
        seconds, now = VERDICT_SECONDS, time.monotonic()
        if isinstance(answer, int) and -answer in FROM_OUTSIDE:
            raise OverloadedError("the process for the grammar's trial was killed")
        if isinstance(answer, int):
            seconds = AGAIN_SECONDS
            verdict = TrialResult(self._problem(answer))
        else:
            verdict = TrialResult(cut(answer["problem"], PROBLEM_BYTES), answer["bytes"])
        self._remember(key, verdict, now + seconds)
        return verdict

    def _problem(self, status: int) -> str:
        """Return the problem of a grammar whose trial process exited with this status."""
        if -status in (signal.SIGSEGV, signal.SIGBUS):
            limit = TRIAL_STACK_BYTES >> 20
            return f"is nested too deeply: compiling or following it needs more than {limit} MiB of stack"
        return f"needs more than {self._seconds:g} s of CPU time to compile, or too much memory"

    def _remember(self, key: Key, verdict: TrialResult, until: float) -> None:
        self._known[key] = verdict, until
        self._known.move_to_end(key)
        own = [known for known in self._known if key[0] and known[0] == key[0]]
        for oldest in own[: max(0, len(own) - MAX_VERDICTS_OF_OWNER)]:
            del self._known[oldest]
        while len(self._known) > MAX_VERDICTS:
            self._known.popitem(last=False)

    async def _answer(self, question: dict[str, Any]) -> TrialAnswer | int:
        """Return a process's answer, or its exit status if it ended instead. OverloadedError if neither happens in
        time."""
        process = await self._process()
        begin, answer = time.monotonic(), None
        try:
            answer = await process.ask(question, self._patience)
        except TimeoutError:
            raise OverloadedError(f"the grammar's trial did not finish within {self._patience:g} s") from None
        finally:
            if answer is None:
                await self._end(process)
                log.warning("trial_process_ended", seconds=round(time.monotonic() - begin, 3), status=process.status)
        if answer is None:
            return process.status
        if answer["worn"]:
            await self._end(process)
        else:
            self._idle.append(process)
        return answer

    async def _process(self) -> TrialProcess:
        """Return an idle process, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if process.process is not None and process.process.returncode is None:
                return process
            await self._end(process)  # it died while idle
        process = TrialProcess(self._model, self._seconds)
        self._processes.add(process)
        return process

    async def _end(self, process: TrialProcess) -> None:
        self._processes.discard(process)
        await process.end()


class TrialProcess:
    """A process that tries one grammar after another. It starts with the first question."""

    def __init__(self, model: Path, seconds: float) -> None:
        self._command = (*PYTHON, "-m", "specdec.grammar.trial", str(model), str(seconds))
        self.process: Process | None = None

    @property
    def status(self) -> int:
        """Exit status; 0 while it runs."""
        return 0 if self.process is None else self.process.returncode or 0

    async def ask(self, question: dict[str, Any], patience: float) -> TrialAnswer | None:
        """Return the answer to a question, or None if the process ends instead; TimeoutError after `patience`
        seconds."""
        process = self.process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.timeout(patience):
            with contextlib.suppress(ConnectionError):  # it has ended: `readline` returns b""
                process.stdin.write(json.dumps(question).encode() + b"\n")
                await process.stdin.drain()
            line = await process.stdout.readline()
            if not line:
                await process.wait()
                return None
        answer: TrialAnswer = json.loads(line)
        return answer

    async def end(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    async def _start(self) -> Process:
        try:
            self.process = process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, env=environment()
            )
        except OSError as error:  # too many processes or open files, or no memory
            log.error("trial_process_start_failed", why=str(error))
            raise InternalError from error
        assert process.stdout is not None
        ready = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                ready = await process.stdout.readline()
        if not ready:
            log.error("trial_process_start_failed")
            raise InternalError
        return process


def _question(grammar: Grammar, tokens: Sequence[int] = (), end_tokens: frozenset[int] = frozenset()) -> dict[str, Any]:
    """Return the question for a trial process, in the format of `specdec.grammar.trial`."""
    return {
        "kind": grammar.kind.value,
        "source": grammar.source,
        "after_token": grammar.after_token,
        "opening_token": grammar.opening_token,
        "tokens": list(tokens),
        "end_tokens": sorted(end_tokens),
    }
