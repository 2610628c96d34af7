"""The features of texts for draft services: every row is sent once, before the commit of the token after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.decoding.tree import Paths
from specdec.serving.validation import MAX_FEATURE_BYTES
from testing.mailbox import Mailbox
from tests.verifier_service.fake_heads import StatesEngine
from tests.verifier_service.fakes import BAD, FREE, LANGUAGE, VOCABULARY, Decided, reference, step_loop
from tests.verifier_service.step_loop.helpers import NO_BAD, REMOTE, text
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.backend.result import FeatureRows, Mode
from verifier_service.proposers.feature_source import MAX_WINDOW_BYTES, FeatureSource
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import VerifierSession
from verifier_service.step_loop import StepLoop

FED = Policy(REMOTE, 8, 0.0, features_session=1)


class FakeFusion:
    """Splits the number of a text into three digits that bfloat16 represents exactly."""

    width = 3

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def __call__(self, features: Tensor) -> Tensor:
        if self.failure is not None:
            raise self.failure
        numbers = features[:, 0, 0]
        return torch.stack([numbers // 65536, numbers // 256 % 256, numbers % 256], dim=1)


def source(window: int = 4096) -> FeatureSource:
    fusion: Any = FakeFusion()
    return FeatureSource(fusion, (0, 2), "f", window)


def loop_with(features: FeatureSource, *, mode: Mode = Mode.REMOTE_DRAFT, **options: Any) -> StepLoop:
    usual: dict[str, Any] = {"controller": Decided(mode), "latency": FREE, "features": features}
    return step_loop(StatesEngine(60), **usual | options)


class Mail(Mailbox):
    """Keeps features too, each with the number of tokens committed before it was sent."""

    def __init__(self, begun: int) -> None:
        super().__init__()
        self._begun = begun
        self.features: list[tuple[int, FeatureRows]] = []

    def _append(self, item: Any) -> None:
        if isinstance(item, FeatureRows):
            self.features.append((self.committed, item))
        else:
            super()._append(item)

    @property
    def committed(self) -> int:
        return self._begun + sum(len(result.tokens) for result in self.results)


class Fed:
    """A text in a step loop, whose draft guesses now and then."""

    def __init__(
        self, loop: StepLoop, prompt: int = 5, seed: int = 0, tokens: int = 30, policy: Policy = FED,
        sampling: Sampling = NO_BAD,
    ) -> None:  # fmt: skip
        sampler = RequestSampler(sampling)
        request = VerifierSessionRequest(text(prompt, seed), [], sampler, frozenset(), tokens, None, loop.context)
        self.session = VerifierSession(request, policy, 64, VOCABULARY)
        self.want = reference(request)
        self.mail = Mail(prompt)
        self._loop, self._random = loop, np.random.default_rng(seed)
        loop.enqueue(RunningSession(self.session, self.mail))

    def turn(self, turns: int = 1) -> None:
        for _ in range(turns):
            generated = self.mail.committed - len(self.session.request.prompt)
            self.session.client_has_read(generated, 0)
            if self._random.random() < 0.5:
                self._guess(generated)
            self._loop.turn()

    def run(self) -> None:
        while not self.mail.finish:
            self.turn()
        assert [token for result in self.mail.results for token in result.tokens] == self.want

    def _guess(self, generated: int) -> None:
        right = self.want[generated : generated + 3]
        if right:
            paths = Paths(right, range(len(right)), [-0.1] * len(right))
            self.session.extend(self.mail.committed, paths, 0.0)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield the position of each row sent, the number of its text, and the number of tokens committed before it."""
        for length, (first, rows, _) in self.mail.features:
            for position, row in enumerate(rows, first):
                high, middle, low = torch.frombuffer(bytearray(row), dtype=torch.bfloat16).int().tolist()
                yield position, 65536 * high + 256 * middle + low, length

    def check(self, first: int = 0, *, in_time: bool = True) -> None:
        """Check that all rows from a position on were sent once, in order, and belong to this text; `in_time`: each
        was sent before the commit of the token after it."""
        whole = self.session.request.prompt + self.want
        found = list(self.rows())
        assert [position for position, _, _ in found] == list(range(first, first + len(found)))
        for position, number, length in found:
            assert number == LANGUAGE.number_of(whole[: position + 1])
            # No rows of a prompt are sent before its first commit.
            assert not in_time or length <= max(position + 1, len(self.session.request.prompt))
        assert first + len(found) >= len(whole) - 1 - self.mail.results[-1].accepted - 1


