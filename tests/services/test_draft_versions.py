"""Versions of a draft change no token: while texts move between two of them, and while new ones are tried, promoted and
rolled back."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import safetensors.torch
import torch

from draft_service.draft_loop import DraftLoop
from draft_service.drafter import Drafter
from draft_service.forgotten import Forgotten
from draft_service.language_model import LanguageModelDrafter
from draft_service.servicer import DraftLimits, DraftServicer
from draft_service.session import DrafterSession, RootMove
from draft_service.version import State, Version
from draft_service.version_folder import VersionsFolder
from draft_service.version_follower import VersionFollower
from draft_service.version_loading import LoadedVersion, VersionLoader
from draft_service.version_trial import TrialLimits
from draft_service.versions import VersionedDrafter
from orchestrator.models.catalog import Catalog
from orchestrator.servicer import GenerationServicer
from specdec.decoding.sampling import Rule
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.learned_from import LEARNED_FROM, LearnedFrom, tenant_digest
from specdec.engine.model_directory import COMPLETE, WEIGHTS, ModelDirectory
from specdec.engine.placement import Placement
from specdec.local import DEMO
from specdec.local.child import Child, stop
from specdec.serving.identity import identity_of
from specdec.serving.watched import Watched
from specdec.v2 import draft_pb2, draft_pb2_grpc, generation_pb2_grpc, model_pb2
from tests.services.conftest import Directories
from tests.services.test_distribution import PROMPT, check
from tests.services.test_equality import prompts, run_all, sampler
from tests.stack import ALWAYS, CAPACITY, Stack, peers_at, served, stack, torch_engine

pytestmark = pytest.mark.verify


class Alternating(Drafter):
    """Moves every text from one version to the other at each commit."""

    rules = frozenset({Rule.COUPLED, Rule.REJECTION})

    def __init__(self, versions: Sequence[LanguageModelDrafter]) -> None:
        self._versions = versions
        self._of: dict[DrafterSession, int] = {}
        self.moves = 0

    def open(self, session: DrafterSession) -> None:
        self._of[session] = 0
        self._versions[0].open(session)

    def commit(self, session: DrafterSession, move: RootMove) -> None:
        own = self._versions[self._of[session]]
        own.commit(session, move)
        own.close(session)
        session.abandon_frontier()
        self._of[session] = 1 - self._of[session]
        self._versions[self._of[session]].open(session)
        self.moves += 1

    def close(self, session: DrafterSession) -> None:
        self._versions[self._of.pop(session)].close(session)

    def best_logprob(self, session: DrafterSession) -> float:
        return self._versions[self._of[session]].best_logprob(session)

    def expand(self, sessions: Sequence[DrafterSession]) -> Mapping[DrafterSession, Exception]:
        failed: dict[DrafterSession, Exception] = {}
        for number, version in enumerate(self._versions):
            if own := [session for session in sessions if self._of[session] == number]:
                failed |= version.expand(own)
        return failed


@asynccontextmanager
async def drafted_by(
    directories: Directories, made: Callable[[ExitStack], tuple[Drafter, CpuEngine]], target_delay: float
) -> AsyncIterator[tuple[Stack, DraftLoop]]:
    """Run services with a draft of our own making; steps of the target take `target_delay` seconds more."""
    async with stack(directories.target, None, target_delay=lambda: time.sleep(target_delay)) as services:
        with ExitStack() as exits:
            drafter, engine = made(exits)
            loop = DraftLoop(drafter)
            loop.start()
            service = DraftServicer(
                loop, identity_of(ModelDirectory(directories.near), engine, CAPACITY), DraftLimits()
            )
            async with served(service) as (draft, _):
                generation = GenerationServicer(Catalog.of(services.model, peers_at(services, draft)))
                async with served(generation) as (address, _), grpc.aio.insecure_channel(address) as channel:
                    yield replace(services, stub=generation_pb2_grpc.GenerationServiceStub(channel)), loop
            await service.close()


@asynccontextmanager
async def alternating(directories: Directories, target_delay: float) -> AsyncIterator[tuple[Stack, Alternating]]:
    """Run services whose draft alternates between a near and another model."""

    def made(exits: ExitStack) -> tuple[Drafter, CpuEngine]:
        paths = (directories.near, directories.other)
        engines = [exits.enter_context(torch_engine(path, capacity=CAPACITY, exact=False)) for path in paths]
        return Alternating([LanguageModelDrafter(engine) for engine in engines]), engines[0]

    async with drafted_by(directories, made, target_delay) as (services, loop):
        assert isinstance(loop.drafter, Alternating)
        yield services, loop.drafter


async def test_no_token_depends_on_the_version_that_drafts(directories: Directories) -> None:
    requests = [
        (prompt, {"temperature": temperature, "seed": 5 + number})
        for number, (prompt, temperature) in enumerate(itertools.product(prompts(4), (0.0, 0.9)))
    ]
    async with alternating(directories, 0.02) as (services, drafter):
        plain, _, _ = await run_all(services, requests, 40, at_once=1, plain=True)
        for _ in range(10):  # on a busy machine a draft may be late for all of these short texts
            drafted, offered, accepted = await run_all(services, requests, 40, speculation=ALWAYS)
            for (prompt, sampling), want, got in zip(requests, plain, drafted, strict=True):
                directories.oracle.same(prompt, want, got, sampler(sampling), f"{sampling}")
            if accepted:
                break
        assert drafter.moves > 20
    assert 0 < accepted < offered


@pytest.mark.parametrize("rule", ["COUPLED", "REJECTION"])
async def test_sampled_tokens_follow_the_target_across_swaps(directories: Directories, rule: str) -> None:
    """Texts change versions after each commit, so in mid-text. The false-alarm probability is as in
    `test_distribution.py`, which also has the negative control."""
    async with alternating(directories, 0.04) as (services, drafter):
        sources = await check(services, directories, PROMPT, rule, ALWAYS)
        assert drafter.moves > 100
    assert sources[model_pb2.TOKEN_SOURCE_REMOTE_DRAFT] > 15
    assert sources[model_pb2.TOKEN_SOURCE_CORRECTION] > 5


class Versions:
    """The folder of versions of a running draft service."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(
        self,
        name: str,
        source: Path,
        change: Callable[[dict[str, torch.Tensor]], None] | None = None,
        *,
        truncated: bool = False,
        tenant: str = "",
    ) -> None:
        """Add a version, a model with changed weights, to the folder atomically. If a tenant is given, the version has
        learned from it."""
        writing = copied(source, self._folder / f".{name}", change)
        if tenant:
            learned_from = LearnedFrom().with_texts({tenant_digest(tenant): 1.0})
            (writing / LEARNED_FROM).write_text(json.dumps(learned_from.content))
        if truncated:
            (writing / WEIGHTS).write_bytes((writing / WEIGHTS).read_bytes()[:-1000])
        (writing / COMPLETE).write_text("")
        writing.rename(self._folder / name)


