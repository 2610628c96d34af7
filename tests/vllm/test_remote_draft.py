"""Draft services propose for a stand-in of vLLM: a batch with moving rows, and a target with known texts.

`tests/services/test_vllm.py` tests vLLM itself.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draft_service.servicer import DraftServicer
from specdec.serving.response_queue import ResponseQueue
from specdec.serving.timeline import Timeline
from specdec.v2 import draft_pb2
from specdec.vllm import RemoteDraft, drafts
from specdec.vllm.remote_draft import MAX_MISTAKES
from specdec.vllm.settings import VllmDraftSettings
from specdec.vllm.worth import Worth
from specdec.wire.address import Address
from specdec.wire.tls_files import TlsFiles
from tests.captured_logs import captured_logs
from tests.certificates import Authority
from tests.models import CONTEXT, END
from tests.services.conftest import Directories, directories
from tests.services.test_equality import prompts
from tests.stack import Pod, stack, until

__all__ = ["directories"]  # the fixture

DEPTH = 5
TOKENS = 60
Texts = list[tuple[list[int], list[int]]]
"""Prompts and their continuations."""


def config(target: Path, rank: int = 0) -> Any:
    """Return the fields of vLLM's configuration that are used."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(target), revision=None, max_model_len=CONTEXT),
        speculative_config=SimpleNamespace(num_speculative_tokens=DEPTH),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2),
    )


class Always(Worth):
    """Proposals always pay."""

    def after_step(self, texts: int, tokens: int, now: float, *, continues: bool) -> bool:
        return True


class Batch:
    """Texts with known continuations, in rows that move from step to step."""

    def __init__(self, proposer: RemoteDraft, texts: Texts) -> None:
        self._proposer = proposer
        self._prompts = [prompt for prompt, _ in texts]
        self._wants = [want for _, want in texts]
        self._done = [0] * len(texts)
        self._proposed: dict[int, list[int]] = {}
        self.steps = self.accepted = self.offered = 0

    @property
    def over(self) -> bool:
        return all(done == len(want) for done, want in zip(self._done, self._wants, strict=True))

    def step(self) -> None:
        """Verify the proposed candidates, add the target's token to each text, and get the next proposals."""
        self.steps += 1
        time.sleep(0.01)  # like a target's pass: a briefly delayed draft does not miss the whole text
        rows = [n for n, want in enumerate(self._wants) if self._done[n] < len(want)]
        rows = rows[self.steps % len(rows) :] + rows[: self.steps % len(rows)]
        tokens = np.zeros((len(rows), CONTEXT), dtype=np.int32)
        lengths = np.zeros(len(rows), dtype=np.int32)
        sampled: list[list[int]] = []
        for row, number in enumerate(rows):
            rest = self._wants[number][self._done[number] :]
            candidates = self._proposed.get(number, [])
            assert len(candidates) <= DEPTH
            right = next((i for i, each in enumerate(candidates) if rest[i : i + 1] != [each]), len(candidates))
            said = rest[: right + 1]
            self.offered += len(candidates)
            self.accepted += right
            self._done[number] += len(said)
            text = self._prompts[number] + self._wants[number][: self._done[number]]
            tokens[row, : len(text)], lengths[row] = text, len(text)
            sampled.append(said)
        proposed = self._proposer.propose(sampled, lengths, tokens, slot_mappings=None)
        self._proposed = dict(zip(rows, proposed, strict=True))

    async def run(self) -> None:
        while not self.over:
            await asyncio.to_thread(self.step)


@pytest.fixture(scope="module")
def texts(directories: Directories) -> Texts:
    """Prompts, and what the target says after them."""
    said = [(prompt, directories.oracle.greedy(prompt, TOKENS, frozenset({END}))) for prompt in prompts(6, seed=9)]
    return [(prompt, want) for prompt, want in said if want]


def begun(texts: Texts) -> Texts:
    """Return the beginnings of texts."""
    return [(prompt, want[:20]) for prompt, want in texts]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("SPECDEC_DRAFT_WAIT_MS", "1000")
    return monkeypatch


