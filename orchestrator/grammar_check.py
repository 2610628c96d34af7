"""Tries grammars before any pod sees them, where they can do no harm: in a process (`specdec.grammar.trial`) that is
ended if one takes too long, or too much memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from pathlib import Path

import structlog

from specdec.grammar.grammar import Grammar
from specdec.serving.errors import InternalError, InvalidRequestError, OverloadedError

log = structlog.get_logger()

SECONDS = 1.0
"""Seconds that a grammar may take; the largest that are accepted take half of it."""

START_SECONDS = 30.0
"""Seconds that the process may take to start."""

MAX_WAITING = 64
"""Requests that may wait for their grammars to be tried. They are tried one after another."""

REMEMBERED = 1024
"""Grammars whose outcome is remembered."""


class GrammarCheck:
    """Tries the grammars of requests for the model of a directory; each may take so many `seconds`."""

    def __init__(self, model: Path, seconds: float = SECONDS) -> None:
        self._model = model
        self._seconds = seconds
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._known: OrderedDict[Grammar, str] = OrderedDict()  # to what is wrong; empty: nothing

    async def check(self, grammar: Grammar, field: str) -> None:
        """Raise InvalidRequestError if a grammar, which comes of this field of a request, cannot be used, and
        OverloadedError if too many wait to be tried."""
        if (problem := self._known.get(grammar)) is None:
            if self._waiting >= MAX_WAITING:
                raise OverloadedError(f"{self._waiting} grammars are waiting already, the limit is reached")
            self._waiting += 1
            try:
                async with self._turn:
                    problem = await self._tried(grammar)
            finally:
                self._waiting -= 1
            self._known[grammar] = problem
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(grammar)
        if problem:
            raise InvalidRequestError([(field, problem)])

    async def close(self) -> None:
        """End the process."""
        async with self._turn:
            await self._end()

    async def _tried(self, grammar: Grammar) -> str:
        """Return what the process finds wrong with a grammar. Without its answer it is ended, since that would be taken
        for the answer to the next question."""
        process, begin = await self._started(), time.monotonic()
        question = {"kind": grammar.kind.value, "source": grammar.source}
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            async with asyncio.timeout(self._seconds):
                answer = await process.stdout.readline()
        except TimeoutError:
            return f"takes longer than {self._seconds:g} s to compile"
        finally:
            if not answer:
                log.warning("grammar_check_ended", seconds=round(time.monotonic() - begin, 3))
                await self._end()
        return str(json.loads(answer)) if answer else "takes too much memory to compile"

    async def _started(self) -> Process:
        """Return the process, which is ready."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        command = (sys.executable, "-m", "specdec.grammar.trial", str(self._model))
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        assert self._process.stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                if await self._process.stdout.readline():
                    return self._process
        await self._end()
        log.error("grammar_check_does_not_start")
        raise InternalError

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
