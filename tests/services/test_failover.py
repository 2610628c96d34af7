"""Verifiers killed, drained or restarted in mid-stream, alone or with their drafts: the client sees at most a pause,
and exactly the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from specdec.client.errors import from_rpc
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.working_memory import MAX_STEP_CANDIDATES
from specdec.v2 import generation_pb2, model_pb2
from tests.services.conftest import Directories
from tests.services.interrupted import (
    ALWAYS,
    PROMPT,
    WARM,
    Gates,
    Reader,
    changes,
    drafted,
    drafting,
    same,
    sampler,
    serving,
    slow_target,
    undisturbed,
)
from tests.services.test_faults import rest_of
from tests.stack import request_of, stack, until
from verifier_service.servicer import VerifierLimits

PENALISED = {
    "temperature": 0.8,
    "seed": 9,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.1,
}

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 100, "speculation": ALWAYS},
    "penalties": {"sampling": PENALISED, "logprobs": 3},
    "end token": {"sampling": WARM, "min_tokens": 70, "ignore_end_token": False},
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_killed_verifier_is_replaced(directories: Directories, name: str) -> None:
    fields = {"max_tokens": 80, "ignore_end_token": True} | REQUESTS[name]
    want = await undisturbed(directories, **fields)
    async with stack(directories.target, directories.near, verifiers=2, target_delay=slow_target) as services:
        reader = Reader(services, **fields)
        await reader.read(10)
        await services.verifiers[serving(services)].stop()
        before = len(reader.responses)
        got = await reader.rest()
        same(directories, want, got, fields.get("sampling", {}))
        assert changes(got.finish.speculation) == {"verifier_lost": 1}
        assert got.finish.reproducible
        if fields.get("speculation") == ALWAYS:
            assert drafted(reader.responses[before + 5 :])  # its draft has moved with it
            assert got.finish.speculation.undrafted_reason in ("", "late")
        await until(lambda: services.idle)


async def test_a_stop_string_ends_a_text_that_has_moved(directories: Directories) -> None:
    """Part of the text is decoded before the verifier is lost, and part after."""
    fields: dict[str, Any] = {"max_tokens": 120, "ignore_end_token": True, "sampling": WARM}
    whole = await undisturbed(directories, **fields)
    at = next(i for i in range(60, len(whole.text)) if whole.text.find(whole.text[i : i + 4]) == i)
    fields["stop"] = [whole.text[at : at + 4]]
    want = await undisturbed(directories, **fields)
    assert want.finish.stop
    async with stack(directories.target, directories.near, verifiers=2, target_delay=slow_target) as services:
        reader = Reader(services, **fields)
        await reader.read(len(want.tokens) // 2)
        await services.verifiers[serving(services)].stop()
        got = await reader.rest()
        same(directories, want, got, WARM)
        assert changes(got.finish.speculation) == {"verifier_lost": 1}


async def test_a_text_survives_every_pod_in_turn(directories: Directories) -> None:
    """Verifier and draft are killed and restarted in turn, so that the text returns to pods that it had before."""
    fields: dict[str, Any] = {"max_tokens": 140, "ignore_end_token": True, "sampling": WARM}
    want = await undisturbed(directories, **fields)
    async with stack(directories.target, directories.near, verifiers=2, drafts=2, target_delay=slow_target) as services:
        reader = Reader(services, **fields)
        for round_ in range(1, 3):
            await reader.read(30 * round_)
            await until(lambda: any(pod.drafter.slots_used for pod in services.drafts))  # the draft returns by itself
            for pod in (services.verifiers[serving(services)], services.drafts[drafting(services)]):
                await pod.stop()
                await pod.start()
        got = await reader.rest()
        same(directories, want, got, WARM)
        assert got.finish.speculation.failover_events["verifier_lost"] == 2
        assert got.finish.speculation.failover_events["draft_lost"] == 2
        await until(lambda: services.idle)


async def test_a_verifier_that_is_alone_is_waited_for(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 80, "ignore_end_token": True, "sampling": WARM}
    want = await undisturbed(directories, **fields)
    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        reader = Reader(services, **fields)
        await reader.read(20)
        (pod,) = services.verifiers
        await pod.stop()
        (peer,) = services.peers.verifiers
        await until(lambda: peer.breaker.state != "closed")
        await pod.start()
        got = await reader.rest()
        same(directories, want, got, WARM)
        assert changes(got.finish.speculation) == {"verifier_lost": 1}


async def test_a_verifier_that_is_drained_hands_over(directories: Directories) -> None:
    """The drained verifier ends its sessions at its deadline; until then it takes no new ones."""
    fields: dict[str, Any] = {"max_tokens": 200, "ignore_end_token": True, "sampling": WARM}
    want = await undisturbed(directories, **fields)
    async with stack(directories.target, directories.near, verifiers=2, target_delay=slow_target) as services:
        reader = Reader(services, **fields)
        await reader.read(20)
        drained = serving(services)
        draining = asyncio.create_task(services.verifiers[drained].stop(0.3))
        other = await services.generate(PROMPT, **(fields | {"max_tokens": 20}))
        assert list(other.tokens) == list(want.tokens)[:20]
        await draining
        got = await reader.rest()
        same(directories, want, got, WARM)
        assert changes(got.finish.speculation) == {"verifier_lost": 1}


async def test_a_verifier_lost_for_good_is_said_so(directories: Directories) -> None:
    async with stack(directories.target, directories.near, verifiers=2, failover_seconds=0.6) as services:
        call = services.stub.Generate(request_of(PROMPT, max_tokens=250, ignore_end_token=True))
        assert await call.read()
        for pod in services.verifiers:
            await pod.stop()
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await rest_of(call)
    assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
    assert from_rpc(lost.value).reason == "VERIFIER_LOST"
    for pod in services.verifiers:
        assert f"{pod.address} (" in str(lost.value.details())
    assert from_rpc(lost.value).request_id


async def test_a_deadline_holds_while_a_verifier_is_looked_for(directories: Directories) -> None:
    async with stack(directories.target, None) as services:
        await services.verifiers[0].stop()
        request = generation_pb2.CompleteRequest(request=request_of(PROMPT, max_tokens=10))
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await services.stub.Complete(request, timeout=0.5)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_cancel_ends_the_search_for_a_verifier(directories: Directories) -> None:
    async with stack(directories.target, directories.near) as services:
        await services.generate(PROMPT, max_tokens=20, speculation=ALWAYS)  # connected to all pods
        before = len(asyncio.all_tasks())
        reader = Reader(services, max_tokens=250, ignore_end_token=True)
        await reader.read(1)
        await services.verifiers[0].stop()
        (peer,) = services.peers.verifiers
        await until(lambda: peer.breaker.state != "closed")
        reader.cancel()
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_rejection_survives_both(directories: Directories) -> None:
    """Under REJECTION tokens depend on the offered candidates, but none is lost, and none is repeated."""
    async with stack(directories.target, directories.near, verifiers=2, drafts=2, target_delay=slow_target) as services:
        reader = Reader(
            services,
            max_tokens=120,
            ignore_end_token=True,
            rule=model_pb2.ACCEPTANCE_RULE_REJECTION,
            sampling={"temperature": 1.0, "seed": 3},
        )
        await reader.read(30)
        await services.verifiers[serving(services)].stop()
        await reader.read(60)
        await services.drafts[drafting(services)].stop()
        got = await reader.rest()
        assert len(got.tokens) == got.finish.usage.completion_tokens == 120
        assert not got.finish.reproducible


async def test_many_texts_move(directories: Directories) -> None:
    """Every session of a verifier finds a place at the other, whatever may be waiting there."""
    fields: dict[str, Any] = {"max_tokens": 80, "ignore_end_token": True, "sampling": WARM}
    want = await undisturbed(directories, **fields)
    async with stack(
        directories.target, directories.near, verifiers=2, drafts=2, target_delay=slow_target, capacity=1472
    ) as services:
        readers = [Reader(services, **fields) for _ in range(16)]
        await asyncio.gather(*(reader.read(5) for reader in readers))
        assert all(pod.loop.stats.running for pod in services.verifiers)  # they were spread
        await services.verifiers[0].stop()
        answers = await asyncio.gather(*(reader.rest() for reader in readers))
        moved = sum(answer.finish.speculation.failover_events.get("verifier_lost", 0) for answer in answers)
        assert moved >= 4
        for answer in answers:
            directories.oracle.same(PROMPT, list(want.tokens), list(answer.tokens), sampler(WARM))
        await until(lambda: services.idle)


async def test_who_moves_is_not_turned_away(directories: Directories) -> None:
    """Two texts that lost their verifier may wait at the other, though its only waiting place is taken."""
    limits = VerifierLimits(max_waiting=1)
    text = [3 + i % 200 for i in range(2 * BLOCK + 20)]  # as large as the memory

    async def complete(tenant: str) -> generation_pb2.Completion:
        """Run the text as its own tenant, so that no verifier is preferred for its cached prefix."""
        return await services.generate(text, max_tokens=20, ignore_end_token=True, tenant=tenant)

    gates = Gates()
    async with stack(
        directories.target,
        None,
        verifiers=2,
        target_delay=gates,
        verifier_limits=limits,
        capacity=MAX_STEP_CANDIDATES + 4 * BLOCK,
        stuck_seconds=60,
    ) as services:
        want = await complete("first")
        assert list((await complete("second")).tokens) == list(want.tokens)  # each pod has made steps, and has a gate
        with gates.of(services.verifiers[0]).closed(), gates.of(services.verifiers[1]).closed():
            texts = []
            for number in range(4):
                texts.append(asyncio.create_task(complete(str(number))))
                await until(lambda: sum(p.service.capacity().sessions for p in services.verifiers) == number + 1)  # noqa: B023
            assert [pod.service.capacity().sessions for pod in services.verifiers] == [2, 2]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await complete("one too many")
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await services.verifiers[0].stop()
            await until(lambda: services.verifiers[1].service.capacity().sessions == 4)
        answers = await asyncio.gather(*texts)
    assert [list(answer.tokens) for answer in answers] == 4 * [list(want.tokens)]
    assert sum(answer.finish.speculation.failover_events["verifier_lost"] for answer in answers) == 2
