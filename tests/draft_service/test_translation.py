"""Drafts with another tokenizer than their target's: texts keep their bytes, and candidates are those of the draft."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import normalizers

from demo.prompts import held_out
from draft_service.draft_loop import DraftLoop
from draft_service.language_model import LanguageModelDrafter
from draft_service.request import DrafterSessionRequest, ExpansionPolicy
from draft_service.session import DrafterSession
from draft_service.translation import Translation
from specdec.decoding.calibration import Calibration
from specdec.decoding.draft_logits import MAX_DRAFT_LOGITS, DraftLogits, HostDraftLogits
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Rule, Sampling
from specdec.engine.batch import PackedBatch
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.unsupported import UnsupportedModelError
from specdec.local import DEMO
from specdec.text.tokenizer import Tokenizer
from tests.draft_service.fakes import VOCABULARY, Engine, Listener
from tests.draft_service.renumbered import renumbered
from tests.stack import ALWAYS, stack, torch_engine
from tests.text.tokenizers import directory, sentencepiece

TARGET = ModelDirectory(DEMO / "target")
WORDS = (" def", " return", "import", " os", " the", "self", " é", "\u65e5\u672c", "\n    ", "<|endoftext|>")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    return directory(sentencepiece(WORDS), tmp_path_factory.mktemp("models") / "sentencepiece")


@pytest.fixture(scope="module")
def translation(other: ModelDirectory) -> Translation:
    return Translation(other, TARGET)


@cache
def tokenizer_of(model: ModelDirectory) -> Tokenizer:
    return Tokenizer(model)


def spelled(model: ModelDirectory, tokens: list[int]) -> bytes:
    return b"".join(map(tokenizer_of(model).piece, tokens))


def test_common_tokens_have_the_same_bytes(other: ModelDirectory, translation: Translation) -> None:
    for theirs, own in translation.common.items():
        assert tokenizer_of(TARGET).piece(theirs) == tokenizer_of(other).piece(own)
    words = {tokenizer_of(other).piece(own) for own in translation.common.values()}
    assert {b" return", b"import", b"self"} <= words
    assert b"\xe6" in words  # a byte of a character without a token


def test_the_text_of_a_special_token_is_no_special_token(other: ModelDirectory, translation: Translation) -> None:
    """The draft has an ordinary token with the text of the target's end token."""
    end = tokenizer_of(TARGET).special_token("<|endoftext|>")
    assert end is not None
    assert "<|endoftext|>" in other.tokens
    assert end not in translation.common
    assert spelled(other, translation.spelled([end])) == b"<|endoftext|>"


@given(text=st.text(max_size=40))
def test_spelled_tokens_have_the_bytes_of_the_targets(
    other: ModelDirectory, translation: Translation, text: str
) -> None:
    tokens = tokenizer_of(TARGET).encode(text, special=False)
    assert spelled(other, translation.spelled(tokens)) == text.encode()
    assert all(translation.spelled([token]) for token in tokens)


@given(text=st.text(max_size=40))
def test_a_prompt_is_encoded_as_the_draft_does(other: ModelDirectory, translation: Translation, text: str) -> None:
    tokens = tokenizer_of(TARGET).encode(text, special=False)
    assert translation.prompt(tokens) == tokenizer_of(other).encode(text)


def test_a_prompt_begins_once(tmp_path: Path) -> None:
    """The target's token for the beginning of a text becomes the draft's."""
    target = directory(sentencepiece(["a", "b"]), tmp_path / "target", bos_token="<s>")
    draft = directory(sentencepiece(["b", "ab"]), tmp_path / "draft", bos_token="<s>")
    tokens = Tokenizer(target).encode("ab b")
    assert Translation(draft, target).prompt(tokens) == Tokenizer(draft).encode("ab b")
    assert tokens[0] == 1


def test_logits_are_those_of_common_tokens(other: ModelDirectory, translation: Translation) -> None:
    rows = np.random.default_rng(3).normal(size=(2, other.vocabulary)).astype(np.float32)
    found = translation.logits(HostDraftLogits(rows))
    for row, whole in zip(rows, found.whole([0, 1]), strict=True):
        expected = np.full(TARGET.vocabulary, -np.inf, dtype=np.float32)
        for theirs, own in translation.common.items():
            expected[theirs] = row[own]
        np.testing.assert_array_equal(whole, expected)
    lists = found.shortlists([1, 0])
    for row, values, ids in zip(rows[::-1], *lists, strict=True):
        best = np.argsort(-row)[:MAX_DRAFT_LOGITS].tolist()
        common = [token for token in best if token in translation.common.values()]
        count = int((values > -np.inf).sum())
        assert [translation.common[token] for token in ids[:count].tolist()] == common
        assert (np.diff(values[:count]) <= 0).all()
        assert not ids[count:].any()


@pytest.mark.parametrize(
    "normalizer", [normalizers.Lowercase(), normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])]
)
def test_a_tokenizer_that_changes_texts_is_refused(tmp_path: Path, normalizer: normalizers.Normalizer) -> None:
    changing = FastTokenizer.from_str(sentencepiece(WORDS).to_str())
    changing.normalizer = normalizers.Sequence([normalizer, changing.normalizer])
    model = directory(changing, tmp_path / "model")
    with pytest.raises(
        UnsupportedModelError, match=rf"{model.path}: its tokenizer turns .* must reproduce texts unchanged"
    ):
        Translation(model, TARGET)