def copied(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None] | None = None) -> Path:
    """Copy a model, with changed weights."""
    shutil.copytree(source, target)
    if change is not None:
        tensors = safetensors.torch.load_file(target / WEIGHTS)
        change(tensors)
        safetensors.torch.save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    return target


def drawn(seed: int) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return a function that replaces weights by random ones of the same deviation."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in tensors.items():
            if tensor.dim() > 1:
                noise = torch.randn(tensor.shape, generator=generator)
                tensors[name] = (noise * tensor.float().std()).to(tensor.dtype)

    return change


def poison(tensors: dict[str, torch.Tensor]) -> None:
    name = next(iter(sorted(tensors)))
    tensors[name].view(-1)[-1] = math.nan


async def test_versions_are_tried_under_load(directories: Directories, tmp_path: Path) -> None:
    """A better version is promoted, bad ones are rolled back or refused, and no text changes. Once its tenant is
    forgotten, the promoted version is replaced by the first."""
    limits, forgotten = TrialLimits(share=0.5, tokens=6000), Forgotten(tmp_path)

    started = copied(directories.near, tmp_path / ".first", drawn(1))  # a name that is not looked at

    def made(exits: ExitStack) -> tuple[Drafter, CpuEngine]:
        engine = exits.enter_context(torch_engine(started, capacity=CAPACITY, exact=False))
        first = LoadedVersion(LanguageModelDrafter(engine), "1" * 64)
        return VersionedDrafter("first", first, limits, forgotten), engine

    requests = [(prompt, {"temperature": 0.8, "seed": seed}) for seed, prompt in enumerate(prompts(8))]
    async with drafted_by(directories, made, 0.004) as (services, loop):
        drafter = loop.drafter
        assert isinstance(drafter, VersionedDrafter)
        first = ModelDirectory(started)
        placement = Placement("torch", kv_tokens=CAPACITY, is_draft=True)
        # Tests share a machine, so times mean little here.
        loader = VersionLoader(first, first.context, placement, 1, 4, 50.0)
        follower = VersionFollower(Watched(VersionsFolder(tmp_path)), loader, loop, drafter, first.path)
        follower.start()
        versions = Versions(tmp_path)
        want, _, _ = await run_all(services, requests, 40, at_once=1, plain=True, ignore_end_token=True)

        async def until(name: str, state: State) -> Version:
            """Send requests until a version is in a state; return it."""
            async with asyncio.timeout(120):
                while True:
                    found = [version for version in drafter.known if (version.name, version.state) == (name, state)]
                    if found:
                        return found[0]
                    got, _, _ = await run_all(services, requests, 40, speculation=ALWAYS, ignore_end_token=True)
                    for (prompt, sampling), plain, drafted in zip(requests, want, got, strict=True):
                        directories.oracle.same(prompt, plain, drafted, sampler(sampling), f"{name}, {sampling}")

        versions.add("v1", directories.near, tenant="acme")
        await until("v1", State.SERVING)
        versions.add("v2", directories.near, drawn(2))
        worse = await until("v2", State.WORSE)
        assert worse.committed < limits.tokens
        versions.add("v3", directories.near, poison)
        versions.add("v4", directories.near, truncated=True)
        assert "not finite" in (await until("v3", State.REFUSED)).reason
        assert "must have" in (await until("v4", State.REFUSED)).reason
        assert drafter.serving.name == "v1"
        assert drafter.serving.guessed > 0.2 * drafter.serving.committed
        forgotten.add("acme")
        assert await loop.call(drafter.forget) == ["v1"]
        await until("v1", State.FORGOTTEN)
        assert drafter.serving.name == "first"
        committed = drafter.serving.committed
        got, _, _ = await run_all(services, requests, 40, speculation=ALWAYS, ignore_end_token=True)
        for (prompt, sampling), plain, drafted in zip(requests, want, got, strict=True):
            directories.oracle.same(prompt, plain, drafted, sampler(sampling), f"first again, {sampling}")
        assert drafter.serving.committed > committed
        await asyncio.to_thread(follower.close)


