"""A draft learns from the tokens that the target chose in serving, and their probabilities; no step runs the target."""

from __future__ import annotations

import itertools
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.decoding.logprobs import logprobs
from specdec.engine.model_directory import ModelDirectory
from specdec.serving.target_logprobs import MAX_TOP, TargetLogprobs
from specdec.training.divergences import Acceptance
from specdec.training.draft import NEW, DraftPlan
from specdec.training.draft_command import DraftOptions, prepared
from specdec.training.given_draft import GivenDraft
from specdec.training.models import load_draft, load_target
from specdec.training.served_labels import NO_TOKEN, ServedLabels, ServedTraining, TextWindows, divergence_of_top
from specdec.training.texts import TextError
from specdec.training.traffic import TrainingTraffic
from specdec.v2 import learning_pb2
from tests.models import VOCABULARY, make, near

PLAN = DraftPlan(steps=120, rows=8, length=64, rate=0.002)


def distributions(rows: int, vocabulary: int, seed: int, scale: float = 2.0) -> Tensor:
    return (scale * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))).log_softmax(-1)


@given(vocabulary=st.integers(2, 30), top=st.integers(1, 40), seed=st.integers(0, 1000), same=st.booleans())
def test_all_other_tokens_count_as_one(vocabulary: int, top: int, seed: int, same: bool) -> None:
    log_p = distributions(3, vocabulary, seed)
    log_q = log_p if same else distributions(3, vocabulary, seed + 1)
    top = min(top, vocabulary)
    values, tokens = log_p.topk(top)
    found = divergence_of_top(
        torch.nn.functional.pad(tokens, (0, 2)), torch.nn.functional.pad(values, (0, 2), value=-torch.inf), log_q
    )
    p, q = log_p.double().exp(), log_q.double().exp()
    inside = (p * (p.log() - q.log())).gather(-1, tokens).sum(-1)
    p_rest, q_rest = (1 - probabilities.gather(-1, tokens).sum(-1) for probabilities in (p, q))
    expected = inside + (0.0 if top == vocabulary else p_rest * (p_rest.log() - q_rest.log()))
    assert found.tolist() == pytest.approx(expected.tolist(), abs=2e-4)
    whole = (p * (p.log() - q.log())).sum(-1)
    assert all(part <= all_of_it + 2e-4 for part, all_of_it in zip(found.tolist(), whole.tolist(), strict=True))
    if same:
        assert found.tolist() == pytest.approx([0.0] * 3, abs=2e-4)


def test_tokens_that_the_draft_lacks_are_among_the_others() -> None:
    log_q = distributions(1, 4, 1)
    tokens, log_p = torch.tensor([[2, 9]]), torch.tensor([[0.5, 0.25]]).log()
    q = float(log_q[0, 2].exp())
    expected = 0.5 * np.log(0.5 / q) + 0.5 * np.log(0.5 / (1 - q))
    assert divergence_of_top(tokens, log_p, log_q).tolist() == pytest.approx([expected], abs=1e-5)


def test_each_token_has_the_loss_of_its_label() -> None:
    """It is -log q for chosen tokens, KL for those with log-probabilities, and none for prompts, padding and the first
    token of a window."""
    log_q = distributions(2 * 4, 8, 3).view(2, 4, 8)
    labels = ServedLabels(
        tokens=torch.tensor([1, 2, 3, 4, 5, 6, 7, 0]),
        chosen=torch.tensor([True, False, True, True, True, True, True, True]),
        places=torch.tensor([-1, -1, -1, 0, -1, -1, 1, -1]),
        top_tokens=torch.tensor([[4, 0], [7, 1]]),
        top_logprobs=torch.tensor([[0.7, 0.3], [0.6, 0.4]]).log(),
        weights=torch.tensor([1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 2.0]),
    )
    windows, first = torch.tensor([[0, 1, 2, 3], [4, 5, 6, NO_TOKEN]]), torch.tensor([0, 0])
    soft = divergence_of_top(labels.top_tokens, labels.top_logprobs, torch.stack([log_q[0, 2], log_q[1, 1]]))
    expected = -log_q[0, 1, 3] + 3 * soft[0] - log_q[1, 0, 6] + soft[1]
    counted = labels.counts(windows, first, 8)
    assert counted.tolist() == [[False, False, True, True], [False, True, True, False]]
    assert labels.loss(windows, counted, log_q).item() == pytest.approx(expected.item(), abs=1e-5)
    narrow = labels.counts(windows, first, 6)  # a draft without the tokens 6 and 7
    assert narrow.tolist() == [[False, False, True, True], [False] * 4]
    assert torch.isfinite(labels.loss(windows, narrow, log_q[..., :6].log_softmax(-1)))
    assert labels.counts(windows, torch.tensor([3, 2]), 8).tolist() == [
        [False] * 3 + [True],
        [False] * 2 + [True, False],
    ]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), half=st.integers(1, 6))
