"""Versions of a draft change no token: while texts move between two of them, and while new ones are tried, promoted and
rolled back."""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import safetensors.torch
import torch

from demo.prompts import held_out
from draft_service.draft_loop import DraftLoop
from draft_service.drafter import Drafter
from draft_service.language_model import LanguageModelDrafter
from draft_service.servicer import DraftLimits, DraftServicer
from draft_service.session import DrafterSession, RootMove
from orchestrator.models.catalog import Catalog
from orchestrator.servicer import GenerationServicer
from specdec.client import Client
from specdec.decoding.sampling import Rule
from specdec.engine.model_directory import COMPLETE, WEIGHTS, ModelDirectory
from specdec.local import DEMO
from specdec.local import Stack as Processes
from specdec.serving.identity import identity_of
from specdec.v2 import draft_pb2, draft_pb2_grpc, generation_pb2_grpc, model_pb2
from tests.services.conftest import Directories
from tests.services.test_distribution import PROMPT, check, expected
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
async def alternating(directories: Directories, target_delay: float) -> AsyncIterator[tuple[Stack, Alternating]]:
    """Run services whose draft alternates between a near and another model; steps of the target take `target_delay`
    seconds more."""
    async with stack(directories.target, None, target_delay=lambda: time.sleep(target_delay)) as services:
        with ExitStack() as exits:
            paths = (directories.near, directories.other)
            engines = [exits.enter_context(torch_engine(path, capacity=CAPACITY, exact=False)) for path in paths]
            drafter = Alternating([LanguageModelDrafter(engine) for engine in engines])
            loop = DraftLoop(drafter)
            loop.start()
            identity = identity_of(ModelDirectory(directories.near), engines[0], CAPACITY)
            service = DraftServicer(loop, identity, DraftLimits())
            async with served(service) as (draft, _):
                generation = GenerationServicer(Catalog.of(services.model, peers_at(services, draft)))
                async with served(generation) as (address, _), grpc.aio.insecure_channel(address) as channel:
                    yield replace(services, stub=generation_pb2_grpc.GenerationServiceStub(channel)), drafter
            await service.close()


async def test_no_token_depends_on_the_version_that_drafts(directories: Directories) -> None:
    requests = [
        (prompt, {"temperature": temperature, "seed": 5 + number})
        for number, (prompt, temperature) in enumerate(itertools.product(prompts(4), (0.0, 0.9)))
    ]
    async with alternating(directories, 0.004) as (services, drafter):
        plain, _, _ = await run_all(services, requests, 40, at_once=1, plain=True)
        drafted, offered, accepted = await run_all(services, requests, 40, speculation=ALWAYS)
        assert drafter.moves > 20
    for (prompt, sampling), want, got in zip(requests, plain, drafted, strict=True):
        directories.oracle.same(prompt, want, got, sampler(sampling), f"{sampling}")
    assert 0 < accepted < offered


@pytest.mark.parametrize("rule", ["COUPLED", "REJECTION"])
async def test_sampled_tokens_follow_the_target_across_swaps(directories: Directories, rule: str) -> None:
    """Texts change versions after each commit, so in mid-text; false-alarm probability as in `test_distribution.py`,
    which also has the negative control."""
    async with alternating(directories, 0.04) as (services, drafter):
        sources = await check(services, expected(directories, PROMPT), PROMPT, rule, ALWAYS)
        assert drafter.moves > 100
    assert sources[model_pb2.TOKEN_SOURCE_REMOTE_DRAFT] > 15
    assert sources[model_pb2.TOKEN_SOURCE_CORRECTION] > 5


# --- processes, with the demo pair ------------------------------------------------------------------

TOKENS = 40
SHARE = 0.5
CANARY_TOKENS = 6000
"""Tokens within which a version of random weights must be rolled back."""

OPTIONS: dict[str, Any] = {"max_tokens": TOKENS, "ignore_end_token": True, "temperature": 0.8}


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
    ) -> None:
        """Add a version: a model with changed weights, in place at once."""
        writing = copied(source, self._folder / f".{name}", change)
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


