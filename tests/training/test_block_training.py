"""Training of block drafts: a block sees what it sees in service, the draft learns, a stopped training resumes exactly,
and a trained draft changes no token."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdec.decoding.noise import sample_seed
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.heads.block import BlockDraft
from specdec.engine.heads.block_files import BlockFiles
from specdec.engine.heads.files import TargetShape
from specdec.engine.heads.text_memory import TextMemory
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.unsupported import UnsupportedModelError
from specdec.local import DEMO
from specdec.text.tokenizer import Tokenizer
from specdec.training.block import BlockPlan, BlockTraining, layers_read, rarest
from specdec.training.files import PLAN as PLAN_FILE
from specdec.training.files import STATE, TEXTS
from specdec.training.layers import read_features
from specdec.training.models import load_target
from specdec.training.plan import Origin
from specdec.training.texts import PROMPT_TOKENS, Windows, continuations, tokens_of
from specdec.v2 import generation_pb2, model_pb2
from tests.margins import Oracle
from tests.models import VOCABULARY, make, save
from tests.stack import stack
from tests.training.test_eagle3_training import close, features_in_service, gradients_of, weights_of
from tests.verifier_service.fakes import Decided
from verifier_service.backend.result import Mode

PLAN = BlockPlan(block=3, layers=2, markov_rank=6, anchors=5, steps=6, rows=2, length=16, rate=0.003)
ORIGIN = Origin("tiny", "0123", 500, "fp-tiny")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    return ModelDirectory(make("llama", tmp_path_factory.mktemp("model") / "llama"))


@pytest.fixture(scope="module")
def model(directory: ModelDirectory) -> PreTrainedModel:
    return load_target(directory, "cpu")


@pytest.fixture(scope="module")
def windows() -> Windows:
    return Windows(torch.randint(3, VOCABULARY, (640,), generator=torch.Generator().manual_seed(0)), PLAN.length)


def training_of(model: PreTrainedModel, windows: Windows, plan: BlockPlan = PLAN) -> BlockTraining:
    return BlockTraining(model, windows, plan, ORIGIN)


def unsettled(training: BlockTraining) -> BlockTraining:
    """Move the weights away from values that would hide an error: norms of ones, and heads without effect."""
    random = torch.Generator().manual_seed(1)
    for parameter in training._trained:
        parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=random))
    return training


def served(
    training: BlockTraining, text: Tensor, anchor: int, features: Tensor, draft: BlockDraft | None = None
) -> Tensor:
    """Return h [block, d'] below a text up to `anchor`, computed from features [length, m, d] as in the verifier, by
    `draft` or else by the training's draft."""
    draft = draft or training.draft
    memory = TextMemory(
        len(text), draft.shape.layers * draft.shape.kv_heads, draft.shape.width, torch.float32, torch.device("cpu")
    )
    slots = 1 + np.arange(anchor)
    draft.read(draft.fused(features[:anchor]), torch.arange(anchor), slots, memory)
    return draft.states(text[anchor : anchor + 1], torch.tensor([anchor]), [slots], memory)[0]


# --- what a block sees ------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_block_sees_what_it_sees_in_service(architecture: str, windows: Windows, tmp_path: Path) -> None:
    """The comparison is with the serving engine's features and the serving code."""
    directory = ModelDirectory(make(architecture, tmp_path / architecture))
    training = unsettled(training_of(load_target(directory, "cpu"), windows))
    engine, texts = CpuEngine(directory, capacity=256, exact=False), windows.trained[:2]
    features, _ = read_features(training._model, texts, training.layers)
    anchors = torch.tensor([1, 2, 9, PLAN.length - PLAN.block])
    states = training._states(texts, features, anchors)
    for number, text in enumerate(texts):
        of_engine = features_in_service(engine, text.tolist(), training.layers)
        for place, anchor in enumerate(anchors.tolist()):
            close(states[number, place], served(training, text, anchor, of_engine))


@torch.no_grad()
def test_a_guess_sees_nothing_of_the_text_after_it(model: PreTrainedModel, windows: Windows) -> None:
    """Guess k, counted from 0, depends only on the tokens up to the anchor + k."""
    training, text, anchors = unsettled(training_of(model, windows)), windows.trained[:1], torch.tensor([6])
    for ahead in range(PLAN.block):
        changed = text.clone()
        changed[:, 7 + ahead :] = (changed[:, 7 + ahead :] + 1) % VOCABULARY
        one, other = (guesses_of(training, own, anchors) for own in (text, changed))
        torch.testing.assert_close(one[ahead], other[ahead])
        if ahead + 1 < PLAN.block:  # the Markov head of the next guess reads a changed token
            assert not torch.allclose(one[ahead + 1], other[ahead + 1], atol=1e-2)


def guesses_of(training: BlockTraining, texts: Tensor, anchors: Tensor) -> list[Tensor]:
    """Return the logits of each guess of a block, [rows, anchors, V]."""
    features, _ = read_features(training._model, texts, training.layers)
    states = training._states(texts, features, anchors)
    return [training._guess(texts[:, anchors + ahead], states[:, :, ahead]) for ahead in range(PLAN.block)]


# --- what it learns ---------------------------------------------------------------------------------


def test_a_step_follows_the_gradient_of_its_formula(model: PreTrainedModel, windows: Windows) -> None:
    training, other = (unsettled(training_of(model, windows)) for _ in range(2))
    texts = windows.trained[: PLAN.rows]
    first = training._learn(texts)

    anchors = other._anchors(PLAN.length)
    assert len(set(anchors.tolist())) == PLAN.anchors
    features, of_target = read_features(other._model, texts, other.layers)
    states = other._states(texts, features, anchors)
    weights = [math.exp(-ahead / 4) for ahead in range(PLAN.block)]
    total, entropies = torch.zeros(()), []
    for ahead, logits in enumerate(guesses_of(other, texts, anchors)):
        confidence = other.draft.confidence(texts[:, anchors + ahead], states[:, :, ahead]).sigmoid()
        for row, place in np.ndindex(*confidence.shape):
            p = of_target[row, int(anchors[place]) + ahead].softmax(-1)
            q = logits[row, place].softmax(-1)
            entropy, l1 = -(p * q.log()).sum(), (p - q).abs().sum()
            taken, c = 1 - l1.detach() / 2, confidence[row, place]
            is_taken = -(taken * c.log() + (1 - taken) * (1 - c).log())
            loss = 0.1 * entropy + 0.9 * l1 + is_taken
            total = total + weights[ahead] / sum(weights) * loss / confidence.numel()
            if ahead == 0:
                entropies.append(entropy.item())
    assert first == pytest.approx(np.mean(entropies), rel=1e-4)
    total.backward()  # type: ignore[no-untyped-call]
    assert len(gradients_of(training)) == len(training._trained)
    for one, wanted in zip(gradients_of(training), gradients_of(other), strict=True):
        torch.testing.assert_close(one, wanted, atol=1e-5, rtol=1e-3)


def test_a_step_in_several_passes_has_the_gradient_of_one(model: PreTrainedModel, windows: Windows) -> None:
    whole, parts = (unsettled(training_of(model, windows)) for _ in range(2))
    batch = windows.trained[:3]
    whole._learn_part(batch, 1.0)
    parts._learn_part(batch[:1], 1 / 3)
    parts._learn_part(batch[1:], 2 / 3)
    for one, other in zip(gradients_of(whole), gradients_of(parts), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def check_written(
    training: BlockTraining, target: PreTrainedModel, directory: ModelDirectory, text: Tensor, out: Path
) -> BlockFiles:
    """Write the draft; check that a draft loaded from the files is the same. Return the files."""
    training.save(out)
    files = BlockFiles.of(out, TargetShape.of(directory))
    table: Any = target.get_input_embeddings()
    draft = files.load(table.weight.detach(), target.get_output_embeddings(), "cpu", torch.float32)
    assert (draft.shape, draft.variant) == (training.draft.shape, training.draft.variant)
    for parameter in training._trained:
        parameter.data.copy_(parameter.data.bfloat16())  # rounded as in the file
    features, tokens = torch.randn(9, draft.shape.features, draft.shape.stream), text[:9]
    with torch.no_grad():
        states = served(training, tokens, 4, features)
        close(served(training, tokens, 4, features, draft), states)
        for of_head in ("logits", "markov", "confidence"):
            given = {"logits": (states,), "markov": (tokens[4:7], states, None), "confidence": (tokens[4:7], states)}[
                of_head
            ]
            one, other = (getattr(own, of_head)(*given) for own in (draft, training.draft))
            close(*((own[0] if of_head == "markov" else own) for own in (one, other)))
    return files


def test_a_written_draft_is_the_trained_one(
    directory: ModelDirectory, model: PreTrainedModel, windows: Windows, tmp_path: Path
) -> None:
    training = unsettled(training_of(model, windows))
    files = check_written(training, model, directory, windows.trained[0], tmp_path / "draft")
    assert files.config.layers == (1,)


def test_a_bias_of_the_targets_output_head_counts_in_training(windows: Windows, tmp_path: Path) -> None:
    """It counts in service: the served draft applies the target's own output head."""
    config = transformers.PhiConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    phi = transformers.PhiForCausalLM(config)
    torch.nn.init.normal_(phi.lm_head.bias)
    directory = ModelDirectory(save(phi, tmp_path / "phi"))
    model = load_target(directory, "cpu")
    check_written(unsettled(training_of(model, windows)), model, directory, windows.trained[0], tmp_path / "draft")


@pytest.mark.verify
def test_a_draft_of_the_demo_target_learns_its_language(tmp_path: Path) -> None:
    directory = ModelDirectory(DEMO / "target")
    target = load_target(directory, "cpu").float()
    text = tokens_of([Path(argparse.__file__)], Tokenizer(directory), end=0)
    plan = BlockPlan(block=3, layers=1, markov_rank=16, anchors=16, steps=16, rows=4, length=64, rate=0.003)
    training = training_of(target, Windows(text, plan.length), plan)
    before = training.accuracies(most=4)
    losses = [training.step() for _ in range(plan.steps)]
    after = training.accuracies(most=4)
    assert losses[-1] < losses[0] - 1.0
    assert len(after) == plan.block
    for ahead in range(plan.block):
        assert after[ahead][10] > before[ahead][10] + 0.1
        assert after[ahead][1] <= after[ahead][3] <= after[ahead][10] <= 1.0
    files = check_written(training, target, directory, text, tmp_path / "draft")
    assert not any((tmp_path / "draft" / name).exists() for name in (STATE, PLAN_FILE, TEXTS))
    assert files.config.layers == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("layers", "read"),
    [(1, (0,)), (2, (1,)), (3, (1, 2)), (6, (1, 2, 3, 4, 5)), (10, (2, 4, 5, 6, 8)), (36, (2, 10, 18, 26, 34))],
)
def test_features_are_spread_over_the_layers(layers: int, read: tuple[int, ...]) -> None:
    assert layers_read(layers) == read


def test_the_mask_is_the_rarest_token_of_the_text() -> None:
    embeddings = torch.ones(5, 2)
    assert rarest(torch.tensor([0, 1, 1, 3]), embeddings) == 4
    assert rarest(torch.tensor([0, 1, 1, 2, 2]), embeddings[:3]) == 0
    embeddings[4] = 0.0
    assert rarest(torch.tensor([0, 1, 1, 3]), embeddings) == 2


def test_a_target_with_narrow_embeddings_is_refused(tmp_path: Path) -> None:
    narrow = load_target(ModelDirectory(make("opt", tmp_path / "opt", word_embed_proj_dim=32)), "cpu")
    with pytest.raises(UnsupportedModelError, match=r"must have 64, as its layers, to train a DSpark block draft"):
        BlockTraining.check(narrow)


# --- going on, and serving --------------------------------------------------------------------------


def test_a_training_in_two_parts_gives_the_draft_of_one(
    model: PreTrainedModel, windows: Windows, tmp_path: Path
) -> None:
    whole = training_of(model, windows)
    for _ in range(PLAN.steps):
        whole.step()
    for stop in (0, 4):
        first = training_of(model, windows)
        for _ in range(stop):
            first.step()
        out = tmp_path / str(stop)
        first.save(out)
        (out / TEXTS).write_bytes(b"")
        second = training_of(model, windows)
        second.resume(out)
        assert second.done == stop
        while not second.over:
            second.step()
        for one, other in zip(weights_of(whole), weights_of(second), strict=True):
            assert torch.equal(one, other)


@pytest.mark.verify
async def test_a_trained_draft_guesses_what_it_has_learned_and_changes_no_token(tmp_path: Path) -> None:
    """It learns greedy texts of a target by heart, and guesses them from their beginnings. The target's logits are made
    as sharp as a trained target's, or else no guess would be likely enough to be offered."""
    weights = make("llama", target := tmp_path / "target") / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"lm_head.weight": 6 * tensors["lm_head.weight"]}, weights, metadata={"format": "pt"})
    model = load_target(ModelDirectory(target), "cpu")
    begun = torch.randint(3, VOCABULARY, (400,), generator=torch.Generator().manual_seed(0))
    texts = torch.cat([*continuations(model, begun, 80, 8, seed=1)]).flatten()
    plan = BlockPlan(block=4, layers=1, markov_rank=32, anchors=24, steps=400, rows=4, length=80, rate=0.01)
    training = training_of(model, Windows(texts, plan.length), plan)
    while not training.over:
        training.step()
    training.save(draft := tmp_path / "draft")
    prompts = [text[:PROMPT_TOKENS].tolist() for text in texts.view(8, 80)[:4]]
    oracle, by_heads = Oracle(target), generation_pb2.Speculation(drafters=[model_pb2.DRAFTER_HEADS])
    accepted = dict.fromkeys((0.0, 0.8), 0)
    async with stack(target, None, heads=draft, controller=Decided(Mode.LOCAL_DRAFT)) as services:
        for temperature in accepted:
            sampling = {"temperature": temperature, "seed": 3}
            sampler = RequestSampler(Sampling(temperature=temperature, seed=sample_seed(3, 0)))
            for prompt in prompts:
                plain = await services.generate(prompt, sampling=sampling, max_tokens=48, plain=True)
                own = await services.generate(prompt, sampling=sampling, max_tokens=48, speculation=by_heads)
                oracle.same(prompt, list(plain.tokens), list(own.tokens), sampler)
                accepted[temperature] += own.finish.speculation.accepted
    assert accepted[0.0] > 4 * 48 / 4
    assert accepted[0.8] > 0
