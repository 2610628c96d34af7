"""Heads in a draft service: they read the rows of a text that have arrived, and grow its tree once after each commit.

Fake heads check that every row sees the rows of its text, without a gap (`tests/verifier_service/fake_heads.py`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.candidate_queue import Extension
from draft_service.draft_loop import DraftLoop
from draft_service.drafter import FeatureFormat
from draft_service.heads import HeadsDrafter
from draft_service.request import DrafterSessionRequest, ExpansionPolicy
from draft_service.session import DrafterSession
from specdec.decoding.calibration import Calibration
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.engine.heads.growth import AutoregressiveReader, BlockReader, HeadsReader
from tests.choices import choose_token
from tests.draft_service.fakes import running
from tests.verifier_service.fake_heads import FakeBlock, FakeEagle3, Logits, memory_of
from tests.verifier_service.fakes import BAD, LANGUAGE, VOCABULARY

KINDS: dict[str, tuple[Callable[[float], Any], Callable[..., HeadsReader]]] = {
    "eagle3": (FakeEagle3, AutoregressiveReader),
    "block": (FakeBlock, BlockReader),
    "markov": (partial(FakeBlock, markov=True), BlockReader),
}

GREEDY = Sampling(temperature=0.0, banned_tokens=frozenset({BAD}))
WARM = Sampling(temperature=1.0, seed=3, banned_tokens=frozenset({BAD}))


@dataclass
class Text:
    """A text at a draft service, with its target, which verifies the tree and sends features and commits."""

    pod: Pod
    session: DrafterSession
    failed: list[Exception] = field(default_factory=list)
    sent: list[Extension] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # number of candidates by step
    fed: int = 0  # rows sent

    def step(self, *, feeds: bool = True, works: bool = True, levels: int = 100) -> None:
        """Let the draft work, verify the first levels of its tree, and commit."""
        if works:
            self.pod.work()
        session = self.session
        text, node, tokens = list(session.tree.committed), session.tree.root, list[int]()
        while len(text) < session.end:
            token = choose_token(session.request.sampler, LANGUAGE.logits(LANGUAGE.number_of(text)), len(text), None)
            text.append(token)
            tokens.append(token)
            child = node.children.get(token)
            if child is None or len(tokens) > levels:
                break
            node = child
        self.accepted.append(len(tokens) - 1)
        if feeds:
            self.feed(text, len(text) - 1)
        self.pod.loop.commit(session, session.tree.base, tokens, time.monotonic())

    def feed(self, text: list[int], end: int, first: int | None = None) -> None:
        """Send the rows up to a position, as numbers of the texts that end there."""
        first = self.fed if first is None else first
        numbers = [[float(LANGUAGE.number_of(text[: place + 1]))] for place in range(first, end)]
        # Not sent as a message: such numbers do not fit into bfloat16.
        self.pod.drafter._texts[self.session].add(first, torch.tensor(numbers))
        self.fed = max(self.fed, end)


class Pod:
    """A draft loop, turned by hand, over a drafter with fake heads."""

    def __init__(
        self, kind: str, wrong: float = 0.0, *, positions: int = 4096, context: int = 4096, heads: Any = None
    ) -> None:
        make, reader = KINDS[kind]
        self.heads = heads or make(wrong)
        self.memory = memory_of(positions)
        self.drafter = HeadsDrafter(reader(self.heads, self.memory, context=context), FeatureFormat("f", 1))
        self.loop = DraftLoop(self.drafter)

    def text(self, prompt: int = 5, tokens: int = 80, sampling: Sampling = GREEDY, seed: int = 0) -> Text:
        random = np.random.default_rng(seed)
        tokens_of_prompt = random.integers(1, VOCABULARY - 1, prompt).tolist()
        sampler = RequestSampler(sampling)
        request = DrafterSessionRequest(tokens_of_prompt, [], sampler, frozenset(), tokens, 10_000)
        text = Text(self, DrafterSession(request, ExpansionPolicy(), VOCABULARY, Calibration()))
        self.loop.attach(running(text.session, text.sent.append, text.failed.append))
        return text

    def work(self) -> None:
        for _ in range(8):
            self.loop.turn()

    def close(self, *texts: Text) -> None:
        for text in texts:
            self.loop.detach(text.session)
        assert not self.drafter._texts
        assert self.memory.pool.used == 0
        assert self.heads.faults == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_what_the_target_will_choose_is_guessed(kind: str, sampling: Sampling) -> None:
    pod = Pod(kind)
    text = pod.text(sampling=sampling)
    while text.session.tree.base < text.session.end:
        text.step()
    assert text.accepted[0] == 0  # the first step comes before any row
    followers = text.accepted[1:-1]
    # Without a Markov head, a block follows the likeliest tokens, but at a temperature others are drawn.
    least = 1.0 if kind == "block" and sampling is WARM else 3.0
    assert sum(followers) / len(followers) >= least
    assert not text.failed
    pod.close(text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_read_once_whatever_is_sent_again(kind: str) -> None:
    pod = Pod(kind, 0.3)
    text = pod.text()
    for _ in range(6):
        text.step()
        text.feed(list(text.session.tree.committed), text.fed, first=0)  # as to a new draft
    pod.work()
    assert pod.heads.read_rows == text.fed == text.session.tree.base - 1
    pod.close(text)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_grows_before_the_row_of_the_last_token_is_there(kind: str) -> None:
    pod = Pod(kind)
    text = pod.text()
    for _ in range(3):
        text.step(feeds=False)
        assert pod.drafter.best_logprob(text.session) == -math.inf
    assert text.accepted == [0, 0, 0]
    assert not pod.heads.texts
    committed = list(text.session.tree.committed)
    text.feed(committed, len(committed) - 2)
    pod.work()
    assert not pod.heads.texts
    text.feed(committed, len(committed) - 1)
    text.step()
    assert text.accepted[-1] >= 3
    pod.close(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_grows_once_after_each_commit(kind: str) -> None:
    pod = Pod(kind, 0.5)
    text = pod.text()
    text.step()
    pod.work()
    passes = len(pod.heads.texts)
    assert passes > 0
    pod.work()
    assert len(pod.heads.texts) == passes
    text.step()
    pod.work()
    assert len(pod.heads.texts) > passes
    pod.close(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_read_again_from_behind_a_gap(kind: str) -> None:
    pod = Pod(kind)
    text = pod.text(prompt=40)
    for _ in range(3):
        text.step()
    text.step(feeds=False)
    text.fed = text.session.tree.base - 1  # these rows are lost
    text.step()
    pod.heads.seen.clear()
    pod.work()
    rows = text.session.tree.base - 1 - text.pod.drafter._texts[text.session].slots.first
    assert pod.heads.seen
    assert max(pod.heads.seen) <= rows + 7  # plus the rows of the tree
    assert rows < 20
    text.step()
    assert text.accepted[-1] >= 3
    pod.close(text)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_see_the_latest_rows(kind: str) -> None:
    pod = Pod(kind, 0.3, context=16)
    text = pod.text(prompt=60)
    for _ in range(8):
        text.step()
    assert max(pod.heads.seen) <= 16 + 7
    pod.close(text)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_grow_together(kind: str) -> None:
    pod = Pod(kind, 0.2)
    texts = [pod.text(prompt=3 + 9 * seed, seed=seed, sampling=WARM) for seed in range(5)]
    for _ in range(5):
        pod.work()
        for text in texts:
            text.step(works=False)
    assert max(pod.heads.texts) == len(texts)
    assert all(sum(text.accepted) > 0 for text in texts)
    pod.close(*texts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_without_room_has_no_guesses_until_there_is_some(kind: str) -> None:
    pod = Pod(kind, positions=128)
    large, small = pod.text(prompt=100, seed=1), pod.text(prompt=10, seed=2)
    for _ in range(4):
        for text in (large, small):
            text.step()
    assert not large.failed + small.failed
    pod.loop.detach(large.session)
    for _ in range(3):
        small.step()
    assert small.accepted[-1] >= 3
    pod.close(small)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_pass_is_tried_again_and_then_ends_the_text(kind: str) -> None:
    pod = Pod(kind)
    text = pod.text()
    text.step()
    pod.heads.failure = RuntimeError("no pass")
    pod.loop.turn()
    pod.heads.failure = None
    text.step()
    assert text.accepted[-1] >= 3
    assert not text.failed
    pod.heads.failure = RuntimeError("no pass")
    pod.work()
    assert text.failed
    pod.close()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_are_not_finite_guess_nothing(kind: str) -> None:
    pod = Pod(kind)
    text = pod.text()
    text.step()
    pod.heads.broken = True
    for _ in range(3):
        text.step()
    assert text.accepted == [0, 0, 0, 0]
    assert not text.failed
    pod.heads.broken = False
    text.step()
    text.step()
    assert text.accepted[-1] >= 3
    pod.close(text)


class Shortsighted(FakeBlock):
    """A block draft whose third guess and those after it are wrong."""

    def logits_of(self, number: int, depth: int = 0) -> Logits:
        found = super().logits_of(number)
        return found[::-1] if depth > 1 else found


def test_a_candidate_that_the_text_followed_gets_children_from_its_own_row() -> None:
    """The step had no row for it: the target's choice led there, and its children were guessed from earlier rows."""
    pod = Pod("block", heads=Shortsighted())
    text = pod.text()
    for _ in range(12):
        text.step(levels=1)
    assert text.accepted == [0] + 11 * [1]
    pod.close(text)


