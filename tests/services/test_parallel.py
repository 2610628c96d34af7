"""A verifier in two processes, as started by torchrun: indistinguishable for the rest of the system."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.models.catalog import Catalog
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.requests.model import ServedModel
from orchestrator.servicer import GenerationServicer
from specdec.engine.distributed.ranks import LOST, PLACE
from specdec.engine.model_directory import ModelDirectory
from specdec.v2 import generation_pb2, generation_pb2_grpc, model_pb2
from tests.ranks import Launched, launched, module
from tests.services.conftest import Directories
from tests.services.test_equality import SAMPLINGS, prompts, sampler
from tests.stack import OWN_DRAFTERS, request_of, served, stack

pytest.importorskip("accelerate", reason="transformers cuts models with it: specdec-serve[parallel]")

TOKENS = 24
LONG = 200
"""Tokens: a text still running when the next thing happens."""

FEW = ("--port", "0", "--kv-tokens", "8192")
"""Options of a small verifier on a free port."""

LOOKING = generation_pb2.Speculation(
    drafters=OWN_DRAFTERS,
    lookahead=model_pb2.Lookahead(window=5, ngram=3, guesses=5),
)
"""Trees in every step, even without a timely draft."""


@asynccontextmanager
async def serving(target: Path, logs: Path) -> AsyncIterator[tuple[Launched, Any]]:
    """A verifier in two processes, and a stub of an orchestrator before it."""
    with launched(2, logs, module, "verifier_service", "--model", str(target), *FEW) as ranks:
        ready = await asyncio.to_thread(ranks.until_said, 0, "ready ")
        peers = Peers(Pods([ready.removeprefix("ready ")]), None, failover_seconds=1.0)
        service = GenerationServicer(Catalog.of(ServedModel.of(ModelDirectory(target)), peers))
        async with served(service) as (address, _), grpc.aio.insecure_channel(address) as channel:
            yield ranks, generation_pb2_grpc.GenerationServiceStub(channel)


async def test_the_tokens_are_those_of_one_process(directories: Directories, tmp_path: Path) -> None:
    """Plain and with trees, at several temperatures, concurrently. Then drain: running texts are completed."""
    requests = list(zip(prompts(len(SAMPLINGS)), SAMPLINGS, strict=True))
    async with stack(directories.target, None) as services:
        want = [
            list((await services.generate(prompt, sampling=sampling, max_tokens=TOKENS, plain=True)).tokens)
            for prompt, sampling in requests
        ]
    async with serving(directories.target, tmp_path / "logs") as (ranks, stub):

        async def complete(prompt: list[int], sampling: dict[str, Any], **way: Any) -> generation_pb2.Completion:
            request = request_of(prompt, sampling=sampling, max_tokens=TOKENS, **way)
            answer = await stub.Complete(generation_pb2.CompleteRequest(request=request))
            completion: generation_pb2.Completion = answer.completions[0]
            return completion

        for way in ({"plain": True}, {"speculation": LOOKING}):
            completions = await asyncio.gather(*(complete(prompt, sampling, **way) for prompt, sampling in requests))
            for (prompt, sampling), tokens, got in zip(requests, want, completions, strict=True):
                directories.oracle.same(prompt, tokens, list(got.tokens), sampler(sampling), f"{way}, {sampling}")
                assert "parallel-2" in got.finish.numerics_fingerprint.split("/")
        assert sum(completion.finish.speculation.accepted for completion in completions) > 0

        responses = aiter(stub.Generate(request_of([5, 6, 7], max_tokens=LONG, ignore_end_token=True)))
        received = list((await anext(responses)).tokens)
        for rank in (1, 0):  # torchrun signals all ranks
            ranks.signal(rank, signal.SIGTERM)
        async for response in responses:
            received += response.tokens
        assert len(received) == LONG
        assert await asyncio.to_thread(ranks.exit_codes) == [0, 0]


async def test_a_lost_follower_ends_the_pod(directories: Directories, tmp_path: Path) -> None:
    async with serving(directories.target, tmp_path / "logs") as (ranks, stub):
        responses = aiter(stub.Generate(request_of([5, 6, 7], max_tokens=LONG, ignore_end_token=True)))
        await anext(responses)
        ranks.signal(1, signal.SIGKILL)
        assert await asyncio.to_thread(ranks.exit_codes) == [LOST, -signal.SIGKILL]
        line = json.loads(ranks.until_said(0, "rank_lost"))
        assert (line["service"], line["rank"], line["lost"], line["level"]) == ("verifier", 0, 1, "critical")
        with pytest.raises(grpc.aio.AioRpcError) as ending:
            async for _ in responses:
                pass
        assert ending.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--engine", "onnx"), "the ONNX engine runs in one process"),
        (("--compile",), "leave out --compile"),
        (("--device", "meta"), "cpu, cuda and cuda:N are supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_goes_by_one_process_only_is_refused(
    directories: Directories, tmp_path: Path, options: tuple[str, ...], reason: str
) -> None:
    model = ("--model", str(directories.target), "--port", "0")
    with launched(2, tmp_path / "logs", module, "verifier_service", *model, *options) as ranks:
        assert ranks.exit_codes() == [1, 0]
        (line,) = ranks.said(0).splitlines()
        assert line.startswith("verifier: ")
        assert reason in line
        assert reason not in ranks.said(1)


def test_an_environment_that_is_not_torchruns(directories: Directories) -> None:
    """Job schedulers set some of these variables."""
    environment = {name: value for name, value in os.environ.items() if name not in PLACE} | {"WORLD_SIZE": "2"}
    ended = subprocess.run(
        [sys.executable, "-m", "verifier_service", "--model", str(directories.target), "--port", "0"],
        capture_output=True,
        text=True,
        env=environment | {"COLUMNS": "200"},
        check=False,
    )
    assert ended.returncode == 2
    assert "RANK is '' while WORLD_SIZE is set" in ended.stderr
    assert "Traceback" not in ended.stderr
