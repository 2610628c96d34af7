"""A draft learns from texts kept by draft services. They stay in memory, and the draft records whose texts they are."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from specdec.cli.access import Access
from specdec.cli.train_draft import kept_traffic
from specdec.engine.learned_from import LEARNED_FROM, LearnedFrom, tenant_digest
from specdec.engine.model_directory import COMPLETE, ModelDirectory
from specdec.roles import environment
from specdec.training.draft import DraftPlan
from specdec.training.draft_command import DraftOptions, prepared
from specdec.training.files import PLAN, STATE, TEXTS, replace_json
from specdec.training.given_draft import GivenDraft
from specdec.training.texts import TextError
from specdec.training.traffic import TrainingTraffic, kept_texts
from specdec.v2 import learning_pb2, learning_pb2_grpc
from tests.models import VOCABULARY, make, near

PLANTED = list(range(10, 90))
"""A sequence of tokens that no other text has."""


def messages() -> list[learning_pb2.KeptText]:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, VOCABULARY, (200,), generator=generator).tolist() for _ in range(8)]
    return [
        learning_pb2.KeptText(tenant_digest=tenant_digest(tenant), tokens=text, age_us=5_000_000)
        for text, tenant in zip([*texts, PLANTED * 3], [*"aaaabbbb", "b"], strict=True)
    ]


def test_texts_are_joined_and_tenants_dated_by_their_oldest_text() -> None:
    kept = [
        learning_pb2.KeptText(tenant_digest="x", tokens=[1, 2], age_us=1_000_000),
        learning_pb2.KeptText(tenant_digest="y", tokens=[3], age_us=2_000_000),
        learning_pb2.KeptText(tenant_digest="x", tokens=[4], age_us=3_000_000),
    ]
    traffic = TrainingTraffic.of(kept, 10.0)
    assert traffic.tokens(0).tolist() == [4, 0, 3, 0, 1, 2, 0]  # the oldest first, whichever service kept it
    assert traffic.tokens(None).tolist() == [4, 3, 1, 2]
    assert traffic.tenants == {"x": 7.0, "y": 8.0}


def test_a_training_writes_weights_and_whose_texts_they_are_of_alone(tmp_path: Path) -> None:
    """The draft given to the training has already learned from two tenants."""
    near(make("llama", tmp_path / "target"), tmp_path / "draft", noise=0.1)
    before = LearnedFrom().with_texts({tenant_digest("b"): 50.0, tenant_digest("c"): 60.0})
    replace_json(tmp_path / "draft" / LEARNED_FROM, before.content)
    target = ModelDirectory(tmp_path / "target")
    draft = GivenDraft.checked(tmp_path / "draft", target, "cpu", untrained=False)
    plan = DraftPlan(steps=3, rows=2, length=64, rate=0.001)
    options = DraftOptions([], 100, [], None, "cpu", TrainingTraffic.of(messages(), 100.0))
    out = tmp_path / "out"
    work = prepared(target, draft, options, plan, out, resume=False)
    while not work.own_text.over:
        work.own_text.step()
    work.own_text.save(out)
    training = work.training(out)
    for steps in (1, 2):
        for _ in range(steps):
            training.step()
        training.save(out)
        assert not any((out / name).exists() for name in (PLAN, STATE, TEXTS))
        planted = torch.tensor(PLANTED[:16]).numpy()
        for file in out.rglob("*"):
            content = file.read_bytes()
            assert planted.tobytes() not in content
            assert planted.astype("int32").tobytes() not in content
    assert training.over
    learned_from = LearnedFrom.of(out)
    assert learned_from is not None
    assert len(learned_from.oldest) == 3
    for tenant, oldest in (("a", 95.0), ("b", 50.0), ("c", 60.0)):
        assert learned_from.has(tenant_digest(tenant), oldest)
        assert not learned_from.has(tenant_digest(tenant), oldest - 1)
        assert tenant_digest(tenant) not in (out / LEARNED_FROM).read_text()
    assert ModelDirectory(out).model_fingerprint != ModelDirectory(tmp_path / "draft").model_fingerprint


class Keeping(learning_pb2_grpc.LearningServiceServicer):
    """Sends each text in its own response, to any caller with the key `k`."""

    def GetTraffic(
        self, request: learning_pb2.GetTrafficRequest, context: grpc.ServicerContext
    ) -> Iterator[learning_pb2.GetTrafficResponse]:
        if ("authorization", "Bearer k") not in map(tuple, context.invocation_metadata()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the key is wrong")
        for text in messages():
            yield learning_pb2.GetTrafficResponse(texts=[text])

    def Forget(self, request: learning_pb2.ForgetRequest, context: grpc.ServicerContext) -> learning_pb2.ForgetResponse:
        raise NotImplementedError


def test_random_weights_have_learned_from_nobody(tmp_path: Path) -> None:
    """With --untrained, only the configuration is taken from the draft's directory, not the weights."""
    near(make("llama", tmp_path / "target"), tmp_path / "draft", noise=0.1)
    replace_json(tmp_path / "draft" / LEARNED_FROM, LearnedFrom().with_texts({tenant_digest("a"): 50.0}).content)
    target = ModelDirectory(tmp_path / "target")
    for untrained, learned in ((False, 1), (True, 0)):
        draft = GivenDraft.checked(tmp_path / "draft", target, "cpu", untrained=untrained)
        (tmp_path / "corpus").write_bytes(bytes(range(1, 128)) * 20)
        plan = DraftPlan(untrained=untrained, steps=1, rows=1, length=64, rate=0.001)
        out = tmp_path / f"out{learned}"
        options = DraftOptions([tmp_path / "corpus"], 0, [], None, "cpu")
        prepared(target, draft, options, plan, out, resume=False).training(out)
        found = LearnedFrom.of(out)
        assert (0 if found is None else len(found.oldest)) == learned


