"""A model is rolled out by its file: every text is wholly by one revision, and no request fails."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from orchestrator.models import followed_catalog
from orchestrator.models.file import ModelsFile
from orchestrator.models.followed_catalog import FollowedCatalog
from orchestrator.models.revision import Revision
from orchestrator.pods.peers import Peers, PeerSettings
from orchestrator.servicer import GenerationServicer
from specdec.client import AsyncClient, InvalidRequest, NotFound
from tests.services.conftest import Directories
from tests.services.interrupted import Gate
from tests.stack import Pod, Stack, long_steps, running, stack, until

OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "ignore_end_token": True, "timeout": 60}
LONG: dict[str, Any] = OPTIONS | {"max_tokens": 100, "speculation": "off"}
"""A text that is far from its end when its first tokens arrive."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let changes of the file take effect soon."""
    monkeypatch.setattr(followed_catalog, "RELOAD_SECONDS", 0.1)


class Rollout:
    """The file of models, and orchestrators that follow it."""

    def __init__(self, file: Path, stacks: Mapping[str, tuple[Path, Stack]]) -> None:
        """`stacks`: directory and pods by revision."""
        self.fronts: list[Pod] = []
        self.catalogs: list[FollowedCatalog] = []
        self._file = file
        self._stacks = stacks

    def write(self, shares: Mapping[str, float], drafts: Mapping[str, list[str]] | None = None) -> None:
        """Write the model `m` with these revisions and traffic shares."""
        revisions = {
            name: {
                "directory": str(self._stacks[name][0]),
                "verifiers": [pod.address for pod in self._stacks[name][1].verifiers],
                "drafts": (drafts or {}).get(name, []),
                "share": share,
            }
            for name, share in shares.items()
        }
        self._file.with_suffix(".new").write_text(yaml.safe_dump({"models": {"m": {"revisions": revisions}}}))
        os.replace(self._file.with_suffix(".new"), self._file)

    async def becomes(self, **shares: float) -> None:
        """Write new shares, and wait until they apply."""
        self.write(shares)
        await until(lambda: all({each.name: each.share for each in one} == shares for one in self.catalogs))


@asynccontextmanager
async def rollout(
    tmp_path: Path, stacks: Mapping[str, tuple[Path, Stack]], *, fronts: int = 1, **shares: float
) -> AsyncIterator[Rollout]:
    found = Rollout(tmp_path / "models.yaml", stacks)
    found.write(shares)
    async with AsyncExitStack() as exits:
        for _ in range(fronts):
            settings = PeerSettings(partial(Peers, patience_seconds=0.02))
            catalog = FollowedCatalog(ModelsFile(tmp_path / "models.yaml"), settings)
            front = GenerationServicer(catalog)
            await front.start()
            found.catalogs.append(catalog)
            found.fronts.append(await exits.enter_async_context(running(Pod(front))))
        yield found


async def tokens_of(client: AsyncClient, seed: int, **options: Any) -> tuple[str, list[int]]:
    """Return (revision, tokens) of one text."""
    done = await client.complete("once upon a time", seed=seed, **{**OPTIONS, **options})
    assert done.resolved is not None
    return done.resolved.model, done.completions[0].tokens


def addresses_of(revision: Revision) -> list[str]:
    return [str(pod) for pod in revision.peers.drafts or ()]


async def test_a_rollout_and_the_way_back_under_load(directories: Directories, tmp_path: Path) -> None:
    """Shares move from a to b and back while two orchestrators serve requests: no request fails, each text equals its
    revision's own text, and once all orchestrators have the last shares, all texts follow them.
    """
    async with (
        stack(directories.target, None) as a,
        stack(directories.near, None) as b,
        rollout(tmp_path, {"a": (directories.target, a), "b": (directories.near, b)}, fronts=2, a=1.0) as found,
        AsyncClient([pod.address for pod in found.fronts], timeout=60) as client,
    ):
        texts: dict[int, tuple[str, list[int]]] = {}
        seeds, over = count(), False

        async def ask_on() -> None:
            while not over:
                seed = next(seeds)
                texts[seed] = await tokens_of(client, seed, model="m")

        async def some_more() -> list[str]:
            """Return the revisions of texts requested from now on."""
            first = next(seeds)
            await until(lambda: len(texts) >= first + 20, 60)
            return [texts[seed][0] for seed in sorted(texts) if seed > first + 4]  # up to 4 were already in flight

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(ask_on())
            assert set(await some_more()) == {"m@a"}
            await found.becomes(a=1.0, b=1.0)
            assert set(await some_more()) == {"m@a", "m@b"}
            await found.becomes(a=0.0, b=1.0)
            assert set(await some_more()) == {"m@b"}
            await found.becomes(a=1.0, b=0.0)
            assert set(await some_more()) == {"m@a"}
            over = True
        again = await asyncio.gather(*(tokens_of(client, seed, model=model) for seed, (model, _) in texts.items()))
        assert again == list(texts.values())


