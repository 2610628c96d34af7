"""Verifiers with `--engine vllm`: the same promises, in processes of vLLM's own environment."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from demo.prompts import held_out
from orchestrator.models.catalog import Catalog
from orchestrator.models.grammar_check import GrammarCheck
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.requests.model import ServedModel
from orchestrator.servicer import GenerationServicer
from specdec.client import AsyncClient, Completion, Finish, InvalidRequest
from specdec.engine.model_directory import ModelDirectory
from specdec.local import DEMO
from specdec.v2 import verifier_pb2, verifier_pb2_grpc
from tests.margins import Oracle
from tests.models import END, make, near
from tests.services.test_equality import SAMPLINGS, prompts, sampler, slow_target
from tests.stack import served, stack
from tests.vllm.pod import VllmPod, command, needs_vllm, vllm_pod

pytestmark = [pytest.mark.verify, needs_vllm, pytest.mark.timeout(900)]

TOKENS = 48
PROMPT = list(range(40, 60))
ASKED: dict[str, Any] = {"tokens": PROMPT, "max_tokens": 200, "ignore_end_token": True}
SCHEMA = {
    "type": "object",
    "properties": {"warm": {"type": "boolean"}, "why": {"type": "string", "maxLength": 20}},
    "required": ["warm", "why"],
    "additionalProperties": False,
}


@dataclass
class Served:
    """A model served by vLLM verifiers."""

    target: Path
    near: Path
    oracle: Oracle
    verifiers: list[VllmPod]
    drafts: list[str]

    @asynccontextmanager
    async def client(self, *verifiers: str, failover_seconds: float = 60.0) -> AsyncIterator[AsyncClient]:
        """Yield a client of an orchestrator with the drafts and these verifiers."""
        peers = Peers(
            Pods(verifiers or [pod.address for pod in self.verifiers]),
            Pods(self.drafts),
            drafts_are_trusted=True,
            patience_seconds=0.05,
            failover_seconds=failover_seconds,
        )
        catalog = Catalog.of(ServedModel.of(ModelDirectory(self.target)), peers, GrammarCheck(self.target))
        async with served(GenerationServicer(catalog)) as (address, _), AsyncClient(address, timeout=300) as client:
            yield client


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Oracle]:
    folder = tmp_path_factory.mktemp("models")
    target = make("llama", folder / "target", head_dim=32)  # the narrowest supported by vLLM's CPU attention
    return target, near(target, folder / "near", noise=0.04), Oracle(target)


@asynccontextmanager
async def serving(models: tuple[Path, Path, Oracle], logs: Path, verifiers: int = 1) -> AsyncIterator[Served]:
    """Run this number of vLLM verifiers, and a draft service."""
    target, draft, oracle = models
    async with AsyncExitStack() as exits:
        starting = [exits.enter_async_context(vllm_pod(target, logs / f"{n}.log")) for n in range(verifiers)]
        pods = [await each for each in starting]
        services = await exits.enter_async_context(stack(target, draft))
        yield Served(target, draft, oracle, pods, [pod.address for pod in services.drafts])


async def complete(client: AsyncClient, **options: Any) -> Completion:
    (completion,) = (await client.complete(**options)).completions
    return completion


async def tokens_of(client: AsyncClient, prompt: list[int], **options: Any) -> list[int]:
    return list((await complete(client, tokens=prompt, max_tokens=TOKENS, **options)).tokens)


async def test_tokens_do_not_depend_on_drafting(tmp_path: Path) -> None:
    """Requests run plain and drafted, one by one, and drafted with the verifier's own proposers, concurrently. The demo
    target is slow enough for its draft to be in time."""
    requests = list(itertools.product(held_out(4, tokens=64, seed=3), SAMPLINGS))
    pair = DEMO / "target", DEMO / "draft", Oracle(DEMO / "target")
    async with serving(pair, tmp_path) as pods, pods.client() as client:
        plain = [await tokens_of(client, p, speculation="off", **s) for p, s in requests]
        same = pods.oracle.same
        for number, (prompt, sampling) in enumerate(requests):
            same(
                prompt,
                plain[number],
                await tokens_of(client, prompt, speculation="always", **sampling),
                sampler(sampling),
            )
        accepted = 0
        for speculation in ("always", "local"):
            crowd = await asyncio.gather(
                *(complete(client, tokens=p, max_tokens=TOKENS, speculation=speculation, **s) for p, s in requests)
            )
            for (prompt, sampling), want, got in zip(requests, plain, crowd, strict=True):
                same(prompt, want, list(got.tokens), sampler(sampling), speculation)
                accepted += got.finish.speculation.accepted
        assert accepted > 100
        drawn = await complete(
            client,
            tokens=requests[0][0],
            max_tokens=10 * TOKENS,  # the draft opens its session while the first tokens are made
            temperature=0.8,
            rule="rejection",
            speculation="always",
            ignore_end_token=True,
        )
        assert drawn.finish.speculation.accepted > 0
        print(f"{pods.oracle.compared} tokens compared, {len(pods.oracle.ties)} ties, {accepted} candidates accepted")


async def test_greedy_tokens_are_those_of_transformers(models: tuple[Path, Path, Oracle], tmp_path: Path) -> None:
    async with serving(models, tmp_path) as pods, pods.client() as client:
        for prompt in prompts(6, seed=22):
            want = pods.oracle.greedy(prompt, TOKENS, frozenset({END}))
            pods.oracle.same(prompt, want, await tokens_of(client, prompt, speculation="always"), sampler(SAMPLINGS[0]))


async def test_whatever_a_request_asks_for_holds(models: tuple[Path, Path, Oracle], tmp_path: Path) -> None:
    """Grammars, other rules, log-probabilities, minimum lengths, resumption; windows are refused by name."""
    (prompt,) = prompts(1, seed=23)
    async with serving(models, tmp_path) as pods, pods.client() as client:
        written = await complete(
            client, tokens=prompt, max_tokens=120, temperature=0.8, seed=3, json_schema=json.dumps(SCHEMA)
        )
        assert written.finish.reason == "length" or json.loads(written.text).keys() == {"warm", "why"}
        for rule in ("rejection", "contrastive"):
            other = await complete(
                client,
                tokens=prompt,
                max_tokens=TOKENS,
                temperature=0.8 * (rule == "rejection"),
                rule=rule,
                ignore_end_token=True,
            )
            assert len(other.tokens) == TOKENS
            if rule == "contrastive":  # it waits for the draft; under rejection this target outruns the draft
                assert other.finish.speculation.accepted > 0
        least = await complete(client, tokens=prompt, max_tokens=30, min_tokens=25, logit_bias={END: 20.0})
        assert (len(least.tokens), least.finish.reason) == (26, "stop")  # it ends as early as allowed
        told = await complete(client, tokens=prompt, max_tokens=8, logprobs=3, ignore_end_token=True)
        assert told.logprobs is not None
        assert len(told.logprobs) == 8
        whole = await tokens_of(client, prompt, temperature=1.0, seed=5, ignore_end_token=True)
        for cut in (1, 7, 30):
            rest = await complete(
                client,
                tokens=prompt,
                generated_tokens=whole[:cut],
                max_tokens=TOKENS,
                temperature=1.0,
                seed=5,
                ignore_end_token=True,
            )
            pods.oracle.same(prompt, whole, whole[:cut] + list(rest.tokens), sampler({"temperature": 1.0, "seed": 5}))
        with pytest.raises(InvalidRequest, match="no lookahead windows"):
            await complete(client, tokens=prompt, max_tokens=8, speculation="local", lookahead=(4, 2, 1))
        limited = await complete(client, tokens=prompt, max_tokens=8, max_branches=3)
        assert limited.finish.speculation.granted.max_branches == 1


async def test_a_text_whose_verifier_dies_goes_on_at_another(models: tuple[Path, Path, Oracle], tmp_path: Path) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 8}
    async with serving(models, tmp_path, verifiers=2) as pods, pods.client() as client:
        want = list((await complete(client, **ASKED, **options, speculation="off")).tokens)
        got, finish = await broken_off(client, options, lambda: kill_busy(pods.verifiers))
        pods.oracle.same(PROMPT, want, got, sampler(options))
        assert finish.reproducible


@pytest.mark.parametrize("first", ["vllm", "ours"])
async def test_a_text_that_moves_to_another_engine_says_so(
    models: tuple[Path, Path, Oracle], tmp_path: Path, first: str
) -> None:
    target, draft, _ = models
    async with serving(models, tmp_path) as pods, stack(target, draft, target_delay=slow_target) as services:
        (vllm,), (ours,) = pods.verifiers, services.verifiers
        async with pods.client(vllm.address, ours.address) as client:
            for seed in itertools.count():
                options: dict[str, Any] = {"temperature": 0.9, "seed": seed}
                moved = False

                async def end_it() -> None:
                    nonlocal moved
                    here = "ours" if ours.loop.pool.held else "vllm"
                    moved = here == first
                    if moved:
                        await (ours.stop() if first == "ours" else asyncio.to_thread(vllm.kill))

                got, finish = await broken_off(client, options, end_it)
                assert len(got) == ASKED["max_tokens"]
                assert finish.reproducible is not moved
                if moved:
                    break


async def broken_off(
    client: AsyncClient, options: dict[str, Any], disturb: Callable[[], Awaitable[None]]
) -> tuple[list[int], Finish]:
    """Run a text, call `disturb` in the middle; return its tokens and how it ended."""
    got: list[int] = []
    finish = None
    happened = False
    async with client.generate(**ASKED, **options) as stream:
        async for chunk in stream:
            got += chunk.tokens
            finish = chunk.finish
            if len(got) >= 10 and not happened:
                happened = True
                await disturb()
    assert finish is not None
    return got, finish


async def kill_busy(verifiers: list[VllmPod]) -> None:
    """Kill the verifier that has a text."""
    for pod in verifiers:
        async with grpc.aio.insecure_channel(pod.address) as channel:
            stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
            stats = await stub.GetStats(verifier_pb2.GetStatsRequest())
        if stats.running:
            pod.kill()
            return
    raise AssertionError("no verifier has a text")


TWO = ("--vllm-options", '{"tensor_parallel_size": 2}')


async def test_two_processes_have_one_model(models: tuple[Path, Path, Oracle], tmp_path: Path) -> None:
    """Tensor parallelism by vLLM's own executor."""
    requests = list(itertools.product(prompts(2, seed=26), SAMPLINGS[:6]))
    target, draft, oracle = models
    async with vllm_pod(target, tmp_path / "two.log", *TWO) as pod, stack(target, draft) as services:
        pods = Served(target, draft, oracle, [pod], [each.address for each in services.drafts])
        async with pods.client() as client:
            for prompt, sampling in requests:
                plain = await tokens_of(client, prompt, speculation="off", **sampling)
                oracle.same(
                    prompt, plain, await tokens_of(client, prompt, speculation="always", **sampling), sampler(sampling)
                )


