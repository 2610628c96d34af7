"""A lying draft costs no token and little time: texts equal those without a draft."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from orchestrator.models.catalog import Catalog
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.servicer import GenerationServicer
from specdec.serving.pods.connections import SecureConnections, connect
from specdec.v2 import generation_pb2_grpc, model_pb2
from tests.certificates import Authority
from tests.faults.cluster import Models
from tests.hostile import log_volume
from tests.hostile.lying_draft import LIES, LyingDraft
from tests.hostile.texts import Outcome, ask, pulse_of
from tests.services.test_equality import slow_target
from tests.stack import ALWAYS, Stack, served, stack, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHOWN = (
    "guesses at random",
    "names tokens beyond the vocabulary",
    "starts from the largest number",
    "has parents in a circle",
    "has logprobs at random",
    "offers thousands of nodes",
    "sends distributions that are cut",
    "talks without end",
    "talks at length without end",
    "never opens",
    "has a huge other tokenizer",
    "ends with every status",
)
"""Lies tried by every test run; `make verify` tries them all."""

SAMPLED = {"temperature": 0.8, "seed": 5}
ASKS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 60, "ignore_end_token": True, "speculation": ALWAYS},
    "sampled": {"max_tokens": 60, "ignore_end_token": True, "speculation": ALWAYS, "sampling": SAMPLED},
    "where it pays": {"max_tokens": 60, "ignore_end_token": True, "sampling": SAMPLED},
}
REJECTION = {
    "max_tokens": 60,
    "ignore_end_token": True,
    "speculation": ALWAYS,
    "sampling": SAMPLED,
    "rule": model_pb2.ACCEPTANCE_RULE_REJECTION,
}
CONTRASTIVE = {"max_tokens": 20, "ignore_end_token": True, "rule": model_pb2.ACCEPTANCE_RULE_CONTRASTIVE}

SILENCE_SECONDS = 1.5
FAILOVER_SECONDS = 1.0
CONTRASTIVE_DEADLINE = 2.0
"""Without a draft a contrastive text is given up; with a live but useless one it waits for its caller's deadline."""

DEADLINE = 30.0
MAX_PULSE = 1.0
MAX_LOG_BYTES = 100_000


def most_seconds(undrafted: float) -> float:
    """Return the time limit of a text beside a lying draft: detection takes some of it."""
    return 3 * undrafted + 3.0


@dataclass(frozen=True)
class Honest:
    """The honest verifier of the tests, with the texts and times without a draft."""

    services: Stack
    wanted: dict[str, Outcome]

    @property
    def neighbour_seconds(self) -> float:
        return self.wanted["greedy"].seconds


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def honest(models: Models) -> AsyncIterator[Honest]:
    async with stack(models.target, None, target_delay=slow_target) as services:
        await ask(services.stub, DEADLINE, ASKS["greedy"])  # the first request waits for one-time initialization
        asked = await asyncio.gather(*(ask(services.stub, DEADLINE, fields) for fields in ASKS.values()))
        yield Honest(services, dict(zip(ASKS, asked, strict=True)))


@asynccontextmanager
async def orchestrator_with(
    services: Stack, draft: str, connect: Callable[[str], grpc.aio.Channel] = connect
) -> AsyncIterator[Any]:
    """Yield a stub of another orchestrator, with the stack's verifiers and this draft."""
    peers = Peers(
        Pods(pod.address for pod in services.verifiers),
        Pods([draft], connect=connect),
        patience_seconds=0.02,
        silence_seconds=SILENCE_SECONDS,
        failover_seconds=FAILOVER_SECONDS,
        drafts_are_trusted=True,
    )
    async with AsyncExitStack() as exits:
        address, _ = await exits.enter_async_context(served(GenerationServicer(Catalog.of(services.model, peers))))
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(address))
        yield generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHOWN else pytest.mark.verify) for name in LIES]
)
async def test_a_lying_draft_costs_no_token(honest: Honest, name: str) -> None:
    await lies(honest, name)


@pytest.mark.verify
@pytest.mark.parametrize("name", SHOWN)
async def test_it_does_not_by_mutual_tls(honest: Honest, name: str, tmp_path: Path) -> None:
    """A certificate proves identity, not honesty."""
    await lies(honest, name, Authority(tmp_path / "ca"))


async def lies(honest: Honest, name: str, authority: Authority | None = None) -> None:
    services = honest.services
    liar = LyingDraft(LIES[name], services.verifiers[0].service.identity)
    with log_volume.measured() as volume:
        tls = None if authority is None else authority.files("draft")
        reach = connect if authority is None else SecureConnections(authority.files("orchestrator"), None, {})
        async with (
            served(liar, tls) as (address, _),
            orchestrator_with(services, address, reach) as stub,
            pulse_of(stub) as pulse,
        ):
            *texts, rejection, contrastive, neighbour = await asyncio.gather(
                *(ask(stub, DEADLINE, fields) for fields in ASKS.values()),
                ask(stub, DEADLINE, REJECTION),
                ask(stub, CONTRASTIVE_DEADLINE, CONTRASTIVE),
                ask(services.stub, DEADLINE, ASKS["greedy"] | {"plain": True}),
            )
        await until(lambda: services.idle)
    wanted = honest.wanted
    faults = {
        each: got.fault(wanted[each].text, most_seconds(wanted[each].seconds), refusable=False)
        for each, got in zip(ASKS, texts, strict=True)
    }
    faults["rejection"] = rejection.fault(None, most_seconds(honest.neighbour_seconds), refusable=False)
    faults["contrastive"] = contrastive.fault(None, CONTRASTIVE_DEADLINE + 5.0, refusable=True)
    faults["neighbour"] = neighbour.fault(
        wanted["greedy"].text, most_seconds(honest.neighbour_seconds), refusable=False
    )
    slowest = max(outcome.seconds for outcome in texts)
    print(
        f"\n{name}: texts {slowest:.2f} s, neighbour {neighbour.seconds:.2f} s, undrafted "
        f"{honest.neighbour_seconds:.2f} s, contrastive {contrastive.status} after {contrastive.seconds:.2f} s, "
        f"{pulse}, {volume.bytes} bytes of log, {liar.sessions} sessions"
    )
    assert {each: fault for each, fault in faults.items() if fault} == {}
    assert liar.sessions > 0
    assert volume.bugs == []
    assert volume.bytes < MAX_LOG_BYTES
    assert pulse.seconds < MAX_PULSE