async def test_a_draft_by_itself_tries_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to an opening names the version that drafts for the session."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder := tmp_path / "versions").mkdir()
    options = ("--versions", str(folder), "--canary", "0.5", "--canary-slowdown", "50", "--threads", "1")
    child = Child.start("draft", "-m", "draft_service", "--model", str(DEMO / "draft"), "--port", "0", *options)
    try:
        address = await asyncio.to_thread(child.until_ready, 120)
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
            Versions(folder).add("v1", DEMO / "draft", drawn(1))
            async with asyncio.timeout(120):
                while (versions := (await stub.GetStats(draft_pb2.DraftServiceGetStatsRequest())).versions)[
                    -1
                ].state != (draft_pb2.DRAFT_VERSION_STATE_CANARY):
                    await asyncio.sleep(0.1)
            opened = [await opening(stub) for _ in range(40)]
        fingerprints = {each.name: each.model_fingerprint for each in versions}
        assert list(fingerprints) == ["draft", "v1"]
        assert {each.version for each in opened} == {"draft", "v1"}  # all are alike with probability 2 ** -39
        assert all(each.identity.model_fingerprint == fingerprints[each.version] for each in opened)
    finally:
        stop([child])


async def opening(stub: Any) -> draft_pb2.DraftOpened:
    """Open a session and end it; return the answer to the opening."""
    vocabulary = ModelDirectory(DEMO / "draft").vocabulary
    message = draft_pb2.DraftOpen(prompt_tokens=[5, 6, 7], max_tokens=10, vocabulary_size=vocabulary)
    call = stub.Draft()
    await call.write(draft_pb2.DraftRequest(open=message))
    opened: draft_pb2.DraftOpened = (await call.read()).opened
    call.cancel()
    return opened