async def test_a_text_that_is_resumed_elsewhere_stays_with_its_revision(
    directories: Directories, tmp_path: Path
) -> None:
    """The text's orchestrator is killed after the whole share has moved to another revision."""
    gate = Gate()
    async with (
        stack(directories.target, None, target_delay=gate) as a,
        stack(directories.near, None) as b,
        rollout(tmp_path, {"a": (directories.target, a), "b": (directories.near, b)}, fronts=2, a=1.0, b=0.0) as found,
        AsyncClient([pod.address for pod in found.fronts], timeout=60) as client,
        AsyncClient(found.fronts[1].address, timeout=60) as other,
    ):
        client._rotation._turns = [pod.address for pod in found.fronts]
        tokens: list[int] = []
        async with client.generate("once upon a time", model="m", seed=3, **LONG) as stream:
            async for chunk in stream:
                tokens += chunk.tokens
                if len(tokens) == len(chunk.tokens):
                    with gate.closed():
                        await found.becomes(a=0.0, b=1.0)
                        await found.fronts[0].stop()
        assert chunk.finish is not None
        assert chunk.finish.speculation.failover_events["resumed"] == 1
        assert (await tokens_of(other, 3, model="m"))[0] == "m@b"
        assert await tokens_of(other, 3, **LONG, model="m@a") == ("m@a", tokens)


async def test_a_revision_that_is_taken_out_finishes_its_texts(directories: Directories, tmp_path: Path) -> None:
    gate = Gate()
    async with (
        stack(directories.target, None, target_delay=gate) as a,
        stack(directories.near, None) as b,
        rollout(tmp_path, {"a": (directories.target, a), "b": (directories.near, b)}, a=1.0) as found,
        AsyncClient(found.fronts[0].address, timeout=60) as client,
    ):
        (catalog,) = found.catalogs
        tokens: list[int] = []
        wanted = (await tokens_of(client, 3, **LONG, model="m@a"))[1]
        async with client.generate("once upon a time", model="m", seed=3, **LONG) as stream:
            async for chunk in stream:
                tokens += chunk.tokens
                if len(tokens) == len(chunk.tokens):
                    with gate.closed():
                        await found.becomes(b=1.0)
                        assert [each.name for each in catalog.leaving] == ["a"]
                        with pytest.raises(NotFound, match=r"'m@a', must be one of 'm@b'"):
                            await tokens_of(client, 3, model="m@a")
        assert tokens == wanted
        await until(lambda: not list(catalog.leaving))
        assert (await tokens_of(client, 3))[0] == "m@b"


async def test_a_revision_without_a_verifier_gets_no_requests(directories: Directories, tmp_path: Path) -> None:
    """A canary that does not start is harmless: its share goes to the available revisions."""
    async with (
        stack(directories.target, None) as a,
        stack(directories.near, None) as b,
        rollout(tmp_path, {"a": (directories.target, a), "b": (directories.near, b)}, a=1.0) as found,
        AsyncClient(found.fronts[0].address, timeout=60) as client,
    ):
        for pod in b.verifiers:
            await pod.stop()
        await found.becomes(a=1.0, b=1.0)
        assert {(await tokens_of(client, seed, max_tokens=2))[0] for seed in range(10)} == {"m@a"}
        for pod in b.verifiers:
            await pod.start()
        (_, canary) = found.catalogs[0]
        await until(lambda: canary.ready, 20)
        assert {(await tokens_of(client, seed, max_tokens=2))[0] for seed in range(10)} == {"m@a", "m@b"}


