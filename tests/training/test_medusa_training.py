"""Training of Medusa heads: what the heads learn, and that a stopped training resumes exactly."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.heads.files import TargetShape
from specdec.engine.heads.medusa_files import MedusaFiles
from specdec.engine.hf.pretrained import load
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.unsupported import UnsupportedModelError
from specdec.local import DEMO
from specdec.text.tokenizer import Tokenizer
from specdec.training.files import PLAN as PLAN_FILE
from specdec.training.files import STATE, TEXTS, write_texts
from specdec.training.medusa import MedusaPlan, MedusaTraining
from specdec.training.plan import EAGLE3, MEDUSA, DivergedError, Origin, ResumeError, check_unfinished
from specdec.training.texts import TextError, Windows, continuations, digest_of, tokens_of
from tests.models import VOCABULARY, make

PLAN = MedusaPlan(heads=2, layers=1, steps=6, rows=2, length=16, rate=0.01)
ORIGIN = Origin("tiny", "0123", 500, "fp-tiny")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    found = load(ModelDirectory(make("llama", tmp_path_factory.mktemp("model") / "llama")), torch.float32, "cpu")
    found.set_attn_implementation("sdpa")
    return found


@pytest.fixture(scope="module")
def tokens(model: PreTrainedModel) -> Tensor:
    """The target's own continuations, which heads can learn."""
    begun = torch.randint(3, VOCABULARY, (200,), generator=torch.Generator().manual_seed(0))
    return torch.cat([*continuations(model, begun, 48, 64, seed=1)]).flatten()


def weights_of(training: MedusaTraining) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in training.heads.parameters()]


def test_own_continuations_are_half_greedy_and_the_same_again(model: PreTrainedModel) -> None:
    begun = torch.randint(3, VOCABULARY, (200,), generator=torch.Generator().manual_seed(0))
    one, again = ([*continuations(model, begun, 40, 3, seed=1)] for _ in range(2))
    assert [part.shape for part in one] == [(1, 40)] * 3
    assert torch.equal(torch.cat(one), torch.cat(again))


def test_a_training_without_room_is_refused(model: PreTrainedModel, tokens: Tensor) -> None:
    plan = replace(PLAN, length=2**34)
    with pytest.raises(UnsupportedModelError, match=r"tiny: training needs .* free: use fewer --heads"):
        MedusaTraining(model, Windows(tokens, PLAN.length), plan, ORIGIN)


@pytest.mark.parametrize("own_outputs", [False, pytest.param(True, marks=pytest.mark.verify)])
def test_heads_of_the_demo_target_learn_its_language(own_outputs: bool, tmp_path: Path) -> None:
    """At first, all heads repeat the target's own logits, which are for an earlier token."""
    directory = ModelDirectory(DEMO / "target")
    target = load(directory, torch.float32, "cpu")
    target.set_attn_implementation("sdpa")
    text = tokens_of([Path(argparse.__file__)], Tokenizer(directory), end=0)
    plan = MedusaPlan(heads=2, steps=16, rows=4, length=64, rate=0.003, own_outputs=own_outputs)
    training = MedusaTraining(target, Windows(text, plan.length), plan, ORIGIN)
    before = training.accuracies(most=4)
    losses = [training.step() for _ in range(plan.steps)]
    after = training.accuracies(most=4)
    assert losses[-1] < losses[0] - 1.0
    for number in range(plan.heads):
        assert after[number][10] > before[number][10] + 0.1
        assert after[number][1] <= after[number][3] <= after[number][10] <= 1.0
    training.save(tmp_path / "heads")
    shape = TargetShape.of(directory)
    output = target.get_output_embeddings()
    heads = MedusaFiles.of(tmp_path / "heads", shape).load(output, "cpu", torch.float32)
    hidden = torch.randn(3, shape.hidden)
    with torch.no_grad():
        torch.testing.assert_close(heads(hidden), training.heads(hidden), atol=0.2, rtol=0.1)  # stored in bfloat16
    assert not any((tmp_path / "heads" / name).exists() for name in (STATE, PLAN_FILE, TEXTS))


