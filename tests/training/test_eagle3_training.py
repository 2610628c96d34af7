"""Training of EAGLE-3 heads: training-time test sees what guesses see in service, the heads learn, a stopped training
resumes exactly, and trained heads change no token."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdec.decoding.noise import sample_seed
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.engine.engine import layer_features
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.heads.eagle3 import Eagle3Heads
from specdec.engine.heads.eagle3_files import Eagle3Files
from specdec.engine.heads.files import TargetShape
from specdec.engine.heads.text_memory import TextMemory, TreeContext
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.unsupported import UnsupportedModelError
from specdec.local import DEMO
from specdec.text.tokenizer import Tokenizer
from specdec.training.eagle3 import Eagle3Plan, Eagle3Training, layers_read, most_frequent
from specdec.training.files import PLAN as PLAN_FILE
from specdec.training.files import STATE, TEXTS
from specdec.training.heads import DECAY, HeadTraining
from specdec.training.layers import read_features
from specdec.training.models import load_target
from specdec.training.plan import Origin
from specdec.training.texts import PROMPT_TOKENS, Windows, continuations, tokens_of
from specdec.v2 import generation_pb2, model_pb2
from tests.margins import Oracle
from tests.models import VOCABULARY, make
from tests.stack import stack
from tests.verifier_service.fakes import Decided
from verifier_service.backend.result import Mode

PLAN = Eagle3Plan(ttt_steps=3, steps=6, rows=2, length=16, rate=0.003, draft_vocabulary=120)
ORIGIN = Origin("tiny", "0123", 500, "fp-tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_target(ModelDirectory(folder), "cpu")


@pytest.fixture(scope="module")
def windows() -> Windows:
    return Windows(torch.randint(3, VOCABULARY, (640,), generator=torch.Generator().manual_seed(0)), PLAN.length)


def training_of(model: PreTrainedModel, windows: Windows, plan: Eagle3Plan = PLAN) -> Eagle3Training:
    return Eagle3Training(model, windows, plan, ORIGIN)


def unsettled(training: Eagle3Training) -> Eagle3Training:
    """Move the weights away from values that would hide an error: norms of ones, and nearly uniform attention."""
    random = torch.Generator().manual_seed(1)
    for parameter in training._trained:
        parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=random))
    return training


def weights_of(training: HeadTraining[Any]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in training._trained]


def gradients_of(training: HeadTraining[Any]) -> list[Tensor]:
    return [parameter.grad for parameter in training._trained if parameter.grad is not None]


# --- what training-time test sees -------------------------------------------------------------------


def features_in_service(engine: CpuEngine, text: list[int], layers: Sequence[int]) -> Tensor:
    """Return the features [length, m, d] that a verifier's engine gives for a text, read in two passes."""
    slots, found = np.arange(1, len(text) + 1), list[Tensor]()
    for begin, end in ((0, 5), (5, len(text))):
        packer = engine.packer()
        rows = packer.add_rows(text[begin:end], begin, slots[begin:end])
        packer.add_path(slots[:end], rows)
        packer.want(rows[-1])
        _, features = layer_features(engine).forward_features(packer.pack(), layers)
        found.append(torch.from_numpy(features))
    return torch.cat(found)


