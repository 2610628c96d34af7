"""Grammars of messages, compiled."""

from __future__ import annotations

import asyncio
from functools import partial

from specdec.grammar.compiler import CompiledGrammar, GrammarCompiler
from specdec.grammar.grammar import Grammar, GrammarError, source_violation
from specdec.serving.bounded_threads import BoundedThreads
from specdec.serving.errors import InvalidRequestError, NotBuiltError
from specdec.serving.messages import grammar_from
from specdec.serving.validation import LONGEST_NAME
from specdec.v2 import model_pb2

PATIENCE_SECONDS = 0.5
"""Seconds that an opening waits for those before it to be compiled: an orchestrator leaves a pod alone that says
nothing for a second and a half."""

THREADS = 2
"""Grammars that are compiled at a time."""

MOST_WAITING = 64
"""Openings that may wait for it."""


class Grammars:
    """The grammars of a service's sessions. Those that are not kept are compiled in THREADS of their own, each once for
    all who want it, so that sessions with kept grammars, or long prompts, do not wait for them."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        """Without a `compiler` no grammar is taken."""
        self._compiler = compiler
        self._threads = BoundedThreads("grammars", THREADS, MOST_WAITING)
        self._under_way: dict[tuple[Grammar, str], asyncio.Task[CompiledGrammar]] = {}

    async def prepare(self, message: model_pb2.Grammar, owner: str = "") -> None:
        """Have a grammar compiled for an owner; OverloadedError if too many are, InvalidRequestError if it cannot be.
        One that is too large, or of an owner whose name is, is left to the checks of the whole message."""
        grammar = grammar_from(message)
        if grammar is None or self._compiler is None or self._compiler.keeps(grammar, owner):
            return
        if source_violation(grammar.kind, grammar.source) or len(owner) > LONGEST_NAME:
            return
        key = grammar, owner
        if key not in self._under_way:
            work = partial(self._compiler.compile, grammar, owner)
            compiling = asyncio.create_task(self._threads.run(work, owner, PATIENCE_SECONDS))
            self._under_way[key] = compiling
            compiling.add_done_callback(lambda done: self._done(key, done))
        try:
            await asyncio.shield(self._under_way[key])  # others may wait for it
        except GrammarError as error:
            raise _refused(grammar, error) from None

    def _done(self, key: tuple[Grammar, str], compiling: asyncio.Task[CompiledGrammar]) -> None:
        del self._under_way[key]
        if not compiling.cancelled():
            compiling.exception()  # all who wanted it may have left

    def compiled(self, message: model_pb2.Grammar, owner: str = "") -> CompiledGrammar | None:
        """Return the grammar of a message, None if it has none; InvalidRequestError if it cannot be compiled,
        NotBuiltError where there is no compiler."""
        grammar = grammar_from(message)
        if grammar is None:
            return None
        if self._compiler is None:
            raise NotBuiltError("grammar: is set, no grammar is followed here")
        try:
            return self._compiler.compile(grammar, owner)
        except GrammarError as error:
            raise _refused(grammar, error) from None

    def close(self) -> None:
        self._threads.close()


def _refused(grammar: Grammar, error: GrammarError) -> InvalidRequestError:
    return InvalidRequestError([(f"grammar.{grammar.kind.value}", str(error))])
