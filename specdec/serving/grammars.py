"""Grammars of sessions, tried and compiled."""

from __future__ import annotations

import asyncio
from functools import partial

from specdec.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarRoomError
from specdec.grammar.grammar import Grammar, GrammarError, source_violation
from specdec.grammar.stacks import ServiceThreads
from specdec.serving.bounded_threads import BoundedThreads
from specdec.serving.errors import (
    GrammarPendingError,
    InternalError,
    InvalidRequestError,
    NotBuiltError,
    OverloadedError,
    TenantLimitError,
)
from specdec.serving.futures import retrieve
from specdec.serving.grammar_trials import GrammarTrials, TrialResult
from specdec.serving.messages import grammar_from
from specdec.serving.validation import MAX_TENANT_CHARACTERS
from specdec.v2 import model_pb2

PATIENCE_SECONDS = 0.5
"""Maximum seconds that a grammar waits for a compiler thread."""

SILENCE_SECONDS = 1.0
"""Maximum seconds that an opening waits for its grammar's trial and compilation: an orchestrator gives up on a pod
after a second and a half of silence."""

PENDING_SECONDS = 0.25
"""Retry delay in seconds for a pending grammar."""

THREADS = 2
"""Number of grammars compiled concurrently."""

MAX_WAITING = 64
"""Maximum number of grammars waiting for a thread."""


class Grammars:
    """The grammars of a service's sessions. A grammar that is not cached is tried in a separate process, then compiled
    in one of THREADS dedicated threads, once for all sessions that need it. Sessions with cached grammars or long
    prompts therefore do not wait for compilations."""

    def __init__(self, compiler: GrammarCompiler | None, trials: GrammarTrials | None = None) -> None:
        """Without a `compiler` no grammar is accepted; without `trials` grammars are compiled without a trial."""
        self._compiler = compiler
        self._trials = trials
        self._threads = BoundedThreads(
            "grammars", THREADS, MAX_WAITING, reserve=True, executor=ServiceThreads(THREADS, "grammars")
        )
        self._under_way: dict[tuple[Grammar, str], asyncio.Task[CompiledGrammar]] = {}

    async def prepare(self, message: model_pb2.Grammar, owner: str = "") -> CompiledGrammar | None:
        """Try and compile a grammar for an owner and return it; it stays compiled while the caller holds it. Raise
        GrammarPendingError if this cannot be done now, TenantLimitError at a limit of the owner, and
        InvalidRequestError if the grammar is unusable. Return None without a grammar or compiler, and for oversized
        fields, which message validation rejects."""
        grammar = grammar_from(message)
        if grammar is None or self._compiler is None:
            return None
        if source_violation(grammar.kind, grammar.source) or len(owner) > MAX_TENANT_CHARACTERS:
            return None
        if (kept := self._compiler.kept(grammar, owner)) is not None:
            return kept
        key = grammar, owner
        if key not in self._under_way:
            compiling = asyncio.create_task(self._compile(grammar, owner))
            self._under_way[key] = compiling
            compiling.add_done_callback(lambda _: self._under_way.pop(key))
            compiling.add_done_callback(retrieve)
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                return await asyncio.shield(self._under_way[key])  # other sessions may wait for the same task
        except TimeoutError:
            raise GrammarPendingError("the grammar is being checked and compiled", PENDING_SECONDS) from None
        except TenantLimitError:
            raise
        except OverloadedError as error:
            raise GrammarPendingError(str(error), PENDING_SECONDS) from None
        except (GrammarError, GrammarRoomError) as error:
            raise _refused(grammar, owner, error) from None

    async def _compile(self, grammar: Grammar, owner: str) -> CompiledGrammar:
        assert self._compiler is not None
        verdict = TrialResult()
        if self._trials is not None:
            try:
                verdict = await self._trials.verdict(grammar, owner)
            except (TenantLimitError, InternalError) as error:  # temporary: a starting pod tries many grammars
                raise GrammarPendingError(str(error), PENDING_SECONDS) from None
            if verdict.problem:
                raise GrammarError(verdict.problem)
        work = partial(self._compiler.compile, grammar, owner, verdict.bytes)
        return await self._threads.run(work, owner, PATIENCE_SECONDS)

    def compiled(self, message: model_pb2.Grammar, owner: str = "") -> CompiledGrammar | None:
        """Return the compiled grammar of a prepared message; None if the message has none. Raise InvalidRequestError if
        the grammar cannot be compiled, OverloadedError if there is no room for it, NotBuiltError without a compiler."""
        grammar = grammar_from(message)
        if grammar is None:
            return None
        if self._compiler is None:
            raise NotBuiltError("grammar: is set, grammars are not supported here")
        if (kept := self._compiler.kept(grammar, owner)) is not None:
            return kept
        verdict = None if self._trials is None else self._trials.known(grammar, owner)
        try:
            return self._compiler.compile(grammar, owner, 0 if verdict is None else verdict.bytes)
        except (GrammarError, GrammarRoomError) as error:
            raise _refused(grammar, owner, error) from None

    async def close(self) -> None:
        for compiling in self._under_way.values():
            compiling.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        if self._trials is not None:
            await self._trials.close()
        self._threads.close()


def _refused(
    grammar: Grammar, owner: str, error: GrammarError | GrammarRoomError
) -> InvalidRequestError | OverloadedError:
    match error:
        case GrammarError():
            return InvalidRequestError([(f"grammar.{grammar.kind.value}", str(error))])
        case GrammarRoomError(of_owner=True):
            return TenantLimitError(owner, str(error), retry_after=1.0)
    return GrammarPendingError(str(error))
