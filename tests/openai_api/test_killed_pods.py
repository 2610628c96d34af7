"""If a process is killed during a tool call or structured output, the caller sees a pause and the same response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.models.catalog import Catalog
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.requests.model import ServedModel
from orchestrator.servicer import GenerationServicer
from specdec.engine.model_directory import ModelDirectory
from tests.openai_api.front import front
from tests.openai_api.test_reasoning import OPENED
from tests.reasoning import CLOSE
from tests.stack import Pod, Stack, VerifierPod, long_steps, running, stack, until

SCHEMA = {
    "type": "object",
    "properties": {"why": {"type": "string", "minLength": 60, "maxLength": 70}, "warm": {"type": "boolean"}},
    "required": ["why", "warm"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "call": {
        "tools": [{"type": "function", "function": {"name": "tell", "parameters": SCHEMA}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "warmth", "schema": SCHEMA}}},
}
STEP = 5
"""The target's step after which a process is killed; the response takes more than twice as many steps."""


class Slowly:
    """Delays and counts the target's steps, so that there is time for the kill."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self) -> None:
        self.steps += 1
        long_steps()


def another_orchestrator(services: Stack, target: Path) -> Pod:
    """Return a second orchestrator of the same pods."""
    verifiers, drafts = (Pods(pod.address for pod in pods) for pods in (services.verifiers, services.drafts))
    peers = Peers(verifiers, drafts, drafts_are_trusted=True)
    return Pod(GenerationServicer(Catalog.of(ServedModel.of(ModelDirectory(target)), peers)))


def works(pod: Pod) -> bool:
    """Return whether a verifier or an orchestrator has a text in progress."""
    if isinstance(pod, VerifierPod):
        return pod.loop.pool.held > 0
    assert isinstance(pod.service, GenerationServicer)
    return any(each.stats.running for each in pod.service._catalog)


@pytest.mark.parametrize(
    ("victim", "kind"),
    [
        ("verifier", "call"),
        ("draft", "schema"),
        ("orchestrator", "schema"),
        pytest.param("verifier", "schema", marks=pytest.mark.verify),
        pytest.param("draft", "call", marks=pytest.mark.verify),
        pytest.param("orchestrator", "call", marks=pytest.mark.verify),
    ],
)
async def test_the_answer_is_the_same(reasoning_pair: tuple[Path, Path], victim: str, kind: str) -> None:
    target, draft = reasoning_pair
    slowly = Slowly()
    async with stack(target, draft, verifiers=2, target_delay=slowly, patience_seconds=0.3) as services:
        orchestrators = [another_orchestrator(services, target) for _ in range(2)]
        async with running(orchestrators[0]) as one, running(orchestrators[1]) as other:

            async def kill() -> None:
                pods: dict[str, list[Pod]] = {
                    "verifier": [pod for pod in services.verifiers if works(pod)],
                    "draft": [*services.drafts],
                    "orchestrator": [pod for pod in (one, other) if works(pod)],
                }
                (pod,) = pods[victim]
                await pod.stop()

            async with front(one.address, other.address) as http:

                async def answered(disturb: Callable[[], Awaitable[None]] | None) -> tuple[Any, int]:
                    """Return the response's message, and the number of steps that it took."""
                    begin = slowly.steps
                    asking = asyncio.create_task(
                        http.client.chat.completions.create(
                            model=services.model.name,
                            messages=[{"role": "user", "content": "is it warm?"}],
                            max_tokens=200,
                            seed=4,
                            temperature=1.0,
                            **KINDS[kind],
                            logit_bias={str(CLOSE): 5},
                            extra_body={**OPENED, "specdec": {"speculation": "always"}},
                        )
                    )
                    if disturb is not None:
                        await until(lambda: slowly.steps - begin >= STEP)
                        assert not asking.done()
                        await disturb()
                    (choice,) = (await asking).choices
                    assert choice.finish_reason == ("tool_calls" if kind == "call" else "stop")
                    message = choice.message.model_dump()
                    assert message["reasoning"]
                    for call in message["tool_calls"] or ():
                        del call["id"]  # differs between requests
                    return message, slowly.steps - begin

                want, steps = await answered(None)
                assert steps > 2 * STEP
                got, _ = await answered(kill)
                assert got == want
