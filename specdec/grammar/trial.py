"""`python -m specdec.grammar.trial MODEL SECONDS`: compiles grammars as a service would, and says what is wrong with
them.

Each line of stdin is a grammar in JSON, each line of stdout what is wrong with it, empty if nothing is; the first line
says that the process is ready. Processor time and memory are limited: a grammar that takes more ends the process.
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


def main(model: Path, seconds: float) -> None:
    """Answer until stdin is closed; a grammar may take so many seconds of a processor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is for the service, which ends this process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    compiler = GrammarCompiler.of(ModelDirectory(model))
    compiler.compile(Grammar(Kind.REGEX, ("ready",)))  # the first one takes the longest
    _say("")
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process, whatever it is in the middle of
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        problem = problem_of(line, compiler)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _say(problem)


def _say(problem: str) -> None:
    sys.stdout.write(json.dumps(problem) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
