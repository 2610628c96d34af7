"""Bytes between the services under CONTRASTIVE, for each token of the text, by the size of the vocabulary."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.prompts import held_out
from draft_service.session import DrafterSession
from specdec.decoding.proposal import MAX_PARTIAL_IDS
from specdec.decoding.sampling import Contrast
from specdec.local import DEMO
from specdec.v2 import draft_pb2, model_pb2, verifier_pb2
from tests.margins import Oracle
from tests.models import make, near
from tests.services.test_contrastive_queries import AskedDraft, SeenVerifier, VerifierOfTheLastVersion, contrasted, seen
from tests.services.test_rules import Reference, slow_target
from tests.stack import stack
from verifier_service.backend.session_backend import BackendSession

MAX_BYTES_A_TOKEN = 20_000
TOKENS = 48


class CountingVerifier(SeenVerifier):
    received = 0  # bytes

    def act(self, session: BackendSession, request: verifier_pb2.VerifyRequest, arrived: float) -> None:
        self.received += request.ByteSize()
        super().act(session, request, arrived)


class CountingVerifierOfTheLastVersion(CountingVerifier, VerifierOfTheLastVersion):
    """A verifier that gets whole rows."""


class CountingDraft(AskedDraft):
    received = 0  # bytes

    def act(self, session: DrafterSession, request: draft_pb2.DraftRequest, arrived: float) -> None:
        self.received += request.ByteSize()
        super().act(session, request, arrived)


@dataclass(frozen=True)
class Pair:
    target: Path
    draft: Path
    prompts: Sequence[list[int]]


SHARP, FLAT = 0.85, 0.5
"""Standard deviations of a random model's weights: with SHARP it is about as certain of its choices as a trained model,
with FLAT it finds a hundred tokens plausible."""


def pair(vocabulary: int, folder: Path, deviation: float = SHARP) -> Pair:
    """Return the demo pair if this is its vocabulary, otherwise a random target and a draft near it."""
    if vocabulary == 4096:
        return Pair(DEMO / "target", DEMO / "draft", held_out(1, tokens=32))
    target = make("llama", folder / "target", vocab_size=vocabulary, initializer_range=deviation)
    generator = random.Random(vocabulary)
    prompts = [[generator.randrange(3, vocabulary) for _ in range(16)] for _ in range(2)]
    return Pair(target, near(target, folder / "draft", noise=0.05), prompts)


async def measured(models: Pair, kind: type[CountingVerifier]) -> tuple[float, float, float, list[list[int]]]:
    """Return bytes a token, queries a token, tokens a step, and the texts. The orchestrator relays candidates and
    queries unchanged, so bytes that arrive at the verifier or the draft have been on the wire twice."""
    async with stack(
        models.target, models.draft, target_delay=slow_target, verifier_kind=kind, draft_kind=CountingDraft
    ) as services:
        answers = [await contrasted(services, prompt, max_tokens=TOKENS) for prompt in models.prompts]
        verifier, draft = services.verifiers[0].service, services.drafts[0].service
        assert isinstance(verifier, CountingVerifier)
        assert isinstance(draft, CountingDraft)
        texts = [list(answer.tokens) for answer in answers]
        count = sum(map(len, texts))
        steps = sum(answer.finish.speculation.steps for answer in answers)
        sent = 2 * (verifier.received + draft.received)
        return sent / count, len(draft.queries) / count, count / steps, texts


@pytest.mark.parametrize(
    ("vocabulary", "deviation"),
    [
        (4096, SHARP),
        *(
            pytest.param(*case, marks=pytest.mark.verify)
            for case in ((50_257, SHARP), (151_936, SHARP), (151_936, FLAT))
        ),
    ],
)
async def test_a_token_takes_20_kilobytes_at_most(vocabulary: int, deviation: float, tmp_path: Path) -> None:
    models = pair(vocabulary, tmp_path, deviation)
    whole, _, fast, _ = await measured(models, CountingVerifierOfTheLastVersion)
    partial, queries, steps, texts = await measured(models, CountingVerifier)
    print(
        "\n| ids | whole: bytes a token, tokens a step | partial: bytes a token, tokens a step, queries a token |\n"
        f"| {vocabulary}, {deviation} | {whole:.0f}, {fast:.2f} | {partial:.0f}, {steps:.2f}, {queries:.3f} |"
    )
    assert partial <= MAX_BYTES_A_TOKEN
    assert partial < whole / 3
    reference = Reference(Oracle(models.target), Oracle(models.draft), Contrast())
    ties = sum(reference.check(prompt, text) for prompt, text in zip(models.prompts, texts, strict=True))
    assert ties <= 1


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair(50_257, tmp_path_factory.mktemp("flat"), FLAT)


@pytest.mark.parametrize(("alpha", "asked_whole"), [(1e-30, True), (0.003, False)])
async def test_where_most_of_a_large_vocabulary_is_plausible_whole_rows_are_asked_for(
    alpha: float, asked_whole: bool, flat: Pair
) -> None:
    """Each token then takes a query and a row; the choices are the same."""
    models, message = flat, model_pb2.Contrast(alpha=alpha)
    reference = Reference(Oracle(models.target), Oracle(models.draft), Contrast(message.alpha))
    async with stack(models.target, models.draft, verifier_kind=SeenVerifier, draft_kind=AskedDraft) as services:
        answer = await contrasted(services, models.prompts[0], max_tokens=8, contrast=message)
        answers = [row for row in seen(services) if row.answer]
        assert max(len(row.id_gaps) for row in seen(services)) <= MAX_PARTIAL_IDS
        assert answers
        assert all((not row.id_gaps) is asked_whole for row in answers)
        assert all(len(row.values) == 2 * 50_257 for row in answers if not row.id_gaps)
    assert len(answer.tokens) == 8
    assert reference.check(models.prompts[0], list(answer.tokens)) == 0