def chain(heads: Eagle3Heads, text: Tensor, row: int, features: Tensor, steps: int) -> list[Tensor]:
    """Return the logits [outputs] of each guess in a chain below the text up to `row`. The chain is grown as the
    verifier grows trees, from the text's cached keys and values; its guesses are the text's next tokens. `features`:
    [length, m, d]."""
    shape = heads.shape
    fused, positions = heads.fused(features), torch.arange(len(text))
    memory = TextMemory(len(text), shape.kv_heads, shape.width, torch.float32, torch.device("cpu"))
    slots = 1 + np.arange(row)
    heads.read(text[1 : row + 1], fused[:row], positions[:row], slots, memory)
    trees = TreeContext(memory, [slots], steps)
    read, found = fused[None, row : row + 1], list[Tensor]()
    for step in range(steps):
        token, position = text[None, None, row + 1 + step], torch.tensor([[row + step]])
        logits, read = heads.outcome(heads.grow(token, read, position, trees, torch.tensor([[0]])))
        found.append(logits[0, 0])
    return found


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_row_sees_what_a_chain_of_guesses_below_its_text_sees(
    architecture: str, windows: Windows, tmp_path: Path
) -> None:
    """The comparison is with the serving engine's features and the serving code."""
    directory = ModelDirectory(make(architecture, tmp_path / architecture))
    training = unsettled(training_of(load_target(directory, "cpu"), windows))
    engine, texts = CpuEngine(directory, capacity=256, exact=False), windows.trained[:2]
    features, _ = read_features(training._model, texts, training.layers)
    steps = [training.heads.outcome(states)[0] for states in training._states(texts, features)]
    for number, text in enumerate(texts):
        served = features_in_service(engine, text.tolist(), training.layers)
        close(features[number * PLAN.length :][: PLAN.length], served)
        for row in (0, 1, 7, PLAN.length - 1 - PLAN.ttt_steps):
            for step, logits in enumerate(chain(training.heads, text, row, served, PLAN.ttt_steps)):
                close(steps[step][number, row], logits)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=1e-3)


@torch.no_grad()
def test_a_guess_sees_nothing_of_the_text_after_it(model: PreTrainedModel, windows: Windows) -> None:
    """Row t of step i depends only on the tokens up to t + 1 + i."""
    training, text, row = unsettled(training_of(model, windows)), windows.trained[:1], 6
    for step in range(PLAN.ttt_steps):
        changed = text.clone()
        changed[:, row + 2 + step :] = (changed[:, row + 2 + step :] + 1) % VOCABULARY
        one, other = (
            list(training._states(own, read_features(training._model, own, training.layers)[0]))[step]
            for own in (text, changed)
        )
        torch.testing.assert_close(one[:, row], other[:, row])
        assert not torch.allclose(one[:, row + 1], other[:, row + 1], atol=1e-2)


# --- what it learns ---------------------------------------------------------------------------------


def test_a_step_follows_the_gradient_of_its_formula(model: PreTrainedModel, windows: Windows) -> None:
    training, other = (unsettled(training_of(model, windows)) for _ in range(2))
    texts = windows.trained[: PLAN.rows]
    first = training._learn(texts)

    features, logits = read_features(other._model, texts, other.layers)
    assert other.heads.ids is not None
    ids = other.heads.ids.tolist()
    total = torch.zeros(())
    for step, states in enumerate(other._states(texts, features)):
        guesses = other.heads.outcome(states)[0].log_softmax(-1)
        losses = []
        for text, place in np.ndindex(*guesses.shape[:2]):
            of_target = logits[text, place + 1 + step]
            if int(of_target.argmax()) in ids:
                losses.append(-(of_target[ids].softmax(-1) * guesses[text, place]).sum())
        assert 0 < len(losses) < guesses[..., 0].numel()
        total = total + DECAY**step * torch.stack(losses).sum() / guesses[..., 0].numel()
        if step == 0:
            assert first == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    total.backward()  # type: ignore[no-untyped-call]
    assert len(gradients_of(training)) == len(training._trained)
    for one, wanted in zip(gradients_of(training), gradients_of(other), strict=True):
        torch.testing.assert_close(one, wanted, atol=1e-5, rtol=1e-3)


