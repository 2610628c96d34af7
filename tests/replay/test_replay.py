"""Both loops still do, step by step, what they did when the recordings were made.

A refactoring leaves the recordings as they are; a change of behavior rewrites them (`python -m tests.replay keep`),
and their diff shows what it changed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.replay.__main__ import KEPT, MESSAGES, SPELT_OUT, file_name, written
from tests.replay.deployment import made_up, record
from tests.replay.scenarios import SCENARIOS


def recording(file: Path) -> str:
    """Return the content of a kept recording."""
    assert file.exists(), f"there is no {file}: run `python -m tests.replay keep`"
    return file.read_text()


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_loops_do_what_they_did(name: str) -> None:
    assert written(record(SCENARIOS[name], made_up)) == recording(KEPT / file_name(name))


def test_messages_have_the_bytes_that_they_had() -> None:
    """These are the messages of orchestrator, draft and verifier; changing the contract requires a new version."""
    assert record(SCENARIOS[SPELT_OUT], made_up).messages == recording(MESSAGES).splitlines()


def test_recordings_hold_every_mode_and_every_source_of_tokens() -> None:
    everything = "".join(recording(KEPT / file_name(name)) for name in SCENARIOS)
    assert set(re.findall(r"mode=(\S+)", everything)) == {"off", "ngram", "local-draft", "remote-draft"}
    sources = {source for some in re.findall(r"sources=(\S+)", everything) for source in some.split(",")}
    assert sources == {"1", "2", "3", "4", "5", "6", "7"}
    for event in (" waits ", "preempted=1", "queued=", "found=", "logprobs="):
        assert event in everything


def test_a_draft_that_says_something_else_makes_another_recording() -> None:
    scenario = SCENARIOS["alone"]
    assert record(scenario, made_up).lines != record(replace(scenario, noise=0.8), made_up).lines


def test_calls_are_counted_when_asked() -> None:
    scenario = SCENARIOS["alone"]
    assert record(scenario, made_up, count_calls=True).costs.calls > record(scenario, made_up).costs.calls == 0