async def test_a_draft_proposes_for_every_text(
    directories: Directories, texts: Texts, environment: pytest.MonkeyPatch
) -> None:
    async with stack(directories.target, directories.target, drafts=2) as services:
        environment.setenv("SPECDEC_DRAFTS", ",".join(pod.address for pod in services.drafts))
        proposer = RemoteDraft(config(directories.target), Always())
        proposer.load_model(None)
        batch = Batch(proposer, texts)
        await batch.run()
        assert batch.accepted > 0.9 * batch.offered > 100  # except for near ties in the two engines
        assert all(pod.loop.stats.sent for pod in services.drafts)


async def test_drafts_are_found_by_name_and_with_tls(
    directories: Directories, texts: Texts, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "ca")
    files = TlsFiles(*authority.issue("server", "localhost"), authority.file)
    async with stack(directories.target, directories.target) as services:
        draft = Pod(services.drafts[0].service, tls=files)
        await draft.start()
        certificate, key = authority.issue("client", "vllm")
        port = draft.address.rpartition(":")[2]
        environment.setenv("SPECDEC_DRAFTS", f"dns:///localhost:{port}")  # the certificate is for the name
        environment.setenv("SPECDEC_DRAFT_TLS_CA", str(authority.file))
        environment.setenv("SPECDEC_DRAFT_TLS_CERT", str(certificate))
        environment.setenv("SPECDEC_DRAFT_TLS_KEY", str(key))
        proposer, said = RemoteDraft(config(directories.target), Always()), texts[:3]
        batch = Batch(proposer, said)
        async with asyncio.timeout(30):
            while not batch.accepted:
                batch = Batch(proposer, said)
                await batch.run()
        await draft.stop()


async def test_a_draft_that_dies_costs_guesses(
    directories: Directories, texts: Texts, environment: pytest.MonkeyPatch
) -> None:
    async with stack(directories.target, directories.target) as services:
        (draft,) = services.drafts
        environment.setenv("SPECDEC_DRAFTS", draft.address)
        proposer, said = RemoteDraft(config(directories.target), Always()), texts[:3]
        before = Batch(proposer, said)
        while not before.accepted:
            await asyncio.to_thread(before.step)
        await draft.stop()
        begin = time.monotonic()
        await before.run()
        without = Batch(proposer, said)
        await without.run()
        assert without.offered == 0
        assert time.monotonic() - begin < 10.0  # a waiting step takes a second: few wait
        await draft.start()
        after = Batch(proposer, said)
        async with asyncio.timeout(30):
            while not after.accepted:
                after = Batch(proposer, said)
                await after.run()


class Mute(DraftServicer):
    """Accepts sessions, stays alive, and sends no candidates."""

    def attach(self, session: Any, responses: ResponseQueue[draft_pb2.DraftResponse], timeline: Timeline) -> None:
        pass


