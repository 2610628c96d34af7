"""Training of a draft: what the draft learns, what is written, and that a stopped training resumes exactly."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.hf.random_weights import RandomWeights
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.unsupported import UnsupportedModelError
from specdec.training.divergences import divergence
from specdec.training.draft import (
    HELD_OUT_WINDOWS,
    NEW,
    OLD,
    DraftOrigin,
    DraftPlan,
    DraftTraining,
)
from specdec.training.draft_files import DraftFiles, dtype_of_weights
from specdec.training.files import PLAN as PLAN_FILE
from specdec.training.files import STATE, TEXTS, WriteError
from specdec.training.given_draft import GivenDraft
from specdec.training.models import check_positions, kept_for_gradients, load_draft, load_target
from specdec.training.own_text import OwnText, TrainingText
from specdec.training.plan import DRAFT, DivergedError, ResumeError, check_unfinished
from specdec.training.texts import PROMPT_TOKENS, Mixture, TextError, Windows
from specdec.training.training import check_room, rows_a_pass
from tests.models import ARCHITECTURES, END, VOCABULARY, make, near

PLAN = DraftPlan(steps=6, rows=3, length=48, rate=0.001, overruled=1.0)
ORIGIN = DraftOrigin("target", "0123", 500, "fp-target", "draft", "fp-draft", "4567", 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a draft near it."""
    made = tmp_path_factory.mktemp("pair")
    near(make("llama", made / "target"), made / "draft", noise=0.1)
    return made


@pytest.fixture(scope="module")
def target(folder: Path) -> PreTrainedModel:
    return load_target(ModelDirectory(folder / "target"), "cpu")


@pytest.fixture(scope="module")
def text(target: PreTrainedModel) -> TrainingText:
    """Random text, and text written by the target, which a draft can learn."""
    given, replay = (
        torch.randint(3, VOCABULARY, (32_000,), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
    )
    none = torch.empty(0, PLAN.length, dtype=torch.int64)
    found = TrainingText(given, replay, none, none)
    writing = OwnText(target, found, PLAN, 64 * (PLAN.length - PROMPT_TOKENS))
    while not writing.over:
        writing.step()
    return found


def training_of(
    target: PreTrainedModel, folder: Path, text: TrainingText, plan: DraftPlan = PLAN, share: float = 0.5
) -> DraftTraining:
    directory = ModelDirectory(folder / "draft")
    files = DraftFiles(directory, directory, torch.float32)
    mixture = text.mixture(plan.length, VOCABULARY, share)
    return DraftTraining(target, load_draft(directory, "cpu"), mixture, plan, ORIGIN, files)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("rate", "steps", "learns"), [(0.002, 120, True), (1e-8, 2, False)])
def test_a_draft_learns_what_its_target_says(
    target: PreTrainedModel, folder: Path, text: TrainingText, rate: float, steps: int, learns: bool
) -> None:
    """Each mean is over 1,536 places: by chance, two means are 0.1 apart in less than one run of ten million. With a
    negligible learning rate they are not."""
    training = training_of(target, folder, text, replace(PLAN, steps=steps, rows=8, rate=rate))
    training.measure_before()
    losses = [training.step() for _ in range(steps)]
    after = training.measure()
    mixture = text.mixture(PLAN.length, VOCABULARY, 0.5)
    assert mixture.old is not None
    assert {windows.spread(HELD_OUT_WINDOWS).numel() for windows in (mixture.new, mixture.old)} == {1536}
    assert (sum(losses[-10:]) < 0.7 * sum(losses[:10])) == learns
    assert set(after) == {NEW, OLD}
    for kind, found in after.items():
        before = training.before[kind]
        assert (found.greedy > before.greedy + 0.1) == learns
        assert (found.coupled > before.coupled + 0.1) == learns
        assert found.coupled <= found.rejection <= 1.0


