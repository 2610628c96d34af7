"""Tries grammars before any pod sees them, where they can do no harm: in a process (`specdec.grammar.trial`) that ends
if one takes too much of a processor's time, or of memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from pathlib import Path

import structlog

from specdec.grammar.grammar import Grammar
from specdec.serving.echo import cut
from specdec.serving.errors import PROBLEM_BYTES, InternalError, InvalidRequestError, OverloadedError, TenantLimitError

log = structlog.get_logger()

SECONDS = 1.0
"""Seconds of a processor that a grammar may take: on a busy machine it is as good as on an idle one."""

PATIENCE = 10.0
"""Seconds after which a trial is given up, of which it may have got any part of a processor."""

START_SECONDS = 30.0
"""Seconds that the process may take to start."""

MAX_WAITING = 64
"""Grammars that may wait to be tried, one after another; those whose requests have left among them."""

TENANT_SHARE = 8
"""A tenant may have one in so many of these places."""

AGAIN_SECONDS = 60.0
"""Seconds after which a grammar that took too much is tried again: the machine may have been slow, or out of memory,
for a reason of its own."""

REMEMBERED = 1024
"""Grammars whose outcome is remembered."""


class GrammarCheck:
    """Tries the grammars of requests for the model of a directory; each may take so many `seconds` of a processor, and
    `patience` in all."""

    def __init__(self, model: Path, seconds: float = SECONDS, patience: float = PATIENCE) -> None:
        self._model = model
        self._seconds = seconds
        self._patience = patience
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        # By digest, since sources may be long:
        self._trials: dict[bytes, asyncio.Task[str]] = {}  # under way
        self._owners: dict[bytes, str] = {}  # of these: whose they are
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """To what is wrong, nothing if it is empty, and until when that holds, in monotonic time."""

    async def check(self, grammar: Grammar, field: str, tenant: str = "") -> None:
        """Raise InvalidRequestError if a grammar, which comes of this field of a tenant's request, cannot be used;
        TenantLimitError if too many of the tenant's wait to be tried; OverloadedError if too many of all do, or if the
        machine is too busy to try it."""
        asked = json.dumps({"kind": grammar.kind.value, "source": grammar.source}).encode()
        key = hashlib.sha256(asked).digest()
        problem, until = self._known.get(key, ("", 0.0))
        if time.monotonic() >= until:
            if key not in self._trials:
                if len(self._trials) >= MAX_WAITING:
                    raise OverloadedError(f"{len(self._trials)} grammars are waiting already, the limit is reached")
                own = sum(owner == tenant for owner in self._owners.values())
                if tenant and own >= max(1, MAX_WAITING // TENANT_SHARE):
                    problem = f"{own} of its grammars are waiting already, the limit is reached"
                    raise TenantLimitError(tenant, problem, retry_after=1.0)
                self._owners[key] = tenant
                self._trials[key] = asyncio.create_task(self._try(key, asked))
            # Whoever leaves does not end the trial: its answer would be taken for that to the next question.
            try:
                async with asyncio.timeout(self._patience + START_SECONDS):
                    problem = await asyncio.shield(self._trials[key])
            except TimeoutError:
                raise OverloadedError("other grammars have to be tried before, which takes too long") from None
        if problem:
            raise InvalidRequestError([(field, problem)])

    async def close(self) -> None:
        """End the process."""
        for trial in self._trials.values():
            trial.cancel()
        await asyncio.gather(*self._trials.values(), return_exceptions=True)
        await self._end()

    async def _try(self, key: bytes, asked: bytes) -> str:
        """Return what is wrong with a grammar, and remember it."""
        try:
            async with self._turn:
                answer = await self._answer(asked)
        finally:
            del self._trials[key], self._owners[key]
        until = math.inf
        if answer is None:
            answer = f"takes more than {self._seconds:g} s of a processor to compile, or too much memory"
            until = time.monotonic() + AGAIN_SECONDS
        answer = cut(answer, PROBLEM_BYTES)
        self._known[key] = answer, until
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return answer

    async def _answer(self, asked: bytes) -> str | None:
        """Return the process's answer to a grammar in JSON; None if it has ended instead. OverloadedError if it does
        neither."""
        process, begin = await self._started(), time.monotonic()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        try:
            process.stdin.write(asked + b"\n")
            async with asyncio.timeout(self._patience):
                answer = await process.stdout.readline()
        except TimeoutError:
            raise OverloadedError(f"a grammar could not be tried within {self._patience:g} s") from None
        finally:
            if not answer:
                log.warning("grammar_check_ended", seconds=round(time.monotonic() - begin, 3))
                await self._end()
        return str(json.loads(answer)) if answer else None

    async def _started(self) -> Process:
        """Return the process, which is ready."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        command = (sys.executable, "-m", "specdec.grammar.trial", str(self._model), str(self._seconds))
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        assert self._process.stdout is not None
        ready = b""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_SECONDS):
                    ready = await self._process.stdout.readline()
        finally:
            if not ready:
                await self._end()
        if not ready:
            log.error("grammar_check_does_not_start")
            raise InternalError
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
