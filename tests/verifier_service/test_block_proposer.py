"""Block drafts: what they read of a text, and how their trees grow. `test_heads_proposers.py` tests what all heads have
in common. Fake drafts check that every block sees the rows of its text, without a gap (`FakeBlock`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.candidates import Candidates, with_confidence
from specdec.engine.heads.growth import BlockReader
from tests.verifier_service.fake_heads import FakeBlock, check_over, loop_of, memory_of, proposer_of, sources
from tests.verifier_service.fakes import Client, run
from tests.verifier_service.test_heads_proposers import BY_HEADS, WARM, client
from verifier_service.backend.result import HEADS
from verifier_service.proposers.feature_heads import FeatureHeadsProposer
from verifier_service.proposers.proposer import Phase
from verifier_service.step_loop import StepLoop


def loop_with(draft: FakeBlock, *, context: int = 4096, **options: Any) -> StepLoop:
    fake: Any = draft
    return loop_of(FeatureHeadsProposer(BlockReader(fake, memory_of(), context=context), (0, 2)), **options)


def levels_of(loop: StepLoop, one: Client) -> int:
    """Return the depth of the tree proposed after a prompt."""
    loop.turn()
    loop._speculation.propose(Phase.AFTER_DELAY, [one.session])
    depth, nodes = 0, [one.session.tree.root]
    while nodes := [child for node in nodes for child in node.children.values()]:
        depth += 1
    return depth


def test_every_row_of_a_text_is_read_once() -> None:
    draft = FakeBlock(0.3)
    loop = loop_with(draft)
    one = client(loop, 40, max_tokens=50)
    run(loop, one)
    check_over(loop, one)
    # The last token has no row, and no rows of the last step's tokens are read: the text is over.
    assert 40 + 50 - 1 - draft.guesses - 1 <= draft.read_rows <= 40 + 50 - 1


def test_a_block_sees_the_latest_rows() -> None:
    draft = FakeBlock()
    loop = loop_with(draft, context=16)
    one = client(loop, 60, max_tokens=30)
    run(loop, one)
    check_over(loop, one)
    assert draft.seen
    assert max(draft.seen) == 16


def test_a_tree_is_as_deep_as_the_block_where_the_draft_is_confident() -> None:
    draft = FakeBlock(markov=True)
    loop = loop_with(draft)
    assert levels_of(loop, client(loop)) == draft.guesses


@pytest.mark.parametrize("markov", [False, True])
def test_a_tree_is_at_most_as_deep_as_permitted(markov: bool) -> None:
    loop = loop_with(FakeBlock(markov=markov))
    assert levels_of(loop, client(loop, policy=replace(BY_HEADS, max_depth=2))) == 2


def test_a_markov_head_knows_the_guesses_before() -> None:
    """At a temperature, the next token depends on the draws before it. Without a Markov head, a block guesses as if the
    likeliest tokens had been drawn."""
    steps = {}
    for markov in (False, True):
        draft = FakeBlock(markov=markov)
        loop = loop_with(draft)
        texts = [client(loop, 5, seed, sampling=WARM, max_tokens=60) for seed in range(3)]
        run(loop, *texts)
        check_over(loop, *texts)
        assert HEADS in sources(*texts)
        assert proposer_of(loop).works
        steps[markov] = loop.stats.steps
    assert steps[True] < steps[False]


def children_of(probabilities: list[list[float]]) -> Candidates:
    with np.errstate(divide="ignore"):
        logprobs = np.log(np.array(probabilities))
    tokens = np.arange(logprobs.size).reshape(logprobs.shape)
    return Candidates(tokens, logprobs, np.ones(len(logprobs), dtype=bool))


@given(
    st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6).map(lambda weights: sorted(weights, reverse=True)),
    st.floats(0.0, 1.0),
)
def test_confidence_is_the_best_childs_probability(weights: list[float], confidence: float) -> None:
    """The other children keep their shares of the remaining probability; all are ordered by the new probabilities."""
    before = np.array(weights) / sum(weights)
    (tokens,), (logprobs,), _ = with_confidence(children_of([before.tolist()]), np.array([confidence]))
    assert (np.diff(logprobs) <= 0).all()
    found = np.exp(logprobs)[tokens.argsort()]
    assert found[0] == pytest.approx(confidence, abs=2e-6)
    assert found.sum() == pytest.approx(1.0, abs=1e-4)
    assert found[1:] / found[1:].sum() == pytest.approx(before[1:] / before[1:].sum(), rel=1e-6)


def test_a_child_without_another_choice_needs_no_confidence() -> None:
    given = children_of([[1.0, 0.0], [0.0, 0.0], [0.5, 0.4]])
    found = with_confidence(given, np.array([0.1, 0.9, 0.1]))
    assert np.array_equal(found.logprobs[:2], given.logprobs[:2])
    assert found.tokens.tolist() == [[0, 1], [2, 3], [5, 4]]
    assert np.exp(found.logprobs[2]) == pytest.approx([0.72, 0.1])


def test_one_of_several_choices_has_the_confidence() -> None:
    """Of a chain's children only the best is listed."""
    found = with_confidence(children_of([[0.9], [1.0], [0.0]]), np.array([0.3, 0.3, 0.3]))
    assert np.exp(found.logprobs[:, 0]) == pytest.approx([0.3, 1.0, 0.0])
