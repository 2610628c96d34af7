"""`python -m specdec.grammar.trial MODEL SECONDS`: tries grammars as a service would use them, and reports their
problems and sizes.

Each line of stdin is a question in JSON, answered by a line of stdout (`TrialAnswer`). The first line of stdout reports
that the process is ready. The limits on stack, memory and CPU time are tighter than a service's. A grammar that exceeds
them ends the process.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from specdec.engine.memory import give_freed_memory_back, set_memory_policy
from specdec.engine.model_directory import ModelDirectory
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar, GrammarError, Kind
from specdec.grammar.stacks import TRIAL_STACK_BYTES, stack_of
from specdec.grammar.text_grammar import TextGrammar

MEMORY_BYTES = 256 << 20
"""Address space available to a grammar, in addition to the ready process's own."""

WORN_BYTES = 64 << 20
"""Growth of resident memory, since the process was ready, at which it counts as worn. A worn process is replaced."""

WALK_TOKENS = 8
"""Tokens of the random text that a trial follows, with all of a service's queries at each."""

FOLLOWED_CLOSELY = 64
"""Tokens at the end of a text that are followed one by one, because the service crashed there. Earlier tokens are
followed as in a resumed text."""

TOKEN_SECONDS = 0.02
"""CPU seconds allowed per token of a text that is followed again, far above the library's work limits."""


class TrialAnswer(TypedDict):
    """The answer to one grammar."""

    problem: str
    """The grammar's problem; empty if there is none."""
    bytes: int
    """Its compiled size in bytes, before its lexer grows."""
    worn: bool
    """True if the process should be replaced."""


def answer_of(question: dict[str, Any], compiler: GrammarCompiler) -> TrialAnswer:
    """Try a grammar: compile it, and follow a text."""
    grammar = Grammar(
        Kind(question["kind"]), tuple(question["source"]), question["after_token"], question["opening_token"]
    )
    tokens, ends = question["tokens"], frozenset(question["end_tokens"])
    before = allocated_bytes()
    try:
        compiled = compiler.compile(grammar)
        try:
            if tokens:
                follow(compiled.begin([], ends), tokens)
            free = Grammar(grammar.kind, grammar.source)  # applies from the text's beginning
            walk(compiler.compile(free).begin([], ends))
        except GrammarError:
            pass  # a problem of the text, not of the grammar
        size = max(0, allocated_bytes() - before)
        del compiled
    except GrammarError as error:
        return TrialAnswer(problem=str(error), bytes=0, worn=False)
    finally:
        compiler.forget()
    return TrialAnswer(problem="", bytes=size, worn=False)


def follow(text: TextGrammar, tokens: Sequence[int]) -> None:
    """Follow a text by its tokens; near its end, with all of a service's queries at each place."""
    text.commit(tokens[:-FOLLOWED_CLOSELY])
    for token in tokens[-FOLLOWED_CLOSELY:]:
        text.forced()
        text.allowed([])
        text.allowed([token])
        text.commit([token])
    text.forced()
    text.allowed([])


def walk(text: TextGrammar) -> None:
    """Follow a random matching text, with all of a service's queries at each place: its mask, the masks of candidates
    below it, and forced tokens."""
    chance = random.Random(0)
    for _ in range(WALK_TOKENS):
        text.forced()
        mask = text.allowed([])
        allowed = [] if mask is None else np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        if not allowed:
            return
        token = chance.choice(allowed)
        text.permits([], token)
        text.allowed([token])
        text.allowed([chance.choice(allowed)])
        text.commit([token])


def main(model: Path, seconds: float) -> None:
    """Answer questions until stdin is closed; `seconds` is the CPU time allowed per grammar."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the service, which ends this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    set_memory_policy()  # a single arena, so that mallinfo2 covers all threads
    compiler = GrammarCompiler.of(ModelDirectory(model))
    compiler.compile(Grammar(Kind.REGEX, ("ready",)))  # the first compilation takes the longest
    compiler.forget()
    with stack_of(TRIAL_STACK_BYTES):
        answering = threading.Thread(target=_answer, args=(compiler, seconds), name="trials")
        answering.start()
    answering.join()


def _answer(compiler: GrammarCompiler, seconds: float) -> None:
    size = _statm_bytes(0) + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    ready = resident_bytes()
    _say(TrialAnswer(problem="", bytes=0, worn=False))
    for line in sys.stdin:
        question = json.loads(line)
        # SIGPROF ends the process even inside native code.
        signal.setitimer(signal.ITIMER_PROF, seconds + TOKEN_SECONDS * len(question["tokens"]))
        answer = answer_of(question, compiler)
        give_freed_memory_back()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        answer["worn"] = resident_bytes() > ready + WORN_BYTES
        _say(answer)


def _say(answer: TrialAnswer) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes() -> int:
    """Return the bytes currently allocated by malloc, in its main arena and in separate mappings. Without glibc 2.33,
    return the process's resident bytes."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return resident_bytes()
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    return _statm_bytes(1)


def _statm_bytes(column: int) -> int:
    """Return a size of this process from /proc: 0 for its address space, 1 for its resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[column]) * mmap.PAGESIZE


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
