"""Grammars of messages, compiled."""

from __future__ import annotations

from specdec.grammar.compiler import CompiledGrammar, GrammarCompiler
from specdec.grammar.grammar import GrammarError
from specdec.serving.errors import InvalidRequestError, NotBuiltError
from specdec.serving.messages import grammar_from
from specdec.v2 import model_pb2


def compiled_grammar(compiler: GrammarCompiler | None, message: model_pb2.Grammar) -> CompiledGrammar | None:
    """Return the grammar of a message, None if it has none; InvalidRequestError if it cannot be compiled,
    NotBuiltError where there is no compiler."""
    grammar = grammar_from(message)
    if grammar is None:
        return None
    if compiler is None:
        raise NotBuiltError("grammar: is set, no grammar is followed here")
    try:
        return compiler.compile(grammar)
    except GrammarError as error:
        raise InvalidRequestError([(f"grammar.{grammar.kind.value}", str(error))]) from None
