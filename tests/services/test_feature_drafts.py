"""Heads in a draft service: fed by a verifier through the orchestrator, over real streams. `test_equality.py` compares
the tokens."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import grpc
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draft_service.__main__ import main as draft_service
from draft_service.heads import HeadsDrafter
from draft_service.request import ExpansionPolicy
from draft_service.servicer import DraftLimits
from orchestrator.models.catalog import Catalog
from orchestrator.servicer import GenerationServicer
from specdec.cli.up import up
from specdec.client import Client
from specdec.engine.heads.block import BlockDraft
from specdec.engine.heads.files import TargetShape
from specdec.engine.heads.fusion import as_bytes, from_bytes
from specdec.engine.heads.kinds import feature_heads_in
from specdec.engine.heads.target_ends import ends_of
from specdec.engine.heads.text_memory import TextMemory, TextSlots
from specdec.engine.model_directory import ModelDirectory
from specdec.local import LocalError
from specdec.local import Stack as Services
from specdec.v2 import draft_pb2, draft_pb2_grpc, generation_pb2, generation_pb2_grpc, model_pb2, verifier_pb2
from specdec.v2.verifier_pb2_grpc import VerifierServiceStub
from tests.cli.commands import command_of
from tests.models import VOCABULARY
from tests.services.conftest import Directories
from tests.stack import ALWAYS, REMOTE, DraftPod, long_steps, peers_at, request_of, served, stack, until
from verifier_service.__main__ import main as verifier

PROMPT = [int(token) for token in np.random.default_rng(3).integers(3, VOCABULARY, 40)]


@torch.inference_mode()
def features_of(target: Path, layers: tuple[int, ...], text: list[int]) -> Tensor:
    """Return the features [t, m, d] of a text, as transformers computes them."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    output = model.base_model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
    return torch.stack([output.hidden_states[layer][0] for layer in layers], dim=1)


async def test_a_verifier_sends_the_features_of_its_text(directories: Directories) -> None:
    files = feature_heads_in(directories.eagle3, TargetShape.of(ModelDirectory(directories.target)))
    async with (
        stack(directories.target, None, draft_heads=directories.eagle3) as services,
        grpc.aio.insecure_channel(services.verifiers[0].address) as channel,
    ):
        stub: Any = VerifierServiceStub(channel)
        call = stub.Verify()
        policy = verifier_pb2.VerifyPolicy(drafters=[REMOTE], forced=True, features_session=1)
        opening = verifier_pb2.VerifyOpen(prompt_tokens=PROMPT, max_tokens=24, policy=policy)
        await call.write(verifier_pb2.VerifyRequest(open=opening))
        opened = (await call.read()).opened
        assert opened.features_fingerprint == files.fusion_fingerprint()
        text, rows = list(PROMPT), list[Tensor]()
        while True:
            response = await call.read()
            if response.HasField("features"):
                assert response.features.first == sum(map(len, rows))
                rows.append(from_bytes(response.features.values, files.config.layer.sizes.hidden))
                assert sum(map(len, rows)) >= len(text)  # as far as the next token needs
            if response.HasField("commit"):
                text += response.commit.committed.tokens
                if response.commit.finish_reason:
                    break
        await call.done_writing()
    got = torch.cat(rows).float()
    want = files.fusion("cpu", torch.float32)(features_of(directories.target, files.config.layers, text))[: len(got)]
    assert len(got) >= len(text) - 2
    assert float((got - want).abs().max()) < 0.01 * float(want.abs().max())  # a bfloat16 has three digits


