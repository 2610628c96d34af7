"""Texts that a draft may learn from, through all services: kept only with consent, given only to holders of the key."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from draft_service.traffic import Traffic
from specdec.client import Client
from specdec.engine.learned_from import LEARNED_FROM, LearnedFrom, tenant_digest
from specdec.engine.model_directory import COMPLETE, ModelDirectory
from specdec.exit_status import ExitStatus
from specdec.local import DEMO
from specdec.local.child import Child, stop
from specdec.serving.target_logprobs import MAX_TOP, places_of
from specdec.v2 import draft_pb2, draft_pb2_grpc, learning_pb2, learning_pb2_grpc, model_pb2, verifier_pb2
from tests.searched import files_with, holders, packed_forms
from tests.services.conftest import Directories
from tests.services.test_draft_sessions import DRAFT
from tests.stack import ALWAYS, Stack, long_steps, request_of, stack, until
from tests.verifier_service.fakes import Decided
from verifier_service.backend.result import Mode
from verifier_service.backend.session_backend import BackendSession
from verifier_service.servicer import VerifierServicer

KEY = "a key of sixteen or more"
PROMPT, OTHER = [5, 6, 7, 8], [9, 10, 11, 12]


async def kept(services: Stack, key: str = KEY) -> list[learning_pb2.KeptText]:
    async with grpc.aio.insecure_channel(services.drafts[0].address) as channel:
        stub: Any = learning_pb2_grpc.LearningServiceStub(channel)
        call = stub.GetTraffic(learning_pb2.GetTrafficRequest(), metadata=(("authorization", f"Bearer {key}"),))
        return [text async for message in call for text in message.texts]


async def run(*command: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)


async def test_consent_decides_what_is_kept(directories: Directories, tmp_path: Path) -> None:
    options: dict[str, Any] = {"traffic": Traffic(10_000), "learning_key": KEY, "target_delay": long_steps}
    async with stack(directories.target, directories.near, **options) as services:
        yes = await services.generate(PROMPT, max_tokens=24, speculation=ALWAYS, tenant="a", learn=True)
        no = await services.generate(OTHER, max_tokens=12, speculation=ALWAYS, tenant="b")
        assert (yes.finish.kept_for_learning, no.finish.kept_for_learning) == (True, False)
        await until(lambda: services.draft_slots_used == 0)
        (text,) = await kept(services)
        assert list(text.tokens) == [*PROMPT, *yes.tokens][: len(text.tokens)]  # the last commit may come too late
        assert len(text.tokens) > len(PROMPT)
        assert text.prompt_tokens == len(PROMPT)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kept(services, "another key")
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        (tmp_path / "key").write_text(KEY)
        address = services.drafts[0].address
        command = (sys.executable, "-m", "specdec.cli", "forget", "a", "--draft", f"127.0.0.1:9,{address}")
        done = await run(*command, "--api-key-file", str(tmp_path / "key"))
        assert done.stdout == f"{address}: 1 texts, {len(text.tokens)} tokens forgotten\n"
        assert done.returncode == ExitStatus.UNREACHABLE
        assert "127.0.0.1:9: " in done.stderr
        assert await kept(services) == []
        done = await run(*command)
        assert done.returncode == ExitStatus.REFUSED
        assert "it may still keep the texts" in done.stderr


async def test_a_text_that_ends_while_its_draft_is_paused_is_kept_to_its_end(directories: Directories) -> None:
    """It is shorter than the tokens held back from a paused draft."""
    controller, complete = Decided(Mode.REMOTE_DRAFT), False
    options: dict[str, Any] = {"traffic": Traffic(10_000), "learning_key": KEY, "target_delay": long_steps}
    async with stack(directories.target, directories.near, controller=controller, **options) as services:
        for first in range(10, 20):
            request = request_of([first, *PROMPT], max_tokens=40, ignore_end_token=True, speculation=DRAFT, learn=True)
            controller.decided = Mode.REMOTE_DRAFT
            tokens: list[int] = []
            async for response in services.stub.Generate(request):
                tokens += response.tokens
                if model_pb2.TOKEN_SOURCE_REMOTE_DRAFT in response.sources:
                    controller.decided = Mode.OFF
            await until(lambda: services.draft_slots_used == 0)
            *_, text = await kept(services)
            complete = list(text.tokens) == [first, *PROMPT, *tokens]
            if complete:  # the last message may come too late
                break
    assert complete


def planted(tenant: str) -> list[int]:
    """Return a prompt that no other text begins with."""
    return [10 + (7 * ord(tenant) + 11 * place) % 97 for place in range(24)]


def held() -> list[bool]:
    """Return whether anything in this process holds the prompts of the tenants a and b."""
    return [bool(found) for found in holders(partial(planted, "a"), partial(planted, "b"))]


async def test_a_text_without_consent_is_nowhere_once_it_is_over(directories: Directories) -> None:
    """All three services run in this process, which is searched for texts kept as a list, array, bytes or message. The
    texts are shorter than a block of the verifier's prefix cache, which keeps whole blocks."""
    options: dict[str, Any] = {"traffic": Traffic(10_000), "learning_key": KEY, "target_delay": long_steps}
    async with stack(directories.target, directories.near, **options) as services:
        for tenant in "ab":
            fields: dict[str, Any] = {"speculation": ALWAYS, "tenant": tenant, "learn": tenant == "a"}
            await services.generate(planted(tenant), max_tokens=16, ignore_end_token=True, **fields)
        await until(lambda: services.idle)
        await until(lambda: held() == [True, False])
        async with grpc.aio.insecure_channel(services.drafts[0].address) as channel:
            stub: Any = learning_pb2_grpc.LearningServiceStub(channel)
            key = (("authorization", f"Bearer {KEY}"),)
            told = await stub.Forget(learning_pb2.ForgetRequest(tenant="a"), metadata=key)
        assert told.texts == 1
        await until(lambda: held() == [False, False], seconds=30.0)