@contextmanager
def keeping(host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    learning_pb2_grpc.add_LearningServiceServicer_to_server(Keeping(), server)
    port = server.add_insecure_port(f"{host}:{port}")
    server.start()
    yield f"{host}:{port}"
    server.stop(None)


def test_texts_are_read_from_a_draft_service() -> None:
    with keeping() as address, grpc.insecure_channel(address) as channel:
        assert kept_texts(address, channel, (("authorization", "Bearer k"),), 10.0) == messages()
        with pytest.raises(TextError, match=rf"--traffic: {address}: .*the key is wrong"):
            kept_texts(address, channel, (), 10.0)


def test_texts_are_read_from_every_server_behind_a_name() -> None:
    asked = []

    def resolve(host: str, port: int, *, type: int) -> list[tuple[Any, ...]]:
        asked.append(host)
        return [(socket.AF_INET, type, 0, "", (f"127.0.0.{number}", port)) for number in (1, 2)]

    with keeping() as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(TextError, match=rf"--traffic: 127\.0\.0\.2:{port}: "):
            kept_traffic(f"drafts.example:{port}", Access(None, "k"), resolve)
        with keeping("127.0.0.2", port):
            found = kept_traffic(f"drafts.example:{port}", Access(None, "k"), resolve)
    assert asked == ["drafts.example"] * 2
    assert len(found.texts) == len(messages())  # those of both are the same


def test_the_command_learns_from_served_labels_and_says_whose(tmp_path: Path) -> None:
    near(make("llama", tmp_path / "target"), tmp_path / "draft", noise=0.1)
    (tmp_path / "key").write_text("k")
    begin = time.time()
    with keeping() as address:
        words = (
            f"target draft out --traffic {address} --api-key-file key --served-labels --steps 3 --rows 2 --length 64"
        )
        done = subprocess.run(
            [sys.executable, "-m", "specdec.cli", "train-draft", *words.split(), "--threads", "1"],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "out\n"), done.stderr
    assert "9 kept texts of 2 tenants" in done.stderr
    assert "held-out text: acceptance " in done.stderr
    assert (tmp_path / "out" / COMPLETE).is_file()
    learned_from = LearnedFrom.of(tmp_path / "out")
    assert learned_from is not None
    assert [learned_from.has(tenant_digest(tenant), time.time() - 5) for tenant in "abc"] == [True, True, False]
    assert not any(learned_from.has(tenant_digest(tenant), begin - 6) for tenant in "ab")
