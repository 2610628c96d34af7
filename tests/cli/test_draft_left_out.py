"""If a draft cannot be exported, the other services run without it."""

from __future__ import annotations

import pytest

from specdec.local import DEMO, LocalError
from specdec.local.stack import PROGRAMS, Stack

PRETENDING = ("tests.cli.pretends",)


def programs(phase: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(PROGRAMS, PRETENDING) | {"draft": (*PRETENDING, "--fails-in", phase)}


def test_a_draft_that_cannot_be_exported_is_told_and_left_out() -> None:
    said: list[str] = []
    with Stack.start(DEMO / "target", str(DEMO / "draft"), programs=programs("export"), say=said.append) as stack:
        assert set(stack.children) == {"verifier", "orchestrator"}
        assert "--draft" not in stack.children["orchestrator"].command
    assert "draft was not exported (exit status 1; its own message is above): continuing without it" in said


def test_a_draft_that_fails_otherwise_ends_the_start() -> None:
    with (
        pytest.raises(LocalError, match=r"^draft did not start"),
        Stack.start(DEMO / "target", str(DEMO / "draft"), programs=programs("model")),
    ):
        pass