def test_each_token_counts_once_with_what_came_before_it(lengths: list[int], half: int) -> None:
    """Except a text's first token. Each counts after all of the text before it, or at least half a window of it."""
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    texts = [range(begin, end) for begin, end in itertools.pairwise(ends)]
    windows = TextWindows(texts, 2 * half)
    every = torch.ones(ends[-1], dtype=torch.bool)
    tokens = torch.zeros(ends[-1], dtype=torch.int64)
    labels = ServedLabels(
        tokens, every, tokens - 1, torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1), every * 1.0
    )
    counted = labels.counts(windows.positions, windows.first, 1)
    assert sorted(windows.positions[counted].tolist()) == [place for text in texts for place in text[1:]]
    for window, of_window in zip(windows.positions.tolist(), counted.tolist(), strict=True):
        begins_text = any(window[0] == text.start for text in texts)
        assert begins_text or not any(of_window[:half])
        real = [place for place in window if place != NO_TOKEN]
        assert real == list(range(real[0], real[0] + len(real)))
        assert any(real[0] in text and real[-1] in text for text in texts)
    drawn = windows.batch(5, 1, 2)
    assert torch.equal(drawn, windows.batch(5, 1, 2))
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < len(windows.first)


def test_labels_stand_where_their_tokens_do() -> None:
    place = TargetLogprobs(2, np.array([8, 9], np.uint32), np.array([-0.5, -1.5], np.float16))
    texts = [
        learning_pb2.KeptText(tokens=[5, 6, 7], prompt_tokens=1, overruled=[2]),
        learning_pb2.KeptText(tokens=[5, 6, 8], prompt_tokens=2, overruled=[2], logprobs=[place.message]),
    ]
    labels = TrainingTraffic.of(texts, 0.0).labels(overruled=1.5)
    assert labels.tokens.tolist() == [5, 6, 7, 5, 6, 8]
    assert labels.chosen.tolist() == [False, True, True, False, False, True]
    assert labels.places.tolist() == [-1, -1, -1, -1, -1, 0]
    assert labels.weights.tolist() == [1, 1, 2.5, 1, 1, 2.5]
    assert labels.top_tokens[0, :2].tolist() == [8, 9]
    assert labels.top_logprobs[0].tolist() == [-0.5, -1.5] + [-torch.inf] * (MAX_TOP - 2)


def test_a_text_of_several_draft_services_counts_once() -> None:
    """Each service keeps the text from its prompt on, but has labels for its own part alone."""

    def part(tokens: list[int], overruled: list[int], age: int, digest: str = "x") -> learning_pb2.KeptText:
        places = [TargetLogprobs(at, np.array([at], np.uint32), np.array([-0.5], np.float16)) for at in overruled]
        return learning_pb2.KeptText(
            tenant_digest=digest,
            tokens=tokens,
            prompt_tokens=2,
            overruled=overruled,
            age_us=age,
            logprobs=[place.message for place in places],
        )

    parts = [
        part([5, 6, 7, 8, 9], [4], 2),
        part([5, 6, 7, 8, 9, 10], [3], 3),  # another request's, since it has a label before the end of the others
        part([5, 6, 7, 8], [3], 4),
        part([5, 6, 7, 8], [2], 5, "y"),
        part([5, 6, 7], [2], 6),
    ]
    for order in permutations(parts):
        traffic = TrainingTraffic.of(order, 0.0)
        assert sorted((text.tenant_digest, len(text.tokens), text.age_us) for text in traffic.texts) == [
            ("x", 5, 6),
            ("x", 6, 3),
            ("y", 4, 5),
        ]
        (whole,) = [text for text in traffic.texts if len(text.tokens) == 5]
        assert whole.tokens == [5, 6, 7, 8, 9]
        assert whole.overruled == [place.position for place in whole.logprobs] == [2, 3, 4]
        assert traffic.tenants == {"x": -6e-6, "y": -5e-6}