async def test_signals_to_all_processes_of_a_verifier_let_it_drain(
    models: tuple[Path, Path, Oracle], tmp_path: Path
) -> None:
    target, _, oracle = models
    four = ("--threads", "4", "--threads-while-drafting", "2")
    async with vllm_pod(target, tmp_path / "two.log", *TWO, *four) as pod:
        pods = Served(target, target, oracle, [pod], [])
        async with pods.client() as client:

            async def signal_all() -> None:
                pod.signal(signal.SIGINT)

            got, finish = await broken_off(client, {"temperature": 0.9, "seed": 4}, signal_all)
        assert len(got) == ASKED["max_tokens"]
        assert finish.reproducible
        assert await pod.ended() == 0
    assert "threads while drafting" in pod.log.read_text()


async def test_parts_of_a_model_end_with_their_verifier(models: tuple[Path, Path, Oracle], tmp_path: Path) -> None:
    """Until then each part has half of the threads."""
    async with vllm_pod(models[0], tmp_path / "two.log", *TWO, "--threads", "4") as pod:
        assert pod.threads_of_parts() == [2, 2]
        pod.kill()
        await pod.ended()


async def test_numerics_tell_which_factors_scale_positions(tmp_path: Path) -> None:
    """vLLM chooses the factors by the longest text that fits."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "factor": 4.0}
    scaling |= {"rope_theta": 10_000.0, "original_max_position_embeddings": 1024}
    model = make("llama", tmp_path / "model", head_dim=32, max_position_embeddings=4096, rope_parameters=scaling)
    found = []
    for tokens in ("8192", "1024"):
        async with vllm_pod(model, tmp_path / f"{tokens}.log", "--kv-tokens", tokens) as pod:
            pods = Served(model, model, Oracle(model), [pod], [])
            async with pods.client() as client:
                found.append((await complete(client, tokens=PROMPT, max_tokens=1)).finish.numerics)
    assert "/long-rope/" in found[0]
    assert found[0].replace("/long-rope/", "/short-rope/") == found[1]


async def test_a_verifier_drains(models: tuple[Path, Path, Oracle], tmp_path: Path) -> None:
    async with serving(models, tmp_path) as pods, pods.client() as client:
        await tokens_of(client, [5, 6, 7])
        assert await pods.verifiers[0].terminate() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--vllm-options", "fp8"), "--vllm-options: is not JSON"),
        (("--vllm-options", '{"block_size": 16}'), "block_size cannot be set: the verifier manages KV memory"),
        (("--vllm-options", '{"quantisation": "fp8"}'), "quantisation"),
    ],
    ids=lambda each: str(each)[:40],
)
async def test_wrong_options_are_refused(
    models: tuple[Path, Path, Oracle], options: tuple[str, ...], said: str
) -> None:
    status, text = await command("--model", str(models[0]), *options)
    assert status in (1, 2)
    assert said in text
    assert "Traceback" not in text
