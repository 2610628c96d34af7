"""Medusa heads: trees, noise of positions, calibration. `test_heads_proposers.py` tests what all heads share."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.calibration import Calibration
from specdec.decoding.level_tree import FixedTree
from specdec.decoding.sampling import Sampling
from tests.verifier_service.fake_heads import COUNT, FakeMedusa, check_over, loop_of, proposer_of, sources
from tests.verifier_service.fakes import BAD, LANGUAGE, run
from tests.verifier_service.test_heads_proposers import client
from verifier_service.backend.result import HEADS
from verifier_service.proposers.medusa import MedusaProposer, MedusaText
from verifier_service.step_loop import StepLoop


def loop_with(heads: FakeMedusa, tree: FixedTree) -> StepLoop:
    return loop_of(MedusaProposer(heads, tree))  # type: ignore[arg-type]


def test_a_fixed_tree_is_proposed() -> None:
    loop = loop_with(FakeMedusa(), FixedTree([[0], [1], [0, 0]]))
    one = client(loop, max_tokens=30)
    run(loop, one)
    check_over(loop, one)
    runs = [len(list(own)) for source, own in groupby(sources(one)) if source == HEADS]
    assert set(runs) == {2}
    assert loop.stats.offered <= 3 * loop.stats.steps


def test_candidates_are_ranked_with_the_noise_of_their_positions() -> None:
    """The first head has the target's own logits here, so its best guess is the target's choice whatever the noise."""

    class Knowing(FakeMedusa):
        def __init__(self) -> None:
            super().__init__()
            self.chosen: dict[int, int] = {}  # the target's next token, by number of text

        def guesses(self, number: int) -> NDArray[np.float32]:
            after = LANGUAGE.number(number, self.chosen[number])
            return np.tile(LANGUAGE.logits(after), (COUNT, 1))

    heads = Knowing()
    loop = loop_with(heads, FixedTree([[0]]))
    hot = Sampling(temperature=3.0, seed=8, banned_tokens=frozenset({BAD}))
    one = client(loop, sampling=hot, max_tokens=200)
    number = LANGUAGE.number_of(one.session.request.prompt)
    for token in one.want:
        heads.chosen[number] = token
        number = LANGUAGE.number(number, token)
    run(loop, one)
    check_over(loop, one)
    assert sources(one).count(HEADS) == 100  # a candidate is accepted in every step except the first


def test_a_head_that_is_always_wrong_loses_probability() -> None:
    loop = loop_with(FakeMedusa(1.0), FixedTree([[0]]))
    one = client(loop, max_tokens=120)
    probabilities = []
    while not one.over:
        one.read()
        loop.turn()
        probabilities += [
            float(np.exp(text.logprobs[0, 0])) for text in proposer_of(loop)._texts.values() if text.proposed
        ]
    assert one.tokens == one.want
    assert np.mean(probabilities[-10:]) < np.mean(probabilities[:10]) - 0.05


def test_padding_is_no_guess() -> None:
    """A head with fewer guesses than others has padding, whose token is 0."""
    learned: list[tuple[int, int | None]] = []

    class Recorded(Calibration):
        def learn(self, depth: int, taken: int | None, logprobs: Iterable[float]) -> None:
            learned.append((depth, taken))

    unused: Any = None
    text = MedusaText(
        *(unused, Recorded(), unused),
        tokens=np.array([[5, 7], [6, 0]]),
        logprobs=np.array([[-0.1, -3.0], [-0.1, -np.inf]]),
    )
    text.learn(0, [7, 0])
    assert learned == [(0, 1), (1, None)]
