"""Grammars of messages, compiled."""

from __future__ import annotations

import contextlib
from functools import partial

from specdec.grammar.compiler import CompiledGrammar, GrammarCompiler
from specdec.grammar.grammar import GrammarError
from specdec.serving.bounded_threads import BoundedThreads
from specdec.serving.errors import InvalidRequestError, NotBuiltError
from specdec.serving.messages import grammar_from
from specdec.v2 import model_pb2

PATIENCE_SECONDS = 0.3
"""Seconds that an opening waits for those before it to be compiled: an orchestrator leaves a pod alone that says
nothing for a second and a half."""

MOST_WAITING = 64
"""Openings that may wait for it."""


class Grammars:
    """The grammars of a service's sessions. Those that are not kept are compiled one after another, in a thread of
    their own, so that sessions with other grammars, or long prompts, do not wait for them."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        """Without a `compiler` no grammar is taken."""
        self._compiler = compiler
        self._threads = BoundedThreads("grammars", 1, MOST_WAITING)

    async def prepare(self, message: model_pb2.Grammar, owner: str = "") -> None:
        """Have a grammar compiled for an owner; OverloadedError if that would take too long. What is wrong with it,
        `compiled` tells."""
        grammar = grammar_from(message)
        if grammar is None or self._compiler is None or self._compiler.keeps(grammar, owner):
            return
        with contextlib.suppress(GrammarError):
            await self._threads.run(partial(self._compiler.compile, grammar, owner), owner, PATIENCE_SECONDS)

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
            raise InvalidRequestError([(f"grammar.{grammar.kind.value}", str(error))]) from None

    def close(self) -> None:
        self._threads.close()