def test_the_trees_are_those_of_the_draft_with_the_targets_tokenizer(tmp_path: Path) -> None:
    """A draft whose tokens have other ids makes the same trees, even if sampled, and after tokens it did not guess."""
    other = ModelDirectory(renumbered(tmp_path / "renumbered"))
    translation = Translation(other, TARGET)
    assert len(translation.common) == TARGET.vocabulary
    for number, prompt in enumerate(held_out(2, tokens=48)):
        sampler = RequestSampler(Sampling(temperature=0.8 * (number % 2), seed=number))
        with torch_engine(DEMO / "draft", capacity=2048, exact=False) as ours:
            expected = trees(LanguageModelDrafter(ours), sampler, prompt)
        with torch_engine(other.path, capacity=2048, exact=False) as engine:
            drafter = LanguageModelDrafter(engine, translation=translation, context=other.context)
            assert trees(drafter, sampler, prompt, translation.prompt(prompt)) == expected


def trees(
    drafter: LanguageModelDrafter, sampler: RequestSampler, prompt: list[int], own: list[int] | None = None
) -> list[list[tuple[int, ...]]]:
    """Return the nodes of three trees of a text; between trees, guessed tokens are committed, then other tokens."""
    request = DrafterSessionRequest(prompt, [], sampler, frozenset(), 200, 1000, own_prompt=own or ())
    session = DrafterSession(request, ExpansionPolicy(max_nodes=24), TARGET.vocabulary, Calibration())
    drafter.open(session)
    found = []
    for _ in range(3):
        for _ in range(6):
            assert drafter.expand([session]) == {}
        found.append([tuple(node.token for node in node.path()) for node in session.tree.best(24)])
        (_, first), (_, second) = islice(session.tree.best_chain(), 2)
        drafter.commit(session, session.commit(session.tree.base, [first.token, second.token]))
        drafter.commit(session, session.commit(session.tree.base, [11, 12]))
    drafter.close(session)
    return found


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.verify), 0.8])
async def test_tokens_are_those_of_plain_decoding(tmp_path: Path, temperature: float) -> None:
    """The draft lacks a tenth of the target's tokens, and others have other ids. How many of its candidates arrive in
    time depends on the machine's load: prompts follow until enough were accepted."""
    draft = renumbered(tmp_path / "draft", without=0.1)
    sampling = {"temperature": temperature, "seed": 5}
    accepted = 0
    async with stack(DEMO / "target", draft, translates=True, patience_seconds=5.0) as services:
        for number, prompt in enumerate(held_out(20, tokens=40)):
            plain = await services.generate(prompt, max_tokens=48, sampling=sampling, plain=True)
            drafted = await services.generate(prompt, max_tokens=48, sampling=sampling, speculation=ALWAYS)
            assert list(drafted.tokens) == list(plain.tokens)
            accepted += drafted.finish.speculation.accepted
            if number and accepted > 24:
                break
    assert accepted > 24


class Threefold(Translation):
    """A translation between equal vocabularies in which each token of the target is three of the draft's, unless the
    draft has guessed it."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.common = {token: token for token in range(vocabulary)}

    def spelled(self, tokens: Iterable[int]) -> list[int]:
        return [own for token in tokens for own in (token,) * (1 if token == GUESSED else 3)]

    def logits(self, logits: DraftLogits) -> DraftLogits:
        return logits


GUESSED = 7
"""The token that the fake engine finds the likeliest."""


class Positions(Engine):
    """Keeps the largest position."""

    most = 0

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        self.most = max(self.most, int(batch.positions.max()))
        return super().forward(batch)


def test_a_text_that_outgrows_the_draft_gets_no_candidates() -> None:
    """The text has more tokens in the draft than in the target. Beyond the draft's context nothing is computed, and
    nothing fails."""
    context, engine = 64, Positions()
    drafter = LanguageModelDrafter(engine, translation=Threefold(VOCABULARY), context=context)
    loop = DraftLoop(drafter)
    request = DrafterSessionRequest([1, 2], [], RequestSampler(Sampling()), frozenset(), 100, 1000, own_prompt=[1, 2])
    session = DrafterSession(request, ExpansionPolicy(max_nodes=8, max_depth=4), VOCABULARY, Calibration())
    listener = Listener(loop, session)
    while loop.turn() is not None:
        pass
    assert session.tree.size
    while loop.turn() is not None or session.tree.size:
        loop.commit(session, session.tree.base, [5], time.monotonic())
    assert context // 2 < engine.most < context
    assert not listener.failed
    loop.detach(session)
    assert not drafter.slots_used


def test_contrastive_needs_the_targets_tokenizer(translation: Translation) -> None:
    drafter = LanguageModelDrafter(Engine(), translation=translation)
    assert drafter.rules == {Rule.COUPLED, Rule.REJECTION}


def test_a_prompt_has_no_token_beyond_the_drafts_vocabulary(tmp_path: Path) -> None:
    """Its tokenizer has a special token more than the model, as Gemma's for text do."""
    tokenizer = sentencepiece(WORDS)
    tokenizer.add_special_tokens(["<image_soft_token>"])
    path, size = directory(tokenizer, tmp_path / "draft").path, tokenizer.get_vocab_size() - 1
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    draft = ModelDirectory(path)
    own = Translation(draft, TARGET).prompt(tokenizer_of(TARGET).encode("see <image_soft_token> a"))
    assert max(own) < size
    assert b"image_soft_token" in spelled(draft, own)
