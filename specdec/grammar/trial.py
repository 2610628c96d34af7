"""`python -m specdec.grammar.trial MODEL`: compiles grammars as a service would, and says what is wrong with them.

Each line of stdin is a grammar in JSON, each line of stdout what is wrong with it, empty if nothing is; the first line
says that the process is ready. Memory is limited: a grammar that takes too much ends the process.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

from specdec.engine.model_directory import ModelDirectory
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar, GrammarError, Kind

MEMORY_BYTES = 2 << 30
"""Address space that the process may have."""


def problem_of(line: str, compiler: GrammarCompiler) -> str:
    """Return what is wrong with a grammar; empty if nothing is."""
    asked = json.loads(line)
    try:
        compiler.compile(Grammar(Kind(asked["kind"]), tuple(asked["source"])))
    except GrammarError as error:
        return str(error)
    return ""


def main(model: Path) -> None:
    """Answer until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is for the service, which ends this process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    compiler = GrammarCompiler.of(ModelDirectory(model))
    compiler.compile(Grammar(Kind.REGEX, ("ready",)))  # the first one takes the longest
    _say("")
    for line in sys.stdin:
        _say(problem_of(line, compiler))


def _say(problem: str) -> None:
    sys.stdout.write(json.dumps(problem) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
