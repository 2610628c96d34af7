"""EAGLE-3 heads: what they read of a text, and how their trees grow. `test_heads_proposers.py` tests what all heads
have in common. Fake heads check that every row sees the rows of its text, without a gap (`FakeEagle3`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import CandidateSource
from specdec.engine.heads.growth import AUTOREGRESSIVE_DEPTH, BEAM, AutoregressiveReader
from specdec.engine.kv.blocks import BLOCK
from tests.verifier_service.fake_heads import (
    FakeEagle3,
    check_empty,
    check_over,
    loop_of,
    memory_of,
    proposer_of,
    sources,
)
from tests.verifier_service.fakes import BAD, DEAR, LANGUAGE, Client, run
from tests.verifier_service.test_heads_proposers import NO_BAD, client
from verifier_service.backend.request import Policy
from verifier_service.backend.result import HEADS
from verifier_service.proposers.feature_heads import FeatureHeadsProposer
from verifier_service.proposers.proposer import Phase
from verifier_service.step_loop import StepLoop


def loop_with(heads: FakeEagle3, *, positions: int = 4096, context: int = 4096, **options: Any) -> StepLoop:
    fake: Any = heads
    return loop_of(
        FeatureHeadsProposer(AutoregressiveReader(fake, memory_of(positions), context=context), (0, 2)), **options
    )


def generate(loop: StepLoop, one: Client, tokens: int) -> None:
    """Turn the loop until a text has this many generated tokens; the last commit may be sent later."""
    while one.session.generated < tokens:
        one.read()
        loop.turn()


def tokens_by_step(one: Client) -> list[int]:
    """Return the number of tokens of each step of a text: accepted candidates, and one of the target's own."""
    found, accepted = list[int](), 0
    for source in sources(one):
        accepted += 1
        if source != HEADS:
            found.append(accepted)
            accepted = 0
    return found + [accepted] * (accepted > 0)


def test_every_row_of_a_text_is_read_once() -> None:
    heads = FakeEagle3(0.3)
    loop = loop_with(heads)
    one = client(loop, 40, max_tokens=50)
    run(loop, one)
    check_over(loop, one)
    before_the_last_step = 40 + 50 - tokens_by_step(one)[-1]
    assert heads.read_rows == before_the_last_step - 1  # a row needs the token after it


def test_prompts_are_read_in_chunks_beside_decoding_texts() -> None:
    heads = FakeEagle3(0.3)
    loop = loop_with(heads, step_rows=8)
    first = client(loop, 3, max_tokens=120)
    for _ in range(3):
        first.read()
        loop.turn()
    others = [client(loop, 150, seed, max_tokens=20) for seed in range(3)]
    run(loop, first, *others)
    check_over(loop, first, *others)
    assert max(heads.seen) > 150
    assert sources(*others).count(HEADS) > 20


@pytest.mark.parametrize("sampling", [NO_BAD, Sampling(temperature=3.0, seed=8, banned_tokens=frozenset({BAD}))])
def test_heads_with_the_target_s_logits_are_always_right(sampling: Sampling) -> None:
    """Guesses are ranked with the noise of their positions."""
    loop = loop_with(FakeEagle3())
    one = client(loop, sampling=sampling, max_tokens=100)
    run(loop, one)
    check_over(loop, one)
    steps = tokens_by_step(one)
    assert steps[0] == 1
    assert min(steps[1:-1]) > 1
    assert max(steps) <= 1 + AUTOREGRESSIVE_DEPTH


def test_a_text_from_the_prefix_cache_is_read_from_where_it_is_computed() -> None:
    heads = FakeEagle3()
    loop = loop_with(heads)
    one = client(loop, 3 * BLOCK, max_tokens=10)
    run(loop, one)
    read, heads.seen = heads.read_rows, []
    again = client(loop, 3 * BLOCK, max_tokens=30)
    run(loop, again)
    check_over(loop, one, again)
    assert heads.read_rows - read < BLOCK + 30
    assert max(heads.seen) < BLOCK + 30
    assert sources(again).count(HEADS) > 10


def test_a_text_whose_rows_were_missed_is_read_from_the_gap_on() -> None:
    heads = FakeEagle3()
    loop = loop_with(heads)
    one = client(loop, 20, max_tokens=60)

    permitted = one.session.policy
    generate(loop, one, 10)
    one.session.set_policy(Policy(frozenset({CandidateSource.NGRAM}), 8, 0.0))
    generate(loop, one, 11 + AUTOREGRESSIVE_DEPTH)
    one.session.set_policy(permitted)
    heads.seen = []
    run(loop, one)
    check_over(loop, one)
    assert 0 < min(heads.seen) < 5
    assert max(heads.seen) < 45  # nothing from before the gap
    assert sources(one)[-20:].count(HEADS) > 10