async def test_a_draft_that_says_nothing_is_waited_for_a_few_times(
    directories: Directories, texts: Texts, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("SPECDEC_DRAFT_WAIT_MS", "200")
    async with stack(directories.target, directories.near, draft_kind=Mute) as services:
        environment.setenv("SPECDEC_DRAFTS", services.drafts[0].address)
        batch = Batch(RemoteDraft(config(directories.target), Always()), texts[:4])
        begin = time.monotonic()
        await batch.run()
        assert batch.offered == 0
        assert time.monotonic() - begin < 0.2 * batch.steps / 2  # most steps do not wait


class Leaving(DraftServicer):
    """Ends every session immediately with status OK."""

    async def Draft(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        pass


async def test_a_draft_that_ends_its_sessions_costs_guesses(
    directories: Directories, texts: Texts, environment: pytest.MonkeyPatch
) -> None:
    environment.setattr(drafts, "AGAIN_SECONDS", 0.02)
    async with stack(directories.target, directories.near, draft_kind=Leaving) as services:
        environment.setenv("SPECDEC_DRAFTS", services.drafts[0].address)
        proposer = RemoteDraft(config(directories.target), Always())
        for _ in range(3):
            batch = Batch(proposer, begun(texts[:2]))
            await batch.run()
            assert batch.offered == 0


class Now(Worth):
    """Proposals pay when the test sets it."""

    proposes = True

    def after_step(self, texts: int, tokens: int, now: float, *, continues: bool) -> bool:
        return self.proposes


async def test_a_draft_pauses_while_nothing_is_proposed(
    directories: Directories, texts: Texts, environment: pytest.MonkeyPatch
) -> None:
    async with stack(directories.target, directories.target) as services:
        environment.setenv("SPECDEC_DRAFTS", services.drafts[0].address)
        now, said = Now(), texts[:3]
        batch = Batch(RemoteDraft(config(directories.target), now), said)
        while not batch.accepted:
            await asyncio.to_thread(batch.step)
        now.proposes = False
        await asyncio.to_thread(batch.step)  # verifies earlier proposals
        offered = batch.offered
        for _ in range(5):
            await asyncio.to_thread(batch.step)
        assert batch.offered == offered
        now.proposes = True
        accepted = batch.accepted
        await batch.run()
        assert batch.accepted > accepted  # the draft has caught up


async def test_a_draft_with_another_tokenizer_is_refused(
    directories: Directories, texts: Texts, environment: pytest.MonkeyPatch
) -> None:
    async with stack(directories.target, directories.foreign) as services:
        environment.setenv("SPECDEC_DRAFTS", services.drafts[0].address)
        batch = Batch(RemoteDraft(config(directories.target), Always()), begun(texts[:2]))
        with captured_logs() as logs:
            await batch.run()
            await until(lambda: any(each["event"] == "draft_refused" for each in logs))
        assert batch.offered == 0
        (refused,) = (each for each in logs if each["event"] == "draft_refused")
        assert "different tokenizer" in refused["why"]


async def test_only_one_part_of_a_model_asks(
    directories: Directories, texts: Texts, environment: pytest.MonkeyPatch
) -> None:
    async with stack(directories.target, directories.target) as services:
        environment.setenv("SPECDEC_DRAFTS", services.drafts[0].address)
        batch = Batch(RemoteDraft(config(directories.target, rank=1), Always()), begun(texts[:1]))
        await batch.run()
        assert batch.offered == 0


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SPECDEC_DRAFTS is not set"):
        VllmDraftSettings.of({})
    with pytest.raises(ValueError, match="SPECDEC_DRAFTS: 'http://x:1'"):
        VllmDraftSettings.of({"SPECDEC_DRAFTS": "http://x:1"})
    for wait in ("-1", "soon", "1e9", "nan"):
        with pytest.raises(ValueError, match=f"SPECDEC_DRAFT_WAIT_MS is '{wait}', must be from 0 to 1000"):
            VllmDraftSettings.of({"SPECDEC_DRAFTS": "a:1", "SPECDEC_DRAFT_WAIT_MS": wait})
    settings = VllmDraftSettings.of({"SPECDEC_DRAFTS": "a:1, b:2", "SPECDEC_DRAFT_WAIT_MS": "2"})
    assert settings == VllmDraftSettings((Address.parse("a:1"), Address.parse("b:2")), 0.002, None)
    missing = str(tmp_path / "ca.pem")
    with pytest.raises(Exception, match="SPECDEC_DRAFT_TLS_CA"):
        VllmDraftSettings.of({"SPECDEC_DRAFTS": "a:1", "SPECDEC_DRAFT_TLS_CA": missing})


async def test_a_mistake_of_ours_costs_vllm_proposals_alone(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception would end vLLM's engine with all requests."""

    class Failing(Worth):
        asked = 0

        def after_step(self, texts: int, tokens: int, now: float, *, continues: bool) -> bool:
            self.asked += 1
            raise RuntimeError("a mistake")

    monkeypatch.setenv("SPECDEC_DRAFTS", "127.0.0.1:1")
    worth = Failing()
    proposer = RemoteDraft(config(directories.target), worth)
    tokens = np.arange(3, 3 + 2 * CONTEXT, dtype=np.int32).reshape(2, CONTEXT)
    with captured_logs() as logs:
        for _ in range(2 * MAX_MISTAKES):
            assert proposer.propose([[5], []], np.array([4, 5]), tokens, None, something="newer") == [[], []]
    assert worth.asked == MAX_MISTAKES
    assert [line["event"] for line in logs] == ["proposing_failed"] * MAX_MISTAKES + ["proposing_ended"]
