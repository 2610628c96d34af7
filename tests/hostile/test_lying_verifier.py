"""A lying verifier is found out: the text continues at an honest one with the same tokens, or ends with a refusal and
its reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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
from specdec.v2 import generation_pb2_grpc
from tests.certificates import Authority
from tests.faults.cluster import Models
from tests.hostile import log_volume
from tests.hostile.lying_verifier import Lie, LyingVerifier
from tests.hostile.message_lies import COMMITS, OPENINGS, changing
from tests.hostile.session_lies import CONDUCTS
from tests.hostile.texts import MAX_DETAILS, Outcome, ask, pulse_of
from tests.hostile.vitals import resident_mib
from tests.stack import Stack, served, stack, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIES: dict[str, Lie] = (
    {name: changing("commit", change) for name, change in COMMITS.items()}
    | {name: changing("opened", change) for name, change in OPENINGS.items()}
    | {lie.__name__.replace("_", " "): lie for lie in CONDUCTS}
)
"""All lies, by description."""

SHOWN = (
    "made no step",
    "made forty million steps",
    "names unknown sources",
    "goes on past the end",
    "stops without an end token",
    "finishes for an unknown reason",
    "tells log-probabilities that are no numbers",
    "was preempted more than can be",
    "has a huge name",
    "fails inside",
    "is full beyond all numbers",
    "opens twice",
)
"""Lies tried by every test run; `make verify` tries them all."""

WAITS = frozenset({"never commits", "never commits again", "shows life without end", "takes every step to be long"})
"""Lies that look like a verifier with sessions waiting for memory: they may keep a text until its caller's deadline,
even beside an honest verifier."""

FAILS = frozenset({"fails inside", "fails inside before it opens"})
"""A verifier whose model fails on a text returns INTERNAL; if no other verifier succeeds, the request ends with it."""

SAMPLED = {"temperature": 0.8, "seed": 5}
ASKS: dict[str, Mapping[str, Any]] = {
    "greedy": {"max_tokens": 40, "ignore_end_token": True},
    "sampled": {"max_tokens": 40, "ignore_end_token": True, "sampling": SAMPLED},
    "with log-probabilities": {"max_tokens": 40, "ignore_end_token": True, "sampling": SAMPLED, "logprobs": 2},
    "to an end token": {"max_tokens": 100, "sampling": SAMPLED, "stop_tokens": range(3, 320, 16)},
    "to the context's end": {"ignore_end_token": True, "generated_tokens": [9] * 220, "sampling": SAMPLED},
}
SILENCE_SECONDS = 1.0
FAILOVER_SECONDS = 1.5

DEADLINE = 8.0
MAX_SECONDS = 7.0
"""Time limit in seconds of a text whose verifier lies: silence, failover, and the text itself, on a busy machine."""

MAX_PULSE = 1.0
MAX_LOG_BYTES = 100_000
MAX_GROWTH_MIB = 64.0


@dataclass(frozen=True)
class Honest:
    """The honest verifier of the tests, and its texts."""

    services: Stack
    wanted: dict[str, Outcome]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def honest(models: Models) -> AsyncIterator[Honest]:
    async with stack(models.target, None) as services:
        asked = await asyncio.gather(*(ask(services.stub, 120.0, fields) for fields in ASKS.values()))
        yield Honest(services, dict(zip(ASKS, asked, strict=True)))


@asynccontextmanager
async def orchestrator_with(
    services: Stack, verifiers: Sequence[str], connect: Callable[[str], grpc.aio.Channel] = connect
) -> AsyncIterator[Any]:
    """Yield a stub of another orchestrator with these verifiers."""
    peers = Peers(Pods(verifiers, connect=connect), silence_seconds=SILENCE_SECONDS, failover_seconds=FAILOVER_SECONDS)
    async with AsyncExitStack() as exits:
        address, _ = await exits.enter_async_context(served(GenerationServicer(Catalog.of(services.model, peers))))
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(address))
        yield generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.mark.parametrize("alone", [False, True], ids=["beside an honest one", "alone"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHOWN else pytest.mark.verify) for name in LIES]
)
async def test_a_lying_verifier_is_found_out(honest: Honest, name: str, alone: bool) -> None:
    await lies(honest, name, alone)


@pytest.mark.verify
@pytest.mark.parametrize("name", SHOWN)
async def test_it_is_by_mutual_tls(honest: Honest, name: str, tmp_path: Path) -> None:
    """A certificate proves identity, not honesty."""
    await lies(honest, name, True, Authority(tmp_path / "ca"))


async def lies(honest: Honest, name: str, alone: bool, authority: Authority | None = None) -> None:
    services, wanted = honest.services, honest.wanted
    liar = LyingVerifier(LIES[name], services.verifiers[0].address)
    before = resident_mib()
    with log_volume.measured() as volume:
        async with AsyncExitStack() as exits:
            tls = None if authority is None else authority.files("verifier")
            reach = connect if authority is None else SecureConnections(authority.files("orchestrator"), None, {})
            address, _ = await exits.enter_async_context(served(liar, tls))
            verifiers = [address] if alone else [address, services.verifiers[0].address]
            stub = await exits.enter_async_context(orchestrator_with(services, verifiers, reach))
            pulse = await exits.enter_async_context(pulse_of(stub))
            asked = await asyncio.gather(*(ask(stub, DEADLINE, fields) for fields in ASKS.values()))
        await until(lambda: services.idle)
    growth = resident_mib() - before
    faults = {
        each: got.fault(wanted[each].text, MAX_SECONDS, refusable=True) for each, got in zip(ASKS, asked, strict=True)
    }
    excused = "DEADLINE_EXCEEDED" if name in WAITS else "INTERNAL" if name in FAILS and alone else ""
    for each, got in zip(ASKS, asked, strict=True):
        if got.status == excused and len(got.details) < MAX_DETAILS:
            faults[each] = ""
    print(
        f"\n{name}, {'alone' if alone else 'beside'}: "
        + ", ".join(f"{got.status} {got.seconds:.1f} s" for got in asked)
        + f", {pulse}, {volume.bytes} bytes of log, {growth:+.0f} MiB, {liar.sessions} sessions"
    )
    assert {each: fault for each, fault in faults.items() if fault} == {}
    assert liar.sessions > 0
    assert volume.bugs == []
    assert volume.bytes < MAX_LOG_BYTES
    assert pulse.seconds < MAX_PULSE
    assert growth < MAX_GROWTH_MIB


async def test_an_answer_that_was_damaged_on_its_way_begins_no_text(honest: Honest) -> None:
    """No verifier serves the model that the damaged response names, so a text begun with it could not fail over."""
    liar = LyingVerifier(LIES["is damaged on its way"], honest.services.verifiers[0].address)
    async with AsyncExitStack() as exits:
        address, _ = await exits.enter_async_context(served(liar))
        verifiers = [address, honest.services.verifiers[0].address]
        stub = await exits.enter_async_context(orchestrator_with(honest.services, verifiers))
        asked = await asyncio.gather(*(ask(stub, DEADLINE, fields) for fields in ASKS.values()))
    assert [got.text for got in asked] == [each.text for each in honest.wanted.values()]
    assert liar.sessions > 0