def test_the_newest_texts_are_held_out() -> None:
    traffic = TrainingTraffic.of([learning_pb2.KeptText(tokens=[token] * 10) for token in range(3, 103)], 0.0)
    for length, held in ((8, 5), (30, 6)):  # one in twenty, at least two windows
        learned, held_out = traffic.parted(length)
        assert [text.tokens[0] for text in (*learned.texts, *held_out.texts)] == list(range(3, 103))
        assert len(held_out.texts) == held
    with pytest.raises(TextError, match="has 100 texts with 1000 tokens, must have more than 1200 tokens"):
        traffic.parted(600)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt_tokens": 4}, "prompt_tokens 4"),
        ({"overruled": [3]}, "overruled up to 3"),
        ({"logprobs": [{"position": 3, "tokens": [1], "logprobs": b"\0\0"}]}, "has position 3, must be from 0 to 2"),
        ({"logprobs": [{"position": 1, "tokens": [1], "logprobs": b"\0"}]}, "has 1 tokens and 1 bytes"),
    ],
)
def test_texts_that_are_not_sound_are_refused(fields: dict[str, object], problem: str) -> None:
    text = learning_pb2.KeptText(tokens=[5, 6, 7], **fields)  # type: ignore[arg-type]
    with pytest.raises(TextError, match=f"--traffic: a text.*{problem}"):
        TrainingTraffic.of([text], 0.0).labels()


def test_tokens_that_the_draft_cannot_read_are_refused() -> None:
    traffic = TrainingTraffic.of([learning_pb2.KeptText(tokens=[5, 9]), learning_pb2.KeptText()], 0.0)
    traffic.check(10)
    with pytest.raises(TextError, match="--traffic: has the token 9, but the draft's vocabulary has 9 ids"):
        traffic.check(9)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    near(make("llama", folder / "target"), folder / "draft", noise=0.1)
    return folder


@pytest.fixture(scope="module")
def kept(pair: Path) -> list[learning_pb2.KeptText]:
    """Texts sampled from the target, with its log-probabilities where the draft is overruled, as serving keeps them."""
    target, draft = (
        load(ModelDirectory(pair / name), "cpu") for load, name in ((load_target, "target"), (load_draft, "draft"))
    )
    prompts = torch.randint(3, VOCABULARY, (600, 16), generator=torch.Generator().manual_seed(1))
    found = []
    with torch.inference_mode():
        torch.manual_seed(1)
        written = {"min_new_tokens": 48, "max_new_tokens": 48, "do_sample": True, "top_k": 0, "pad_token_id": 0}
        texts = target.generate(prompts, attention_mask=torch.ones_like(prompts), **written)
        log_p, log_q = (model(texts, use_cache=False).logits.float() for model in (target, draft))
    for text, p, q in zip(texts, log_p, log_q, strict=True):
        overruled = [i for i in range(16, 64) if int(q[i - 1].argmax()) != int(text[i])]
        rows = p[[i - 1 for i in overruled]].numpy()
        top = logprobs(rows, text[overruled].numpy(), [MAX_TOP] * len(overruled))
        places = [TargetLogprobs.of(i, likely).message for i, likely in zip(overruled, top, strict=True)]
        found.append(
            learning_pb2.KeptText(
                tenant_digest="0" * 64, tokens=text.tolist(), prompt_tokens=16, overruled=overruled, logprobs=places
            )
        )
    return found


def learned(pair: Path, texts: list[learning_pb2.KeptText], out: Path) -> tuple[Acceptance, Acceptance]:
    """Train the draft on texts, without a pass of the target; return what it measured before and after."""
    target = ModelDirectory(pair / "target")
    draft = GivenDraft.checked(pair / "draft", target, "cpu", untrained=False)
    options = DraftOptions([], 0, [], None, "cpu", TrainingTraffic.of(texts, 100.0), served_labels=True)
    training = prepared(target, draft, options, PLAN, out, resume=False).training(out)
    assert isinstance(training, ServedTraining)
    passes: list[object] = []
    hook = training._target.register_forward_hook(lambda *of: passes.append(of))
    losses = [training.step() for _ in range(PLAN.steps)]
    assert not passes
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    after = training.measure()[NEW]
    assert passes
    assert "loss on served labels" in training.describe(losses[-1])
    hook.remove()
    return training.before[NEW], after


def test_a_draft_learns_from_served_labels(pair: Path, kept: list[learning_pb2.KeptText], tmp_path: Path) -> None:
    """Each figure is over about 1,900 places: by chance, two of them are 0.1 apart in less than one run of ten
    million."""
    before, after = learned(pair, kept, tmp_path / "soft")
    assert after.rejection > before.rejection + 0.1
    assert after.greedy > before.greedy + 0.1


@pytest.mark.verify
def test_it_learns_more_with_the_target_s_log_probabilities(
    pair: Path, kept: list[learning_pb2.KeptText], tmp_path: Path
) -> None:
    one_hot = [learning_pb2.KeptText(tokens=text.tokens, prompt_tokens=16) for text in kept]
    _, soft = learned(pair, kept, tmp_path / "soft")
    _, hard = learned(pair, one_hot, tmp_path / "one-hot")
    assert soft.rejection > hard.rejection