async def test_a_draft_service_proposes_what_its_heads_guess(directories: Directories) -> None:
    """It proposes every node of the likeliest path, below a prompt whose features come in two messages."""
    target = ModelDirectory(directories.target)
    shape = TargetShape.of(target)
    files = feature_heads_in(directories.dflash, shape)
    ends = ends_of(target.path, shape, "cpu", torch.float32)
    draft = files.load(ends.embeddings, ends.logits, "cpu", torch.float32)
    assert isinstance(draft, BlockDraft)
    features = features_of(directories.target, files.config.layers, PROMPT)
    values = as_bytes(files.fusion("cpu", torch.float32)(features[:-1]))
    memory = TextMemory(
        256, files.config.memory_heads, files.config.layer.sizes.width, torch.float32, torch.device("cpu")
    )
    slots = TextSlots(memory).take(0, len(PROMPT) - 1)
    with torch.inference_mode():
        fused = from_bytes(values, files.config.layer.sizes.hidden).float()
        draft.read(fused, torch.arange(len(fused)), slots, memory)
        states = draft.states(torch.tensor([PROMPT[-1]]), torch.tensor([len(PROMPT) - 1]), [slots], memory)
        likeliest = draft.logits(states)[0].argmax(-1).tolist()
    limits = DraftLimits(defaults=ExpansionPolicy(min_path_probability=0.0))
    async with (
        stack(directories.target, directories.target, draft_heads=directories.dflash, draft_limits=limits) as services,
        grpc.aio.insecure_channel(services.drafts[0].address) as channel,
    ):
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        call = stub.Draft()
        policy = draft_pb2.DraftPolicy(min_path_probability=1e-9, scorer=model_pb2.DRAFT_SCORER_PROBABILITY)
        opening = draft_pb2.DraftOpen(prompt_tokens=PROMPT, max_tokens=24, vocabulary_size=VOCABULARY, policy=policy)
        await call.write(draft_pb2.DraftRequest(open=opening))
        opened = (await call.read()).opened
        assert opened.features.fingerprint == files.fusion_fingerprint()
        cut = 2 * opened.features.width * 30
        for first, part in ((0, values[:cut]), (30, values[cut:])):
            message = model_pb2.Features(first=first, values=part)
            await call.write(draft_pb2.DraftRequest(features=message))
        path: list[int] = []
        async with asyncio.timeout(30):
            while len(path) < len(likeliest):
                response = await call.read()
                if response.HasField("extend"):
                    path = path_along(response.extend, likeliest, path)
        call.cancel()
    assert path == likeliest


def path_along(extend: model_pb2.Extend, wanted: list[int], known: list[int]) -> list[int]:
    """Return the longest prefix of a path among the candidates of a message, or `known` if that is longer."""
    assert extend.base == len(PROMPT)
    found, node = list[int](), 0
    for number, (token, parent) in enumerate(zip(extend.tokens, extend.parents, strict=True), 1):
        if parent == node and len(found) < len(wanted) and token == wanted[len(found)]:
            found.append(token)
            node = number
    return max(found, known, key=len)


def read_by(pod: DraftPod) -> tuple[int, int]:
    """Return the first position and the number of rows that a draft has read of its only text; (-1, 0) if none."""
    assert isinstance(pod.drafter, HeadsDrafter)
    for text in tuple(pod.drafter._texts.values()):
        if text.slots.count:
            return text.slots.first, text.slots.count
    return -1, 0


async def test_a_draft_that_takes_over_reads_the_text_as_far_as_it_is_kept(directories: Directories) -> None:
    """Both drafts guess at random; the rows that they have read show that they were fed."""
    async with stack(
        directories.target, directories.target, drafts=2, draft_heads=directories.dspark, target_delay=long_steps
    ) as services:
        fields: dict[str, Any] = {"max_tokens": 60, "ignore_end_token": True}
        drafted = asyncio.create_task(services.generate(PROMPT, speculation=ALWAYS, **fields))
        plain = asyncio.create_task(services.generate(PROMPT, plain=True, **fields))
        await until(lambda: any(read_by(pod)[1] for pod in services.drafts))
        first, other = sorted(services.drafts, key=lambda pod: -read_by(pod)[1])
        await first.stop()
        await until(lambda: read_by(other)[1] > 0)
        begin, count = read_by(other)
        completion, want = await drafted, await plain
    assert begin == 0
    assert count > len(PROMPT)
    assert list(completion.tokens) == list(want.tokens)
    assert other.loop.stats.sent > 0  # perhaps too late for each step: it does not wait for such guesses


async def test_a_text_whose_verifier_sends_no_features_goes_without_draft(directories: Directories) -> None:
    async with (
        stack(directories.target, directories.target, draft_heads=directories.eagle3) as fed,
        stack(directories.target, None, target_delay=long_steps) as services,
        served(GenerationServicer(Catalog.of(services.model, peers_at(services, fed.drafts[0].address)))) as (front, _),
        grpc.aio.insecure_channel(front) as channel,
    ):
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        request = request_of(PROMPT, max_tokens=20, ignore_end_token=True, speculation=ALWAYS)
        (completion,) = (await stub.Complete(generation_pb2.CompleteRequest(request=request))).completions
    assert len(completion.tokens) == 20
    assert completion.finish.speculation.undrafted_reason == "no_draft"
    assert not completion.finish.speculation.failover_events


