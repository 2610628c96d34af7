"""Services on all interfaces call each other through the loopback interface: no certificate names 0.0.0.0."""

from __future__ import annotations

import pytest

from specdec.local import DEMO, PROGRAMS, Stack
from specdec.serving.process.listening import from_here


def test_services_on_all_interfaces_call_each_other_through_loopback() -> None:
    everywhere = ("--host", "0.0.0.0")
    with Stack.start(
        DEMO / "target",
        "none",
        verifier_options=everywhere,
        orchestrator_options=everywhere,
        openai_options=everywhere,
        programs=dict.fromkeys(PROGRAMS, ("tests.cli.pretends",)),
    ) as stack:
        assert _given(stack, "orchestrator", "--verifier") == "127.0.0.1:1"
        assert _given(stack, "openai", "--orchestrator") == "127.0.0.1:1"
        assert stack.address == "127.0.0.1:1"
        assert set(stack.addresses.values()) == {"0.0.0.0:1"}


def _given(stack: Stack, role: str, option: str) -> str:
    command = stack.children[role].command
    return command[command.index(option) + 1]


@pytest.mark.parametrize(
    ("listening", "reached"),
    [
        ("0.0.0.0:80", "127.0.0.1:80"),
        ("[::]:80", "[::1]:80"),
        ("10.0.0.1:80", "10.0.0.1:80"),
        ("[fd00::1]:80", "[fd00::1]:80"),
        ("a.example:80", "a.example:80"),
    ],
)
def test_an_address_from_this_machine(listening: str, reached: str) -> None:
    assert from_here(listening) == reached