def test_a_step_in_several_passes_has_the_gradient_of_one(model: PreTrainedModel, windows: Windows) -> None:
    whole, parts = (training_of(model, windows) for _ in range(2))
    batch = windows.trained[:3]
    whole._learn_part(batch, 1.0)
    parts._learn_part(batch[:1], 1 / 3)
    parts._learn_part(batch[1:], 2 / 3)
    for one, other in zip(gradients_of(whole), gradients_of(parts), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def check_written(
    training: Eagle3Training, target: PreTrainedModel, directory: ModelDirectory, text: Tensor, out: Path
) -> Eagle3Files:
    """Write the heads; check that heads loaded from the files are the same. Return the files."""
    training.save(out)
    files = Eagle3Files.of(out, TargetShape.of(directory))
    table: Any = target.get_input_embeddings()
    heads = files.load(table.weight.detach(), target.get_output_embeddings(), "cpu", torch.float32)
    assert heads.ids is not None
    assert training.heads.ids is not None
    assert heads.ids.tolist() == training.heads.ids.tolist()
    shape = heads.shape
    assert shape == training.heads.shape
    for parameter in training._trained:
        parameter.data.copy_(parameter.data.bfloat16())  # rounded as in the file
    features, tokens = torch.randn(9, shape.features, shape.stream), text[:9]
    with torch.no_grad():
        loaded, trained = (chain(own, tokens, 4, features, 3) for own in (heads, training.heads))
    for one, other in zip(loaded, trained, strict=True):
        close(one, other)
    return files


def test_written_heads_are_the_trained_ones(
    folder: Path, model: PreTrainedModel, windows: Windows, tmp_path: Path
) -> None:
    training = unsettled(training_of(model, windows))
    files = check_written(training, model, ModelDirectory(folder), windows.trained[0], tmp_path / "heads")
    assert files.config.layers == (0, 1, 1)


@pytest.mark.verify
def test_heads_of_the_demo_target_learn_its_language(tmp_path: Path) -> None:
    directory = ModelDirectory(DEMO / "target")
    target = load_target(directory, "cpu").float()
    text = tokens_of([Path(argparse.__file__)], Tokenizer(directory), end=0)
    plan = Eagle3Plan(ttt_steps=2, steps=16, rows=4, length=64, rate=0.003, draft_vocabulary=500)
    training = training_of(target, Windows(text, plan.length), plan)
    before = training.accuracies(most=4)
    losses = [training.step() for _ in range(plan.steps)]
    after = training.accuracies(most=4)
    assert losses[-1] < losses[0] - 1.0
    assert len(after) == plan.ttt_steps
    for step in range(plan.ttt_steps):
        assert after[step][10] > before[step][10] + 0.1
        assert after[step][1] <= after[step][3] <= after[step][10] <= 1.0
    files = check_written(training, target, directory, text, tmp_path / "heads")
    assert not any((tmp_path / "heads" / name).exists() for name in (STATE, PLAN_FILE, TEXTS))
    assert files.config.layers == (1, 3, 5)


@torch.no_grad()
def test_guesses_are_the_likeliest_of_the_tokens_they_know(model: PreTrainedModel, windows: Windows) -> None:
    training, texts = unsettled(training_of(model, windows)), windows.trained[:2]
    features, logits = read_features(training._model, texts, training.layers)
    states = list(training._states(texts, features))
    found = list(training._guessed(texts))
    assert len(found) == PLAN.ttt_steps
    for step, (guesses, best) in enumerate(found):
        every = torch.full((*states[step].shape[:2], VOCABULARY), -torch.inf)
        every[..., torch.from_numpy(training.heads.ids)] = training.heads.outcome(states[step])[0]
        assert torch.equal(guesses, every.topk(10).indices.flatten(0, 1))
        assert torch.equal(best, logits.argmax(-1)[:, 1 + step :].flatten())


def test_what_is_rare_in_the_text_is_not_guessed(model: PreTrainedModel) -> None:
    assert most_frequent(torch.tensor([5, 9, 5, 3, 9, 5]), 2).tolist() == [5, 9]
    assert most_frequent(torch.tensor([9, 3]), 1).tolist() == [3]  # equally frequent: the lower id
    tokens = torch.tensor([5] * 30 + [9] * 20 + [200] * 14)
    few = training_of(model, Windows(tokens, 16), Eagle3Plan(length=16, ttt_steps=2, draft_vocabulary=100))
    assert few.heads.ids is not None
    assert few.heads.ids.tolist() == [5, 9]  # 200 is only in the last window, which is held out
    assert [sorted(within) for within in few.accuracies()] == [[1, 3, 10]] * 2  # with fewer guesses than ranks


def test_heads_that_know_all_tokens_have_no_map(model: PreTrainedModel, tmp_path: Path) -> None:
    tokens = torch.randint(VOCABULARY, (6400,), generator=torch.Generator().manual_seed(0))
    training = training_of(model, Windows(tokens, 16), replace(PLAN, draft_vocabulary=1000))
    assert training.heads.ids is None
    training.save(tmp_path)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))
    assert (tmp_path / STATE).exists()  # heads of an unfinished training load
    files = Eagle3Files.of(tmp_path, TargetShape(64, VOCABULARY, 64, 2))
    assert files.config.shape == training.heads.shape


