"""One tenant's texts do not decide how another's are served. The clock is virtual; the draft helps only one of them."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.engine.engine import Engine
from tests.replay.deployment import record
from tests.replay.engines import HabitEngine
from tests.replay.scenarios import DRAFTED, Request, Scenario
from tests.verifier_service.fakes import LANGUAGE

HELPED = 6
"""Seed of a prompt that starts with an even token."""

USELESS = (0, 2, 3, 9, 11, 12)
"""Seeds of prompts that start with an odd token."""


class PartialDraft(HabitEngine):
    """A draft that is nearly right about texts that start with an even token, and random for the others."""

    def speak(self, number: int) -> NDArray[np.float32]:
        self._noise = 30.0 if LANGUAGE.tokens[LANGUAGE.prefixes[number][0]] % 2 else 0.7
        return super().speak(number)


def engines(scenario: Scenario) -> tuple[Engine, Engine, Engine | None]:
    blocks, threads = scenario.blocks, scenario.threads
    return HabitEngine(blocks, threads=threads), PartialDraft(blocks), None


def text(tenant: str, seed: int, arrives: int = 0) -> Request:
    return Request(arrives, same=seed, tokens=250, delay=0, options={"tenant": tenant}, **DRAFTED)


def tokens_a_step(scenario: Scenario) -> float:
    """Return the last request's tokens per step."""
    last, tokens, steps = len(scenario.requests) - 1, 0, 0
    for line in record(scenario, engines).lines:
        if found := re.match(rf"\d+ {last} commit .*?tokens=(\S+).*? steps=(\d+)", line):
            tokens += found[1].count(",") + 1
            steps += int(found[2])
    return tokens / steps


@pytest.mark.parametrize(
    ("draft_base", "arrives"),
    [
        (0.004, 0),
        (0.008, 150),
        *(pytest.param(*others, marks=pytest.mark.verify) for others in ((0.004, 150), (0.008, 0))),
    ],
)
def test_texts_that_no_draft_helps_leave_it_to_those_of_others(draft_base: float, arrives: int) -> None:
    """The draft takes one of the target's threads and so lengthens steps, which does not pay for the other texts."""
    alone = Scenario((text("helped", HELPED),), 256, row=0.001, draft_base=draft_base, threads=(2, 1), ticks=6000)
    flood = tuple(text("useless", seed) for seed in USELESS)
    beside = replace(alone, requests=(*flood, text("helped", HELPED, arrives)))
    assert tokens_a_step(beside) >= 0.95 * tokens_a_step(alone) > 1.5
