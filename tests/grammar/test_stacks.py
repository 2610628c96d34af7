"""No grammar that passes a trial overflows a service's stack: nested grammars of every depth, in separate processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.grammar.grammar import MAX_NESTING, MAX_RULES, Grammar, Kind, source_violation
from specdec.grammar.stacks import SERVICE_STACK_BYTES, TRIAL_STACK_BYTES
from testing.nested_grammars import SHAPES, nested

ROOT = Path(__file__).parent.parent.parent
DEPTHS = [2**power for power in range(3, 12)]

SURVIVORS = """
import json, sys, threading
from pathlib import Path
from specdec.engine.model_directory import ModelDirectory
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import GrammarError
from specdec.grammar.stacks import SERVICE_STACK_BYTES, ServiceThreads, stack_of
from specdec.grammar.trial import walk
from testing.nested_grammars import nested

directory = ModelDirectory(Path(sys.argv[1]))
compiler = GrammarCompiler.of(directory)

def follow(shape, depth):
    try:
        walk(compiler.compile(nested(shape, depth)).begin([], directory.end_tokens))
    except GrammarError:
        pass
    print(shape, depth, flush=True)

with ServiceThreads(1) as threads:
    for shape, depth in json.loads(sys.argv[2]):
        threads.submit(follow, shape, depth).result()
"""


class Trial:
    """A trial process, replaced whenever it dies."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def passes(self, grammar: Grammar) -> bool:
        """Return whether the process survives a grammar."""
        if self._process is None:
            command = [sys.executable, "-m", "specdec.grammar.trial", str(ROOT / "demo" / "target"), "5.0"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            self._read()
        question: dict[str, Any] = {
            "kind": grammar.kind.value,
            "source": grammar.source,
            "after_token": None,
            "opening_token": None,
            "tokens": [],
            "end_tokens": [],
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        if self._read():
            return True
        self.end()
        return False

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _read(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@pytest.fixture
def trial() -> Iterator[Trial]:
    found = Trial()
    yield found
    found.end()


def test_services_have_several_times_the_stack_of_a_trial() -> None:
    assert SERVICE_STACK_BYTES >= 4 * TRIAL_STACK_BYTES


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(["rules", "groups", "expression", "objects", "objects by reference"], id="some"),
        pytest.param(list(SHAPES), id="all", marks=pytest.mark.verify),
    ],
)
def test_what_passes_the_trial_ends_no_thread_of_a_service(trial: Trial, shapes: list[str]) -> None:
    """Not even at the greatest passing depth. The limits on sources, which would hide an overflow, are not applied."""
    survivors = []
    for shape in shapes:
        passed, failed = 0, None
        for depth in DEPTHS:
            if trial.passes(nested(shape, depth)):
                passed = depth
                survivors.append((shape, depth))
            else:
                failed = depth
                break
        while failed is not None and failed - passed > max(1, passed // 8):
            middle = (passed + failed) // 2
            if trial.passes(nested(shape, middle)):
                passed = middle
                survivors.append((shape, middle))
            else:
                failed = middle
    command = [sys.executable, "-c", SURVIVORS, str(ROOT / "demo" / "target"), json.dumps(survivors)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.stdout.splitlines() == [f"{shape} {depth}" for shape, depth in survivors]
    assert done.returncode == 0
    deepest = {shape: max(depth for other, depth in survivors if other == shape) for shape in shapes}
    assert deepest["rules"] < 2048  # otherwise the trial detected nothing
    assert deepest["objects by reference"] < 2048


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (nested("rules", MAX_RULES), f"has {MAX_RULES + 2} rules, must have at most {MAX_RULES}"),
        (nested("arrays", 120), f"has 121 levels of arrays and objects, must have at most {MAX_NESTING}"),
        (
            Grammar(Kind.JSON_SCHEMA, ("[" * 100_000,)),
            f"has 100000 levels of arrays and objects, must have at most {MAX_NESTING}",
        ),
        (Grammar(Kind.JSON_SCHEMA, ('"' + '\\"' * 60_000 + "[" * 101,)), None),
        (Grammar(Kind.JSON_SCHEMA, ('{"const": "' + "[" * 1000 + '"}',)), None),
        (Grammar(Kind.LARK, ('start: "' + "a: " * 2000 + '"',)), None),
    ],
    ids=["rules", "schema", "no JSON", "open string", "within a string", "within a literal"],
)
def test_a_source_that_nests_too_deep_is_refused_unread(grammar: Grammar, problem: str | None) -> None:
    found = source_violation(grammar.kind, grammar.source)
    assert found is None if problem is None else found is not None and problem in found