def test_a_step_follows_the_gradient_of_its_formula(target: PreTrainedModel, folder: Path, text: TrainingText) -> None:
    """Overruled places count 1 + 2 times. In greedy text the token at i is the target's choice at i - 1, so the place
    that counts more is i - 1, not i."""
    plan = replace(PLAN, overruled=2.0)
    training = training_of(target, folder, text, plan)
    greedy = text.own[:2]  # from the first part, which is greedy
    training._learn(greedy)
    found = [parameter.grad for parameter in training._trained if parameter.grad is not None]

    draft = load_draft(ModelDirectory(folder / "draft"), "cpu")
    log_p, log_q = (model(greedy, use_cache=False).logits.log_softmax(-1) for model in (target, draft))
    guess = log_q.argmax(-1)
    written = slice(PROMPT_TOKENS - 1, -1)  # places whose next token the target wrote
    chosen, next_tokens = log_p.argmax(-1)[:, written], greedy[:, PROMPT_TOKENS:]
    goes_on = chosen != END  # where it chooses an end, it writes another token
    assert torch.equal(chosen[goes_on], next_tokens[goes_on])
    is_overruled = log_p.argmax(-1) != guess
    assert torch.equal(is_overruled[:, written][goes_on], (guess[:, written] != next_tokens)[goes_on])
    assert 0 < is_overruled.sum() < is_overruled.numel()
    (divergence("forward", log_p.detach(), log_q) * (1 + 2 * is_overruled)).mean().backward()
    wanted = [parameter.grad for parameter in draft.parameters() if parameter.grad is not None]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_random_weights_are_determined_by_the_seed(folder: Path) -> None:
    target = ModelDirectory(folder / "target")
    first, again, other = (
        load_draft(GivenDraft.checked(folder / "draft", target, "cpu", untrained=True, seed=seed).directory, "cpu")
        for seed in (1, 1, 2)
    )
    one = first.get_output_embeddings().weight
    assert torch.equal(one, again.get_output_embeddings().weight)
    assert not torch.equal(one, other.get_output_embeddings().weight)


def test_wide_vocabularies_take_several_passes() -> None:
    assert rows_a_pass(DraftPlan(rows=8, length=256), 4096) == 8
    assert rows_a_pass(DraftPlan(rows=8, length=256), 100_000) == 2
    assert rows_a_pass(DraftPlan(rows=8, length=2048), 151_936) == 1


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_estimate_covers_what_a_pass_keeps(name: str, tmp_path: Path) -> None:
    """With fused attention, and with the weights of capped attention."""
    model = load_draft(ModelDirectory(make(name, tmp_path / name)), "cpu")
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = model.base_model(torch.randint(3, VOCABULARY, (1, 128)), use_cache=False)
    estimate = kept_for_gradients(model, 128)
    assert found[0].requires_grad
    assert estimate / 2 < sum(kept.values()) < 1.1 * estimate


def test_a_pass_without_room_is_refused(folder: Path) -> None:
    model = load_draft(ModelDirectory(folder / "draft"), "cpu")
    check_room("draft", [], PLAN, VOCABULARY, kept_for_gradients(model, PLAN.length), "cpu", "use a smaller draft")
    with pytest.raises(
        UnsupportedModelError, match=r"draft: training needs .* activations .* free: use a smaller draft"
    ):
        check_room("draft", [], PLAN, VOCABULARY, kept_for_gradients(model, 2**40), "cpu", "use a smaller draft")


def test_a_training_in_two_parts_gives_the_draft_of_one(
    target: PreTrainedModel, folder: Path, text: TrainingText, tmp_path: Path
) -> None:
    whole = training_of(target, folder, text)
    whole.measure_before()
    while not whole.over:
        whole.step()
    whole.save(tmp_path / "whole")
    one = weights(tmp_path / "whole")
    for stop in (0, 4):
        out = tmp_path / str(stop)
        first = training_of(target, folder, text)
        first.measure_before()
        for _ in range(stop):
            first.step()
        text.save(out)
        first.save(out)
        second = training_of(target, folder, text)
        second.resume(out)
        assert (second.done, second.before) == (stop, whole.before)
        while not second.over:
            second.step()
        second.save(out)
        other = weights(out)
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name
        assert not any((out / name).exists() for name in (STATE, PLAN_FILE, TEXTS))


def test_the_target_goes_on_writing_where_it_stopped(
    target: PreTrainedModel, text: TrainingText, tmp_path: Path
) -> None:
    """It stops in the texts to train on, and in those held out."""
    count = 64 * (PLAN.length - PROMPT_TOKENS)
    for steps in (1, 4):
        begun = replace(text, own=text.own[:0], own_held_out=text.own[:0])
        first = OwnText(target, begun, PLAN, count)
        for _ in range(steps):
            first.step()
        assert 0 < first.done < first.total
        first.save(tmp_path)
        kept = TrainingText.kept(tmp_path)
        assert bool(len(kept.own_held_out)) == (steps > 1)
        second = OwnText(target, kept, PLAN, count)
        assert second.done == first.done
        while not second.over:
            second.step()
        assert torch.equal(kept.own, text.own)
        assert torch.equal(kept.own_held_out, text.own_held_out)
    assert (tmp_path / TEXTS).stat().st_mode & 0o077 == 0