@pytest.mark.parametrize(
    ("layers", "read"),
    [(1, (0, 0, 0)), (2, (0, 1, 1)), (3, (0, 1, 2)), (6, (1, 3, 5)), (7, (2, 3, 4)), (32, (2, 16, 29))],
)
def test_features_are_of_different_layers_where_there_are_three(layers: int, read: tuple[int, ...]) -> None:
    assert layers_read(layers) == read


def test_a_target_with_narrow_embeddings_is_refused(tmp_path: Path) -> None:
    narrow = load_target(ModelDirectory(make("opt", tmp_path / "opt", word_embed_proj_dim=32)), "cpu")
    with pytest.raises(
        UnsupportedModelError, match=r"has embeddings of 32 and an output head of 32 columns, must have 64"
    ):
        Eagle3Training.check(narrow)


def test_attention_weights_without_room_are_refused(model: PreTrainedModel, windows: Windows) -> None:
    """Those of a window of 2^17 tokens take a terabyte; its logits would fit."""
    with pytest.raises(UnsupportedModelError, match=r"tiny: training needs .* free: use a smaller --draft-vocabulary"):
        training_of(model, windows, replace(PLAN, length=2**17))


# --- going on, and serving --------------------------------------------------------------------------


def test_a_training_in_two_parts_gives_the_heads_of_one(
    model: PreTrainedModel, windows: Windows, tmp_path: Path
) -> None:
    whole = training_of(model, windows)
    for _ in range(PLAN.steps):
        whole.step()
    assert not torch.equal(weights_of(whole)[0], weights_of(training_of(model, windows))[0])
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


def test_another_seed_begins_with_other_weights(model: PreTrainedModel, windows: Windows) -> None:
    one, again, other = (weights_of(training_of(model, windows, replace(PLAN, seed=seed))) for seed in (0, 0, 1))
    assert torch.equal(one[0], again[0])
    assert not torch.equal(one[0], other[0])


@pytest.mark.verify
async def test_trained_heads_guess_what_they_have_learned_and_change_no_token(tmp_path: Path) -> None:
    """They learn greedy texts of a target by heart, and guess them from their beginnings. The target's logits are made
    as sharp as a trained target's, or else no guess would be likely enough to be offered."""
    weights = make("llama", target := tmp_path / "target") / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"lm_head.weight": 6 * tensors["lm_head.weight"]}, weights, metadata={"format": "pt"})
    model = load_target(ModelDirectory(target), "cpu")
    begun = torch.randint(3, VOCABULARY, (400,), generator=torch.Generator().manual_seed(0))
    texts = torch.cat([*continuations(model, begun, 80, 8, seed=1)]).flatten()
    plan = Eagle3Plan(ttt_steps=3, steps=150, rows=4, length=80, rate=0.01)
    training = training_of(model, Windows(texts, plan.length), plan)
    while not training.over:
        training.step()
    training.save(heads := tmp_path / "heads")
    prompts = [text[:PROMPT_TOKENS].tolist() for text in texts.view(8, 80)[:4]]
    oracle, by_heads = Oracle(target), generation_pb2.Speculation(drafters=[model_pb2.DRAFTER_HEADS])
    accepted = dict.fromkeys((0.0, 0.8), 0)
    async with stack(target, None, heads=heads, controller=Decided(Mode.LOCAL_DRAFT)) as services:
        for temperature in accepted:
            sampling = {"temperature": temperature, "seed": 3}
            sampler = RequestSampler(Sampling(temperature=temperature, seed=sample_seed(3, 0)))
            for prompt in prompts:
                plain = await services.generate(prompt, sampling=sampling, max_tokens=48, plain=True)
                own = await services.generate(prompt, sampling=sampling, max_tokens=48, speculation=by_heads)
                oracle.same(prompt, list(plain.tokens), list(own.tokens), sampler)
                accepted[temperature] += own.finish.speculation.accepted
    assert accepted[0.0] > 4 * 48 / 4