class Traffic:
    """Requests that come again and again; their tokens must stay the same."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asked = [{"tokens": tokens, "seed": seed, **OPTIONS} for seed, tokens in enumerate(held_out(12, 48))]
        self._plain = [self._tokens(request, speculation="off") for request in self._asked]

    def _tokens(self, request: dict[str, Any], **options: Any) -> list[int]:
        return self._client.complete(**request, **options).completions[0].tokens

    def until(self, condition: Callable[[], bool], seconds: float = 300.0) -> None:
        """Send requests, four at a time, until the condition holds."""
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(4) as pool:
            while not condition():
                assert time.monotonic() < deadline, "the condition does not hold in time"
                drafted = list(
                    pool.map(lambda request: self._tokens(request, drafters=["remote"], forced=True), self._asked)
                )
                assert drafted == self._plain


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Processes, Versions]]:
    """Run the demo's target with a draft of random weights that follows a folder of versions."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "versions"
    folder.mkdir()
    first = copied(DEMO / "draft", tmp_path / "untrained", drawn(1))
    options = ("--versions", str(folder), "--canary", str(SHARE), "--canary-tokens", str(CANARY_TOKENS))
    # The demo's draft takes a millisecond: on a busy machine times say little.
    with Processes.start(DEMO / "target", str(first), draft_options=(*options, "--canary-slowdown", "50")) as running:
        yield running, Versions(folder)


@pytest.mark.timeout(1200)
def test_a_better_version_is_promoted_and_bad_ones_are_not(services: tuple[Processes, Versions]) -> None:
    running, versions = services
    with Client(running.address) as client, grpc.insecure_channel(running.addresses["draft"]) as channel:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)

        def told(name: str) -> draft_pb2.DraftVersion:
            """Return what the draft says of a version; an empty one if it knows none of this name."""
            stats = stub.GetStats(draft_pb2.DraftServiceGetStatsRequest())
            return next((each for each in stats.versions if each.name == name), draft_pb2.DraftVersion())

        def is_now(name: str, state: str) -> bool:
            return told(name).state == draft_pb2.DraftVersionState.Value(f"DRAFT_VERSION_STATE_{state}")

        traffic = Traffic(client)
        traffic.until(lambda: is_now("untrained", "SERVING"))
        versions.add("v1", DEMO / "draft")
        traffic.until(lambda: is_now("v1", "SERVING"))
        assert is_now("untrained", "RETIRED") or is_now("untrained", "ENDED")
        before = stub.GetStats(draft_pb2.DraftServiceGetStatsRequest())
        assert before.identity.model_fingerprint == told("v1").model_fingerprint
        assert before.version_outcomes["promoted"] == 1

        versions.add("v2", DEMO / "draft", drawn(2))
        traffic.until(lambda: is_now("v2", "WORSE"))
        assert 0 < told("v2").committed_tokens <= CANARY_TOKENS
        assert "guessed" in told("v2").reason

        versions.add("v3", DEMO / "draft", poison)
        versions.add("v4", DEMO / "draft", truncated=True)
        traffic.until(lambda: is_now("v3", "REFUSED") and is_now("v4", "REFUSED"))
        assert "not finite" in told("v3").reason
        assert is_now("v1", "SERVING")
        assert told("v1").guessed_tokens > 0.2 * told("v1").committed_tokens
        traffic.until(lambda: is_now("untrained", "ENDED"))


async def test_an_open_session_says_its_version(services: tuple[Processes, Versions]) -> None:
    running, _ = services
    identity = ModelDirectory(DEMO / "draft")
    message = draft_pb2.DraftOpen(prompt_tokens=[5, 6, 7], max_tokens=10, vocabulary_size=identity.vocabulary)

    async def one() -> AsyncIterator[draft_pb2.DraftRequest]:
        yield draft_pb2.DraftRequest(open=message)
        await asyncio.sleep(60)

    async with grpc.aio.insecure_channel(running.addresses["draft"]) as channel:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        call = stub.Draft(one())
        opened = (await call.read()).opened
        call.cancel()
    assert opened.version == "untrained"
    assert len(opened.identity.model_fingerprint) == 64