@pytest.mark.parametrize("sampling", [NO_BAD, Sampling(temperature=0.8, seed=4, banned_tokens=frozenset({BAD}))])
def test_every_row_is_sent_once_before_the_token_after_it(sampling: Sampling) -> None:
    features = source()
    loop = loop_with(features)
    texts = [Fed(loop, 3 + 40 * seed, seed, sampling=sampling) for seed in range(4)]
    for one in texts:
        one.run()
        one.check()
    assert not features._texts
    assert any(result.accepted for one in texts for result in one.mail.results)


def test_prompts_in_chunks_are_sent_whole() -> None:
    loop = loop_with(source(), step_rows=8)
    texts = [Fed(loop, 60, seed, tokens=20) for seed in range(3)]
    for one in texts:
        one.run()
        one.check()


def test_only_the_window_is_kept() -> None:
    loop = loop_with(source(window=16))
    one = Fed(loop, 100)
    one.run()
    one.check(first=min(position for position, _, _ in one.rows()))
    assert min(position for position, _, _ in one.rows()) >= 100 - 16
    assert len(one.mail.features[0][1].rows) <= 16


def test_a_new_draft_gets_what_is_kept_again() -> None:
    loop = loop_with(source(window=24))
    one = Fed(loop, 10, tokens=40)
    while len(one.mail.results) < 6:
        one.turn()
    one.mail.features.clear()
    one.session.set_policy(replace(FED, features_session=2))
    while not one.mail.features:
        one.turn()
    (_, first), *_ = one.mail.features
    assert len(first.rows) > 6
    one.run()
    one.check(first=first.first, in_time=False)
    assert {rows.session for _, rows in one.mail.features} == {2}


def test_rows_are_kept_while_a_text_has_no_draft() -> None:
    """For example, after its only draft has died: the next draft gets the rows that were kept."""
    loop = loop_with(source())
    one = Fed(loop, 10, tokens=40)
    while len(one.mail.results) < 4:
        one.turn()
    one.mail.features.clear()
    one.session.set_policy(Policy(frozenset(), 8, 0.0))
    one.turn(4)
    assert not one.mail.features
    one.session.set_policy(replace(FED, features_session=2))
    one.run()
    one.check(in_time=False)


def test_a_window_is_bounded_in_bytes() -> None:
    fusion: Any = FakeFusion()
    fusion.width = MAX_WINDOW_BYTES // 2 // 10
    assert FeatureSource(fusion, (0,), "f", 4096)._window == 10


def test_a_text_whose_draft_asks_for_none_gets_none() -> None:
    loop = loop_with(source())
    one = Fed(loop, policy=replace(FED, features_session=0))
    one.run()
    assert not one.mail.features


def test_nothing_is_sent_while_drafts_do_not_pay() -> None:
    controller = Decided(Mode.OFF)
    loop = loop_with(source(), controller=controller)
    one = Fed(loop, 10, tokens=40)
    while one.session.tree.base < 20:
        one.turn()
    assert not one.mail.features
    controller.decided = Mode.REMOTE_DRAFT
    one.run()
    one.check(in_time=False)


def test_texts_without_remote_drafts_are_not_read() -> None:
    features = source()
    loop = loop_with(features)
    one = Fed(loop, policy=Policy(frozenset(), 8, 0.0))
    one.turn(3)
    assert not features._texts


def test_a_failure_costs_no_step() -> None:
    features = source()
    loop = loop_with(features)
    one = Fed(loop, tokens=40)
    one.turn(4)
    fusion: Any = features._fusion
    fusion.failure = MemoryError("none left")
    one.run()
    assert not features.works
    assert loop.features_fingerprint == ""
    assert not features._texts


def test_a_message_is_bounded() -> None:
    rows = FeatureRows(7, [bytes(MAX_FEATURE_BYTES // 3)] * 8, 5)
    parts = list(rows.parts())
    assert [len(part.rows) for part in parts] == [3, 3, 2]
    assert [part.first for part in parts] == [7, 10, 13]
    assert {part.session for part in parts} == {5}
    assert [len(part.rows) for part in FeatureRows(0, [bytes(2 * MAX_FEATURE_BYTES)] * 2, 5).parts()] == [1, 1]