async def test_a_text_that_moves_to_other_features_goes_on_without_its_draft(directories: Directories) -> None:
    """As in a rollout of new heads: only one verifier sends the features that the draft reads, and it is killed."""
    fed = directories.dspark, directories.eagle3
    async with stack(
        directories.target,
        directories.target,
        verifiers=2,
        draft_heads=directories.dspark,
        feature_heads=fed,
        target_delay=long_steps,
    ) as services:

        async def text(seed: int, **fields: Any) -> generation_pb2.Completion:
            sampling = {"temperature": 1.0, "seed": seed}
            return await services.generate(PROMPT, sampling=sampling, max_tokens=80, ignore_end_token=True, **fields)

        texts = [asyncio.create_task(text(seed, speculation=ALWAYS)) for seed in (1, 2)]  # one at each verifier
        await until(lambda: read_by(services.drafts[0])[1] > 0)
        await services.verifiers[0].stop()
        await until(lambda: services.draft_slots_used == 0)
        assert not any(task.done() for task in texts)
        got = [await task for task in texts]
        want = [await text(seed, plain=True) for seed in (1, 2)]
    assert [list(completion.tokens) for completion in got] == [list(completion.tokens) for completion in want]
    assert sum(completion.finish.speculation.failover_events["verifier_lost"] for completion in got) == 1
    assert all(completion.finish.speculation.undrafted_reason == "no_draft" for completion in got)


def test_up_gives_its_draft_service_heads_and_its_verifier_their_features(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft service's model is the target."""
    target, heads = directories.target, directories.dspark
    asked: dict[str, Any] = {}

    def start(path: Path, draft: str, **options: Any) -> NoReturn:
        asked.update(options, target=path, draft=draft)
        raise LocalError("no service is started")

    monkeypatch.setattr(Services, "start", start)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit):
        up(target, port=0, passed={"verifier": {}, "draft": {"heads": heads}, "orchestrator": {}, "openai": {}})
    assert Path(asked["draft"]) == asked["target"]
    assert target.samefile(asked["target"])
    of_verifier = command_of(verifier).make_context("verifier", ["--model", "m", *asked["verifier_options"]]).params
    of_draft = command_of(draft_service).make_context("draft", ["--model", "m", *asked["draft_options"]]).params
    assert of_verifier["features"] == asked["draft_heads"] == heads
    assert of_draft["engine"] == "torch"


@pytest.mark.verify
def test_up_runs_heads_in_its_draft_service(directories: Directories) -> None:
    """The draft service reads the target's embeddings and output head, and the verifier feeds it features."""
    command = [sys.executable, "-m", "specdec.cli", "up", "--port", "0", "--json", "--target", str(directories.target)]
    with subprocess.Popen([*command, "--draft-heads", str(directories.dspark)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            described = json.loads(process.stdout.readline())
            with Client(described["address"]) as client:
                result = client.complete(
                    tokens=PROMPT, max_tokens=200, ignore_end_token=True, speculation="draft", forced=True
                )
            with grpc.insecure_channel(described["services"]["draft"]) as channel:
                stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
                stats = stub.GetStats(draft_pb2.DraftServiceGetStatsRequest())
        finally:
            process.terminate()
            assert process.wait(20) == 0
    assert described["pods"]["draft"]["model"] == directories.dspark.name
    (completion,) = result.completions
    assert len(completion.tokens) == 200
    assert stats.steps > 0  # trees have grown, mostly too late for steps of a millisecond


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.verify)])
async def test_messages_of_features_at_random_end_at_most_their_session(directories: Directories, count: int) -> None:
    random = np.random.default_rng(5)
    async with (
        stack(directories.target, directories.target, draft_heads=directories.dspark) as services,
        grpc.aio.insecure_channel(services.drafts[0].address) as channel,
    ):
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        drafter = services.drafts[0].drafter
        assert isinstance(drafter, HeadsDrafter)
        width = drafter.features.width
        sent = ended = 0
        while sent < count:
            call = stub.Draft()
            opening = draft_pb2.DraftOpen(prompt_tokens=PROMPT, max_tokens=64, vocabulary_size=VOCABULARY)
            await call.write(draft_pb2.DraftRequest(open=opening))
            await call.read()
            try:
                for _ in range(25):
                    size = 2 * width * int(random.integers(1, 40)) + int(random.random() < 0.02)
                    message = model_pb2.Features(first=int(random.integers(0, 90)), values=random.bytes(size))
                    await call.write(draft_pb2.DraftRequest(features=message))
                    sent += 1
                    tokens = random.integers(0, VOCABULARY, int(random.integers(0, 2))).tolist()
                    if tokens:
                        committed = model_pb2.Committed(base=len(PROMPT), tokens=tokens)
                        await call.write(draft_pb2.DraftRequest(committed=committed))
            except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                ended += 1
            call.cancel()
        await until(lambda: services.idle)
        assert ended
        completion = await services.generate(PROMPT, max_tokens=20, ignore_end_token=True, speculation=ALWAYS)
        assert len(completion.tokens) == 20
        assert services.drafts[0].loop.works
