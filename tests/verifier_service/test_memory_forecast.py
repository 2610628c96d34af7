"""The memory forecast: growth of running texts until they end, estimated from earlier lengths."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.decoding.speculation import NO_DRAFTERS
from specdec.engine.kv.blocks import BLOCK, BlockPool
from tests.examples import examples
from tests.verifier_service.fakes import VOCABULARY, TextEngine, run, step_loop
from tests.verifier_service.step_loop.helpers import check_over, client, text
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.scheduling.memory_forecast import REMEMBERED, TextLengths, expected_growth
from verifier_service.sessions.session import VerifierSession


class ToTheLimit(TextLengths):
    """Expects every text to reach its limit."""

    def expected(self, generated: NDArray[np.int64]) -> NDArray[np.int64]:
        return generated + 1_000_000


def lengths_of(*tokens: int) -> TextLengths:
    lengths = TextLengths()
    for each in tokens:
        lengths.add(each)
    return lengths


def session(tokens: int, to_come: int, pool: BlockPool | None) -> VerifierSession:
    """Return a session of `tokens` tokens, with a limit on further ones; without a pool it waits for memory."""
    request = VerifierSessionRequest(
        text(tokens, 1), [], RequestSampler(Sampling()), frozenset(), to_come, None, 10_000
    )
    made = VerifierSession(request, Policy(NO_DRAFTERS, 8, 0.0), 64, VOCABULARY)
    if pool is not None:
        made.allocate(pool)
    return made


class TestLengths:
    def test_nothing_is_known_at_first(self) -> None:
        assert lengths_of().expected(np.array([0, 7])).tolist() == [BLOCK, 7 + BLOCK]

    def test_texts_together_end_as_those_before_them(self) -> None:
        lengths = lengths_of(40, 10, 30, 20)
        assert lengths.expected(np.zeros(4, dtype=np.int64)).tolist() == [10, 20, 30, 40]
        assert lengths.expected(np.array([0, 0])).tolist() == [20, 40]

    def test_who_is_longer_than_some_is_like_the_others(self) -> None:
        lengths = lengths_of(10, 20, 30, 40)
        assert lengths.expected(np.array([20, 20])).tolist() == [30, 40]
        assert lengths.expected(np.array([39, 40])).tolist() == [40, 40 + BLOCK]

    def test_the_latest_are_remembered(self) -> None:
        lengths = lengths_of(5, *[9] * REMEMBERED)
        assert set(lengths.expected(np.zeros(500, dtype=np.int64)).tolist()) == {9}


class TestGrowth:
    def test_one_text_takes_what_its_limit_asks(self) -> None:
        """The last token takes no slot: it is in no step."""
        pool = BlockPool(30)
        assert expected_growth([session(60, 5, pool)], ToTheLimit()) == 0
        assert expected_growth([session(60, 6, pool)], ToTheLimit()) == 1

    def test_one_that_may_go_on_is_expected_to_end_as_others_did(self) -> None:
        pool = BlockPool(30)
        assert expected_growth([session(60, 200, pool)], lengths_of(69)) == 1
        assert expected_growth([session(60, 200, pool)], lengths_of(70)) == 2

    def test_a_newcomer_takes_its_text_as_well(self) -> None:
        """Except the part found in the prefix cache."""
        pool, found = BlockPool(30), []
        for begun in (None, session(3 * BLOCK, 1, pool)):
            if begun is not None:
                begun.computed = 2 * BLOCK
                begun.cache_prefix()
            newcomer = session(3 * BLOCK, 6, None)

            def make_room(_: int, newcomer: VerifierSession = newcomer) -> None:
                found.append(expected_growth([newcomer], ToTheLimit()))

            newcomer.allocate(pool, make_room)
            newcomer.free()
        assert found == [4, 2]

    def test_what_is_given_back_in_time_counts(self) -> None:
        pool = BlockPool(30)
        long = session(60, 20, pool)
        assert expected_growth([long, session(60, 5, pool)], ToTheLimit()) == 0
        assert expected_growth([long, session(60, 6, pool)], ToTheLimit()) == 2

    def test_what_is_shared_is_not_given_back(self) -> None:
        pool = BlockPool(30)
        long, first = session(BLOCK, 2 * BLOCK, pool), session(2 * BLOCK, 1, pool)
        assert expected_growth([long, first], ToTheLimit()) == 0  # the long text takes two blocks that the other freed
        first.computed = 2 * BLOCK
        first.cache_prefix()
        same = session(2 * BLOCK, 1, pool)
        assert same.table is not None
        assert same.table.shared // BLOCK == 1
        assert expected_growth([long, same], ToTheLimit()) == 1
        assert expected_growth([long, first], ToTheLimit()) == 1
        first.free()
        assert expected_growth([long, same], ToTheLimit()) == 0


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 150)), min_size=1, max_size=30))
def test_it_is_the_most_that_texts_take_token_by_token(texts: list[tuple[int, int]]) -> None:
    pool = BlockPool(400)
    sessions = [session(tokens, to_come, pool) for tokens, to_come in texts]
    before = sum(-(-tokens // BLOCK) for tokens, _ in texts)
    most = max(
        sum(-(-(tokens + moment) // BLOCK) for tokens, to_come in texts if moment < to_come)
        for moment in range(max(to_come for _, to_come in texts))
    )
    assert before + expected_growth(sessions, ToTheLimit()) == most


def test_of_many_texts_it_is_nearly_the_most() -> None:
    """Even with more texts than moments that the forecast examines."""
    pool = BlockPool(2000)
    texts = [(1 + 7 * number % 60, 1 + 37 * number % 301) for number in range(300)]
    sessions = [session(tokens, to_come, pool) for tokens, to_come in texts]
    most = max(
        sum(-(-(tokens + moment) // BLOCK) for tokens, to_come in texts if moment < to_come) for moment in range(301)
    )
    assert 0.95 * (most - len(texts)) <= expected_growth(sessions, ToTheLimit()) <= most - len(texts)


def test_texts_that_their_callers_end_are_remembered() -> None:
    """For example, by a stop string unknown to the verifier; texts without a token or past their deadline do not
    count."""
    loop = step_loop(TextEngine(8))
    late = client(loop, 5, 3, 100, deadline=time.monotonic() - 1)  # while nothing runs, no text is refused as too late
    ended = client(loop, 5, 1, 100)
    while ended.session.generated < 30:
        loop.turn()
    waits = client(loop, 5, 2, 100)
    generated = ended.session.generated
    assert late.session.generated
    for each in (late, ended, waits):
        each.cancel()
    assert loop._queue.lengths.expected(np.array([0])).tolist() == [generated]
    assert loop.stats.usual_tokens == generated


@settings(max_examples=examples(20))
@given(st.integers(4, 8), st.lists(st.tuples(st.integers(5, 120), st.integers(1, 70)), min_size=1, max_size=20))
def test_texts_that_are_as_long_as_expected_are_not_preempted(blocks: int, asked: list[tuple[int, int]]) -> None:
    """All their prompts fit into a step."""
    engine = TextEngine(blocks)
    loop = step_loop(engine)
    loop._queue.lengths = ToTheLimit()
    clients = [client(loop, length, seed, most) for seed, (length, most) in enumerate(asked)]
    run(loop, *clients, turns=5000)
    assert loop.stats.preemptions == 0
    check_over(loop, engine, *clients)