def test_no_text_is_on_disk_or_in_a_log(directories: Directories, tmp_path: Path) -> None:
    """Not even with consent, when the draft service keeps the text in memory. All files that the services may write are
    below one folder or in the cache folder; both are searched while the services run and afterwards."""
    cache = Path(os.environ["SPECDEC_CACHE_DIR"])
    (files := tmp_path / "files").mkdir()
    (files / "key").write_text(KEY)
    places = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(files))
    command = [sys.executable, "-m", "specdec.cli", "up", "--port", "0", "--json", "--log-level", "debug"]
    command += ["--target", str(directories.target), "--draft", str(directories.near), "--draft-engine", "torch"]
    command += ["--threads", "1", "--kv-tokens", "4096"]
    command += ["--draft-learn-tokens", "10000", "--draft-learn-key-file", str(files / "key")]
    prompts = {True: "the kingfisher nests at 7731 Alder Lane", False: "a heron fishes behind 26 Quarry Road"}
    forms: list[bytes] = []
    with (
        (files / "log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=files, env=os.environ | places) as process,
    ):
        assert process.stdout is not None
        try:
            address = json.loads(process.stdout.readline())["address"]
            with Client(address) as client:
                for learn, prompt in prompts.items():
                    for _ in range(10):  # a draft may open its session only after the text's end
                        result = client.complete(
                            prompt, max_tokens=64, ignore_end_token=True, speculation="draft", forced=True, learn=learn
                        )
                        (answer,) = result.completions
                        if answer.finish.kept_for_learning == learn:
                            break
                    assert answer.finish.kept_for_learning == learn
                    tokens = np.asarray(answer.tokens[:8], dtype=np.int64)
                    forms += [prompt.encode(), *packed_forms(tokens)]
            written = files_with(files, *forms) + files_with(cache, *forms)
        finally:
            process.terminate()
            assert process.wait(20) == 0
    assert not written + files_with(files, *forms) + files_with(cache, *forms)
    assert (files / "log").stat().st_size > 0
    (files / "control").write_bytes(forms[2])
    assert files_with(files, *forms) == [files / "control"]


class Listening(VerifierServicer):
    """Records the numbers of log-probabilities that it is asked for on behalf of a draft."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: set[int] = set()

    def parse(self, request: verifier_pb2.VerifyRequest, deadline: float | None) -> BackendSession:
        self.asked.add(request.open.policy.overruled_logprobs)
        return super().parse(request, deadline)

    def act(self, session: BackendSession, request: verifier_pb2.VerifyRequest, arrived: float) -> None:
        if request.HasField("policy"):
            self.asked.add(request.policy.overruled_logprobs)
        super().act(session, request, arrived)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.verify), 0.9])
async def test_the_target_says_what_it_found_likely_where_it_overruled_a_draft_that_learns(
    directories: Directories, temperature: float
) -> None:
    """It does so for such drafts only, and no token changes."""
    fields: dict[str, Any] = {
        "max_tokens": 60,
        "sampling": {"temperature": temperature, "seed": 3},
        "ignore_end_token": True,
    }
    traffic = Traffic(10_000, most_bytes=1 << 20)
    options: dict[str, Any] = {
        "traffic": traffic,
        "learning_key": KEY,
        "verifier_kind": Listening,
        "target_delay": long_steps,
    }
    async with stack(directories.target, None) as services:
        plain = await services.generate(PROMPT, plain=True, logprobs=20, **copy.deepcopy(fields))
    async with stack(directories.target, directories.near, **options) as services:
        verifier = services.verifiers[0].service
        assert isinstance(verifier, Listening)
        without = await services.generate(PROMPT, speculation=ALWAYS, tenant="b", **copy.deepcopy(fields))
        assert verifier.asked == {0}
        learning = await services.generate(PROMPT, speculation=ALWAYS, tenant="a", learn=True, **copy.deepcopy(fields))
        assert verifier.asked == {0, MAX_TOP}
        assert plain.tokens == without.tokens == learning.tokens
        await until(lambda: services.draft_slots_used == 0)
        (text,) = await kept(services)
    assert text.tenant_digest == tenant_digest("a")
    assert len(text.logprobs) > 5
    assert {place.position for place in text.logprobs} <= set(range(len(PROMPT), len(text.tokens)))
    for place in places_of(text.logprobs, 0, len(text.tokens), ModelDirectory(directories.target).vocabulary):
        own = plain.logprobs[place.position - len(PROMPT)]
        assert place.tokens[:20].tolist() == list(own.top_tokens)
        assert place.logprobs[:20].tolist() == pytest.approx(list(own.top_logprobs), abs=0.01)
        assert len(place.tokens) == MAX_TOP


@asynccontextmanager
async def drafting(*options: str) -> AsyncIterator[str]:
    """Run a draft service in a process of its own; yield its address."""
    child = Child.start("draft", "-m", "draft_service", "--model", str(DEMO / "draft"), "--port", "0", *options)
    try:
        yield await asyncio.to_thread(child.until_ready, 300)
    finally:
        stop([child])


async def state_of(address: str, version: str, *awaited: draft_pb2.DraftVersionState.ValueType) -> int:
    """Wait until a version is in one of these states, and return that state."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(300):
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        while True:
            told = await stub.GetStats(draft_pb2.DraftServiceGetStatsRequest())
            for found in told.versions:
                if found.name == version and found.state in awaited:
                    state: int = found.state
                    return state
            await asyncio.sleep(0.1)


@pytest.mark.verify
async def test_versions_of_a_forgotten_tenant_are_refused_also_after_a_restart(tmp_path: Path) -> None:
    (folder := tmp_path / "versions").mkdir()
    (tmp_path / "key").write_text(KEY)

    def add(name: str, tenant: str) -> None:
        shutil.copytree(DEMO / "draft", folder / f".{name}")
        learned_from = LearnedFrom().with_texts({tenant_digest(tenant): time.time() - 1000.0})
        (folder / f".{name}" / LEARNED_FROM).write_text(json.dumps(learned_from.content))
        (folder / f".{name}" / COMPLETE).touch()
        (folder / f".{name}").rename(folder / name)

    options = ["--engine", "eager", "--threads", "1", "--kv-tokens", "4096", "--canary-slowdown", "50"]
    options += ["--versions", str(folder), "--learn-key-file", str(tmp_path / "key")]
    forgotten, canary = draft_pb2.DRAFT_VERSION_STATE_FORGOTTEN, draft_pb2.DRAFT_VERSION_STATE_CANARY
    async with drafting(*options) as address:
        add("v1", "acme")
        assert await state_of(address, "v1", forgotten, canary) == canary
        command = (sys.executable, "-m", "specdec.cli", "forget", "acme", "--draft", address)
        done = await run(*command, "--api-key-file", str(tmp_path / "key"))
        assert done.stdout == f"{address}: 0 texts, 0 tokens forgotten; rolled back: v1\n"
        assert await state_of(address, "v1", forgotten, canary) == forgotten
    async with drafting(*options) as address:
        assert await state_of(address, "v1", forgotten, canary) == forgotten
        add("v2", "acme")
        add("v3", "other")
        assert await state_of(address, "v2", forgotten, canary) == forgotten
        assert await state_of(address, "v3", forgotten, canary) == canary


async def test_a_draft_that_keeps_nothing_says_so(directories: Directories) -> None:
    async with stack(directories.target, directories.near, target_delay=long_steps) as services:
        told = await services.generate(PROMPT, max_tokens=24, speculation=ALWAYS, learn=True)
        assert told.finish.speculation.sources["remote_draft"]
        assert not told.finish.kept_for_learning
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kept(services)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