def test_no_held_out_window_has_the_prompt_of_a_trained_one(text: TrainingText) -> None:
    """Any text of the target begins with tokens of the given text that are on the same side."""
    windows = text.windows(PLAN.length, VOCABULARY)
    given = Windows(text.given, PLAN.length)
    for one, of_given in ((windows.trained, given.trained), (windows.held_out, given.held_out)):
        own, tokens = one[len(of_given) :], of_given.flatten()
        assert len(own) == (61 if one is windows.trained else 3)
        prompts = {tuple(prompt) for prompt in tokens.unfold(0, PROMPT_TOKENS, 1).tolist()}
        assert all(tuple(begin) in prompts for begin in own[:, :PROMPT_TOKENS].tolist())


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """Let no file grow beyond `count` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [100, 1_100_000])
def test_a_full_disk_leaves_the_last_good_state(
    target: PreTrainedModel, folder: Path, text: TrainingText, room: int, tmp_path: Path
) -> None:
    training = training_of(target, folder, text)
    training.measure_before()
    training.step()
    text.save(tmp_path)
    training.save(tmp_path)
    good = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(good[STATE]) > 1_100_000
    training.step()
    with files_of_at_most(room), pytest.raises(WriteError, match=r"^\S+: cannot be written: [^\n]+$"):
        training.save(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == good  # nothing partial takes room
    again = training_of(target, folder, text)
    again.resume(tmp_path)
    assert again.done == 1


def test_weights_without_room_leave_those_before(folder: Path, tmp_path: Path) -> None:
    directory = ModelDirectory(folder / "draft")
    files = DraftFiles(directory, directory, torch.float32)
    model = load_draft(directory, "cpu")
    files.write(model, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    with files_of_at_most(100_000), pytest.raises(WriteError, match=r"model.safetensors: cannot be written: "):
        files.write(model, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_step_without_a_finite_loss_changes_nothing(
    target: PreTrainedModel, folder: Path, text: TrainingText
) -> None:
    training = training_of(target, folder, text, replace(PLAN, rate=1e30))
    training.step()
    after = [parameter.detach().clone() for parameter in training._trained]
    with pytest.raises(DivergedError, match=r"^step 2 has no finite loss or gradient: begin again with a lower --rate"):
        training.step()
    assert training.done == 1
    assert all(map(torch.equal, training._trained, after))


def checked(out: Path, **changed: Any) -> DraftOrigin:
    arguments: dict[str, Any] = {
        "plan": PLAN,
        "target": "target",
        "target_fingerprint": "fp-target",
        "draft": "draft",
        "draft_fingerprint": "fp-draft",
        "text": None,
        "own_tokens": None,
        "replay": None,
        "replay_share": None,
    }
    return check_unfinished(out, DRAFT, origin=DraftOrigin, **arguments | changed)


REFUSALS: dict[str, dict[str, Any]] = {
    "was started with --loss forward, cannot be resumed with tv": {"plan": replace(PLAN, loss="tv")},
    "was started with --overruled 1.0, cannot be resumed with 0.5": {"plan": replace(PLAN, overruled=0.5)},
    "was started for target, cannot be resumed for other": {"target": "other"},
    "was started for another target: its configuration or weights have": {"target_fingerprint": "fp-other"},
    "was started from draft, cannot be resumed from other": {"draft": "other"},
    "was started from another draft: its configuration or weights have": {"draft_fingerprint": "fp-other"},
    "was started with other --text files, whose tokens are stored here: resume without --text, or": {"text": "89"},
    "was started with --own-tokens 500, cannot be resumed with 0": {"own_tokens": 0},
    "was started with other --replay files": {"replay": "89"},
    "was started with --replay-share 0.5, cannot be resumed with 0.25": {"replay_share": 0.25},
}


def test_a_training_of_something_else_is_refused(
    target: PreTrainedModel, folder: Path, text: TrainingText, tmp_path: Path
) -> None:
    training = training_of(target, folder, text)
    training.save(tmp_path)
    with pytest.raises(ResumeError, match=r"has no unfinished training: texts.safetensors not found"):
        checked(tmp_path)
    text.save(tmp_path)
    assert checked(tmp_path) == ORIGIN
    assert checked(tmp_path, text="0123", own_tokens=500, replay="4567", replay_share=0.5) == ORIGIN
    for says, changed in REFUSALS.items():
        with pytest.raises(ResumeError, match=says):
            checked(tmp_path, **changed)
    for content, says in (
        ((folder / "target" / "model.safetensors").read_bytes(), "belongs to another model"),
        (
            b"cut",
            "cannot be read: ",
        ),
    ):
        (tmp_path / STATE).write_bytes(content)
        with pytest.raises(ModelDirectoryError, match=rf"{STATE}: {says}"):
            training.resume(tmp_path)


def test_a_text_must_have_windows_and_known_tokens(text: TrainingText) -> None:
    text.check(PLAN.length, VOCABULARY, "draft")
    with pytest.raises(TextError, match=r"--text: has the token \d+, but the draft's vocabulary has 300 ids"):
        text.check(PLAN.length, 300, "draft")
    with pytest.raises(TextError, match=r"--replay: has 95 tokens, must have at least 96: two windows"):
        replace(text, replay=text.replay[:95]).check(PLAN.length, VOCABULARY, "draft")
    with pytest.raises(TextError, match=r"--text: has 0 tokens"):
        replace(text, given=text.given[:0]).check(PLAN.length, VOCABULARY, "draft")
    replace(text, replay=text.replay[:0]).check(PLAN.length, VOCABULARY, "draft")
    own = torch.tensor([[5] * 48, [5] * 47 + [VOCABULARY]])
    known, given = replace(text, own=own, own_held_out=own).mixture(48, VOCABULARY, 0.5).new, Windows(text.given, 48)
    assert (len(known.trained), len(known.held_out)) == (len(given.trained) + 1, len(given.held_out) + 1)


def test_older_text_has_its_share_of_a_batch() -> None:
    """5,000 of 20,000 windows are expected; a deviation by 370 is six standard deviations."""
    new, old = Windows(torch.arange(400), 10), Windows(torch.arange(1000, 1400), 10)
    mixture = Mixture(new, old, 0.25)
    batch = mixture.batch(20_000, 3, 5)
    assert torch.equal(batch, mixture.batch(20_000, 3, 5))
    assert not torch.equal(batch, mixture.batch(20_000, 3, 6))
    assert int((batch[:, 0] >= 1000).sum()) == pytest.approx(5000, abs=370)
    held = {*new.held_out.flatten().tolist(), *old.held_out.flatten().tolist()}
    assert held.isdisjoint(batch.flatten().tolist())
    assert torch.equal(Mixture(new).batch(8, 3, 5), new.batch(8, 3, 5))


@pytest.mark.parametrize(("name", "tied"), [*((name, False) for name in ARCHITECTURES), ("llama", True), ("opt", True)])
def test_a_written_draft_is_the_trained_one(name: str, tied: bool, tmp_path: Path) -> None:
    """In all tested architectures, one of which has capped attention; with shared and with separate output heads."""
    directory = ModelDirectory(make(name, tmp_path / "draft", tie_word_embeddings=tied))
    model = load_draft(directory, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    out = tmp_path / "out"
    out.mkdir()
    DraftFiles(directory, directory, torch.float32).write(model, out)
    written = ModelDirectory(out)
    written.check_pair(directory)
    assert written.config == directory.config | {"dtype": "float32"}
    assert load_file(out / "model.safetensors").keys() == load_file(tmp_path / "draft" / "model.safetensors").keys()
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(load_draft(written, "cpu")(tokens).logits, model(tokens).logits)
    assert (out / "model.safetensors").stat().st_mode & 0o044
    DraftFiles(directory, directory, torch.bfloat16).write(model, out)
    assert {tensor.dtype for tensor in weights(out).values()} == {torch.bfloat16}
    assert ModelDirectory(out).dtype == "bfloat16"
    assert next(model.parameters()).dtype == torch.float32


def test_a_draft_keeps_its_own_dtype(tmp_path: Path) -> None:
    directory = make("llama", tmp_path / "draft")
    assert dtype_of_weights(ModelDirectory(directory)) == torch.float32
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace('"dtype": "float32"', '"torch_dtype": "bfloat16"'))
    assert dtype_of_weights(ModelDirectory(directory)) == torch.bfloat16
    (directory / "config.json").write_text(config.replace('"dtype": "float32",', ""))
    assert dtype_of_weights(ModelDirectory(directory)) == torch.float32  # the dtype of the weights
    (directory / "model.safetensors").unlink()
    assert dtype_of_weights(RandomWeights(directory)) == torch.float32


@pytest.mark.parametrize(("architecture", "learns"), [("gpt2", True), ("opt", True), ("llama", False)])
def test_random_positions_beyond_the_length_are_refused(architecture: str, learns: bool, tmp_path: Path) -> None:
    """They would stay random, and every longer text would be drafted with them."""
    directory = RandomWeights(make(architecture, tmp_path / "draft"))
    model = load_draft(directory, "cpu")
    check_positions(model, directory, directory.context)
    if not learns:
        check_positions(model, directory, 32)
        return
    with pytest.raises(UnsupportedModelError, match=f"--length 32 random: set --length {directory.context}"):
        check_positions(model, directory, 32)