def test_long_texts_are_seen_as_far_as_the_context() -> None:
    heads = FakeEagle3(0.2)
    loop = loop_with(heads, context=30, step_rows=64)
    one = client(loop, 200, max_tokens=40)
    run(loop, one)
    check_over(loop, one)
    assert heads.read_rows < 30 + 40 + AUTOREGRESSIVE_DEPTH
    assert 30 <= max(heads.seen) <= 30 + AUTOREGRESSIVE_DEPTH
    assert sources(one).count(HEADS) > 10


def test_a_text_without_room_has_no_guesses_until_there_is_some() -> None:
    heads = FakeEagle3()
    loop = loop_with(heads, positions=2 * BLOCK)
    first = client(loop, 70, max_tokens=30)  # two blocks
    second = client(loop, 70, 1, max_tokens=120)
    while not first.over:
        for each in (first, second):
            each.read()
        loop.turn()
    assert HEADS in sources(first)
    assert HEADS not in sources(second)
    run(loop, second)
    check_over(loop, first, second)
    assert sources(second).count(HEADS) > 10


def test_a_vocabulary_of_some_tokens_is_enough() -> None:
    heads = FakeEagle3()
    heads.ids = np.array([2, 3, 5, 6, 8])
    loop = loop_with(heads)
    one = client(loop, max_tokens=100)
    run(loop, one)
    check_over(loop, one)
    guessed = {token for token, source in zip(one.tokens, sources(one), strict=True) if source == HEADS}
    assert guessed
    assert guessed <= set(heads.ids.tolist())


def test_a_tree_has_the_likeliest_paths_of_all_levels() -> None:
    loop = loop_with(FakeEagle3())
    one = client(loop, max_tokens=30)
    loop.turn()
    loop._speculation.propose(Phase.AFTER_DELAY, [one.session])
    nodes = one.session.tree.root.walk()
    assert 5 < len(nodes) <= 32  # max_candidates
    depths = [node.position - one.session.tree.base + 1 for node in nodes]
    assert max(depths) > 2
    assert len([depth for depth in depths if depth == 1]) > 1
    root = one.session.tree.root
    best = max(root.children.values(), key=lambda child: child.logprob)
    logits = LANGUAGE.logits(LANGUAGE.number_of(one.session.tree.committed)).copy()
    logits[BAD] = -np.inf
    assert best.token == logits.argmax()
    assert len(root.children) <= BEAM


def test_a_text_s_own_depth_is_kept_beside_others() -> None:
    loop = loop_with(FakeEagle3())
    shallow = client(loop, 5, 0, policy=Policy(frozenset({CandidateSource.HEADS}), 32, 0.0, max_depth=2))
    deep = client(loop, 9, 1)
    run(loop, shallow, deep)
    check_over(loop, shallow, deep)
    assert max(tokens_by_step(shallow)) == 3
    assert max(tokens_by_step(deep)) > 3


def test_a_level_that_does_not_pay_is_not_grown() -> None:
    """If a row costs ten steps, a second level never pays; the first level is grown to find that out."""
    heads = FakeEagle3()
    loop = loop_with(heads, latency=DEAR)
    one = client(loop, max_tokens=80)
    generate(loop, one, 60)  # until the break-even probability is known
    steps, passes = loop.stats.steps, len(heads.texts)
    run(loop, one)
    check_over(loop, one)
    assert 10 < len(heads.texts) - passes <= loop.stats.steps - steps


def test_guesses_that_are_always_wrong_lose_probability() -> None:
    loop = loop_with(FakeEagle3(1.0))
    one = client(loop, max_tokens=150)
    probabilities = []
    while not one.over:
        one.read()
        loop.turn()
        probabilities += [
            float(np.exp(text.logprobs[0])) for text in proposer_of(loop)._texts.values() if text.proposed
        ]
    assert one.tokens == one.want
    assert np.mean(probabilities[-10:]) < np.mean(probabilities[:10]) - 0.05


def test_under_rejection_a_tree_is_a_chain_beside_trees() -> None:
    loop = loop_with(FakeEagle3())
    chain = client(loop, 5, 0, rule=Rule.REJECTION, max_tokens=30)
    tree = client(loop, 5, 1, max_tokens=30)
    loop.turn()
    loop._speculation.propose(Phase.AFTER_DELAY, [chain.session, tree.session])
    nodes = chain.session.tree.root.walk()
    assert all(len(node.children) <= 1 for node in [chain.session.tree.root, *nodes])
    assert len(tree.session.tree.root.children) > 1
    run(loop, chain, tree)
    check_over(loop, chain, tree)


def test_memory_of_texts_that_fail_is_given_back() -> None:
    """An error while the heads read prompts turns them off."""
    heads = FakeEagle3()
    loop = loop_with(heads, step_rows=8)
    one = client(loop, 100, max_tokens=30)
    loop.turn()
    assert proposer_of(loop)._reader.memory.pool.used > 0
    heads.failure = RuntimeError("out of memory")
    run(loop, one)
    check_over(loop, one)
    assert not proposer_of(loop).works
    check_empty(loop)