async def test_drafts_are_swapped_live(directories: Directories, tmp_path: Path) -> None:
    """A running text continues; later ones use the new drafts, or none."""
    async with (
        stack(directories.target, directories.near, target_delay=long_steps) as a,
        stack(directories.target, directories.other) as other,
        rollout(tmp_path, {"a": (directories.target, a)}, a=1.0) as found,
        AsyncClient(found.fronts[0].address, timeout=60) as client,
    ):
        (catalog,) = found.catalogs
        (served,) = catalog
        _, wanted = await tokens_of(client, 3)
        for stack_of_drafts in (a, other):
            addresses = [pod.address for pod in stack_of_drafts.drafts]
            found.write({"a": 1.0}, drafts={"a": addresses})
            await until(lambda: addresses_of(served) == addresses)  # noqa: B023
            before = sum(pod.loop.stats.sent for pod in stack_of_drafts.drafts)
            assert await tokens_of(client, 3, speculation="always") == ("m@a", wanted)
            assert sum(pod.loop.stats.sent for pod in stack_of_drafts.drafts) > before
        found.write({"a": 1.0})
        await until(lambda: served.peers.drafts is None)
        assert await tokens_of(client, 3) == ("m@a", wanted)


async def test_a_wrong_file_changes_nothing(directories: Directories, tmp_path: Path) -> None:
    async with (
        stack(directories.target, None) as a,
        rollout(tmp_path, {"a": (directories.target, a)}, a=1.0) as found,
        AsyncClient(found.fronts[0].address, timeout=60) as client,
    ):
        (catalog,) = found.catalogs
        (tmp_path / "models.yaml").write_text("models: 3")
        await until(lambda: catalog._watched.refused)
        assert (await tokens_of(client, 3, model="m"))[0] == "m@a"


async def test_several_models_behind_one_orchestrator(directories: Directories, tmp_path: Path) -> None:
    entries = {}
    async with stack(directories.target, None) as a, stack(directories.random, None) as b:
        for name, directory, pods in (("one", directories.target, a), ("other", directories.random, b)):
            addresses = [pod.address for pod in pods.verifiers]
            entries[name] = {"revisions": {"x": {"directory": str(directory), "verifiers": addresses}}}
        (tmp_path / "models.yaml").write_text(yaml.safe_dump({"models": entries}))
        front = GenerationServicer(FollowedCatalog(ModelsFile(tmp_path / "models.yaml"), PeerSettings()))
        await front.start()
        async with running(Pod(front)) as pod, AsyncClient(pod.address, timeout=60) as client:
            assert [(each.name, each.revisions) for each in await client.models()] == [
                ("one", ("x",)),
                ("other", ("x",)),
            ]
            (model, one), (_, other) = (
                await tokens_of(client, 3, model="one"),
                await tokens_of(client, 3, model="other"),
            )
            assert model == "one@x"
            assert one != other
            with pytest.raises(InvalidRequest, match="model: is empty, must be one of 'one', 'other'"):
                await tokens_of(client, 3)


async def test_while_a_new_revision_is_looked_for_the_shares_of_before_hold(
    directories: Directories, tmp_path: Path
) -> None:
    """All shares change together: if the old share were dropped first, requests would have no verifier."""
    async with (
        stack(directories.target, None) as a,
        stack(directories.near, None) as b,
        rollout(tmp_path, {"a": (directories.target, a), "b": (directories.near, b)}, a=1.0) as found,
        AsyncClient(found.fronts[0].address, timeout=60) as client,
    ):
        for pod in b.verifiers:
            await pod.stop()  # finding it takes a while
        over, seen = False, list[str]()

        async def ask_on() -> None:
            while not over:
                seen.append((await tokens_of(client, len(seen), model="m", max_tokens=2))[0])

        asking = asyncio.create_task(ask_on())
        host, _, port = b.verifiers[0].address.rpartition(":")
        with socket.create_server((host, int(port))):  # it answers nothing
            await found.becomes(a=0.0, b=1.0)
            assert set(seen) == {"m@a"}
            over = True
            asking.cancel()
            await asyncio.wait({asking})


async def test_what_goes_wrong_is_tried_again(directories: Directories, tmp_path: Path) -> None:
    async with (
        stack(directories.target, None) as a,
        rollout(tmp_path, {"a": (directories.target, a), "b": (directories.target, a)}, a=1.0) as found,
    ):
        (catalog,) = found.catalogs
        settings, failures = catalog._settings, list[str]()

        def connect(address: str) -> grpc.aio.Channel:
            if not failures:
                failures.append(address)
                raise OSError("not now")
            return settings.connect(address)

        catalog._settings = replace(settings, connect=connect)
        await found.becomes(a=1.0, b=1.0)
        assert failures