def test_a_step_without_a_finite_gradient_changes_nothing(model: PreTrainedModel, tokens: Tensor) -> None:
    training = MedusaTraining(model, Windows(tokens, PLAN.length), PLAN, ORIGIN)
    before = [weight.detach().clone() for weight in training._trained]
    training._trained[0].register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call]
    with pytest.raises(DivergedError, match="step 1 has no finite loss or gradient"):
        training.step()
    assert all(map(torch.equal, training._trained, before))


def test_a_training_in_two_parts_gives_the_heads_of_one(model: PreTrainedModel, tokens: Tensor, tmp_path: Path) -> None:
    windows = Windows(tokens, PLAN.length)
    whole = MedusaTraining(model, windows, PLAN, ORIGIN)
    for _ in range(PLAN.steps):
        whole.step()
    for stop in (0, 4):
        first = MedusaTraining(model, windows, PLAN, ORIGIN)
        for _ in range(stop):
            first.step()
        out = tmp_path / str(stop)
        first.save(out)
        (out / TEXTS).write_bytes(b"")
        second = MedusaTraining(model, windows, PLAN, ORIGIN)
        second.resume(out)
        assert second.done == stop
        while not second.over:
            second.step()
        for one, other in zip(weights_of(whole), weights_of(second), strict=True):
            assert torch.equal(one, other)


def test_a_step_in_several_passes_has_the_gradient_of_one(model: PreTrainedModel, tokens: Tensor) -> None:
    windows = Windows(tokens, PLAN.length)
    whole, parts = (MedusaTraining(model, windows, PLAN, ORIGIN) for _ in range(2))
    batch = windows.trained[:3]
    loss = whole._learn_part(batch, 1.0)
    assert parts._learn_part(batch[:1], 1 / 3) + parts._learn_part(batch[1:], 2 / 3) == pytest.approx(loss, rel=1e-5)
    for one, other in zip(whole.heads.parameters(), parts.heads.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)


def test_a_file_that_is_cut_while_it_is_written_costs_nothing(
    model: PreTrainedModel, tokens: Tensor, tmp_path: Path
) -> None:
    training = MedusaTraining(model, Windows(tokens, PLAN.length), PLAN, ORIGIN)
    training.step()
    training.save(tmp_path)
    (tmp_path / f"{STATE}.partial").write_bytes(b"cut")
    (tmp_path / TEXTS).write_bytes(b"")
    resumed = MedusaTraining(model, Windows(tokens, PLAN.length), PLAN, ORIGIN)
    resumed.resume(tmp_path)
    assert resumed.done == 1
    for one, other in zip(weights_of(training), weights_of(resumed), strict=True):
        assert torch.equal(one, other)


def test_a_training_of_another_plan_or_target_is_refused(
    model: PreTrainedModel, tokens: Tensor, tmp_path: Path
) -> None:
    training = MedusaTraining(model, Windows(tokens, PLAN.length), PLAN, ORIGIN)
    training.step()
    training.save(tmp_path)
    with pytest.raises(ResumeError, match=r"no unfinished training: texts.safetensors not found"):
        check_unfinished(tmp_path, MEDUSA, PLAN, Origin)
    write_texts(tmp_path, tokens)
    assert (tmp_path / TEXTS).stat().st_mode & 0o077 == 0
    check_unfinished(tmp_path, MEDUSA, PLAN, Origin)
    other = MedusaPlan(heads=3, steps=6, rows=2, length=16, rate=0.01)
    with pytest.raises(ResumeError, match="was started with --heads 2, cannot be resumed with 3"):
        check_unfinished(tmp_path, MEDUSA, other, Origin)
    with pytest.raises(ResumeError, match="was started for tiny, cannot be resumed for small"):
        check_unfinished(tmp_path, MEDUSA, PLAN, Origin, target="small")
    with pytest.raises(ResumeError, match="has an unfinished training of Medusa heads, not of EAGLE-3 heads"):
        check_unfinished(tmp_path, EAGLE3, PLAN, Origin)
    with pytest.raises(ResumeError, match="was started for another tiny: its configuration or weights have changed"):
        check_unfinished(tmp_path, MEDUSA, PLAN, Origin, target="tiny", target_fingerprint="fp-other")