def test_features_of_another_form_are_refused() -> None:
    pod = Pod("block")
    session = pod.text(tokens=20).session
    for first, values, problem in (
        (0, b"", "has 0 bytes"),
        (0, b"abc", "has 3 bytes, must have rows of 2 bytes"),
    ):
        with pytest.raises(ValueError, match=problem):
            pod.loop.add_features(session, first, values)
    pod.loop.add_features(session, 0, bytes(8))
    assert pod.drafter._texts[session].end == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_one_token_has_its_first_guess_with_its_first_row(kind: str) -> None:
    pod = Pod(kind)
    text = pod.text(prompt=1)
    text.step()
    assert not pod.heads.texts
    text.step()
    assert text.accepted[0] == 0
    assert text.accepted[1] >= 3
    assert not text.failed
    pod.close(text)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_beyond_what_the_draft_can_hold_are_left_out(kind: str) -> None:
    """The draft's context may be shorter than the verifier's."""
    pod = Pod(kind)
    text = pod.text(prompt=5, tokens=10)
    end = text.session.end
    for first in (end - 2, end + 7):
        pod.loop.add_features(text.session, first, bytes(24))
        assert pod.drafter._texts[text.session].end == end


def test_a_device_that_computes_no_more_is_found() -> None:
    pod = Pod("block")
    assert pod.drafter.recover()

    class Lost:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

    pod.drafter._reader.heads = Lost()
    assert not pod.drafter.recover()