def test_a_training_of_another_text_is_refused(model: PreTrainedModel, tokens: Tensor, tmp_path: Path) -> None:
    training = MedusaTraining(model, Windows(tokens, PLAN.length), PLAN, ORIGIN)
    write_texts(tmp_path, tokens)
    training.save(tmp_path)
    assert check_unfinished(tmp_path, MEDUSA, PLAN, Origin, text=None, own_tokens=None) == ORIGIN
    assert check_unfinished(tmp_path, MEDUSA, PLAN, Origin, **vars(ORIGIN)) == ORIGIN
    with pytest.raises(ResumeError, match=r"was started with other --text files, .* resume without --text, or"):
        check_unfinished(tmp_path, MEDUSA, PLAN, Origin, text="4567")
    with pytest.raises(ResumeError, match="was started with --own-tokens 500, cannot be resumed with 0"):
        check_unfinished(tmp_path, MEDUSA, PLAN, Origin, own_tokens=0)


def test_a_text_is_known_by_what_is_read_of_it(tmp_path: Path) -> None:
    first, second, lines = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "b.jsonl"
    first.write_text("one")
    for file in (second, lines):
        file.write_text("two")
    known = digest_of([first, second])
    first.rename(moved := tmp_path / "moved.txt")
    assert digest_of([moved, second]) == known
    assert known not in (digest_of([second, moved]), digest_of([moved, lines]), digest_of([moved]))
    moved.write_text("on")
    assert digest_of([moved, second]) != known
    with pytest.raises(TextError, match=r"a.txt: cannot be read: "):
        digest_of([first])


def test_lines_end_where_json_lines_end(tmp_path: Path) -> None:
    """A JSON string may contain U+2028 and U+0085 unescaped."""
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"text": "a\u2028b\u0085c"}, ensure_ascii=False) + "\n\n" + json.dumps({"text": "d"}))
    tokenizer = Tokenizer(ModelDirectory(DEMO / "target"))
    found = tokens_of([file], tokenizer, end=0).tolist()
    assert found.count(0) == 2
    file.write_text('{"text": "a"}\n{"txt": "b"}')
    with pytest.raises(TextError, match=r"texts.jsonl:2: has neither text, a string, nor messages, a list"):
        tokens_of([file], tokenizer, end=0)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "a\\ud83d"}', "has a lone surrogate"),
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "has a lone surrogate"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_line_that_is_no_text_is_named(line: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(TextError, match=rf"texts.jsonl:2: {problem}"):
        tokens_of([file], Tokenizer(ModelDirectory(DEMO / "target")), end=0)


def test_windows_are_held_out_and_repeatable() -> None:
    windows = Windows(torch.arange(410), 10)
    assert len(windows.held_out) == 2
    assert len(windows.trained) == 39
    held = set(windows.held_out.flatten().tolist())
    batch = windows.batch(64, 3, 5)
    assert torch.equal(batch, windows.batch(64, 3, 5))
    assert not torch.equal(batch, windows.batch(64, 3, 6))
    assert held.isdisjoint(batch.flatten().tolist())
    with pytest.raises(TextError, match="have 19 tokens, must have at least 20: two windows"):
        Windows(torch.arange(19), 10)


def test_the_last_step_leaves_heads_that_load(model: PreTrainedModel, tokens: Tensor, tmp_path: Path) -> None:
    training = MedusaTraining(model, Windows(tokens, PLAN.length), PLAN, ORIGIN)
    training.save(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[0] for name in state} == {"blocks"}  # the target's output head is not stored again
