"""Heads of every kind change no token, whatever they guess, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import OWN_DRAFTERS, CandidateSource
from specdec.decoding.step_logits import HostLogits
from specdec.engine.batch import PackedBatch
from specdec.engine.engine import Pass
from specdec.engine.kv.blocks import BLOCK
from tests.verifier_service.fake_heads import KINDS, Kind, StatesEngine, check_empty, check_over, proposer_of, sources
from tests.verifier_service.fakes import BAD, END, Client, Decided, FixedLatency, run
from verifier_service.backend.request import Policy
from verifier_service.backend.result import HEADS, Mode
from verifier_service.proposers.proposer import Phase
from verifier_service.step_loop import StepLoop

NO_BAD = Sampling(banned_tokens=frozenset({BAD}))
WARM = Sampling(temperature=0.9, seed=5, banned_tokens=frozenset({BAD}))
PENALISED = Sampling(temperature=1.0, seed=3, top_k=4, repetition_penalty=1.3, banned_tokens=frozenset({BAD}))
BY_HEADS = Policy(frozenset({CandidateSource.HEADS}), 32, 0.0)


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def client(loop: StepLoop, length: int = 5, seed: int = 0, max_tokens: int = 60, **fields: Any) -> Client:
    text = [int(token) for token in np.random.default_rng([seed, length]).integers(2, BAD, length)]
    usual: dict[str, Any] = {"sampling": NO_BAD, "policy": BY_HEADS}
    return Client(loop, text, max_tokens, **usual | fields)


@pytest.mark.parametrize("wrong", [0.4, *(pytest.param(wrong, marks=pytest.mark.verify) for wrong in (0.0, 1.0))])
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(NO_BAD, id="greedy"),
        pytest.param(PENALISED, id="penalised"),
        pytest.param(WARM, id="warm", marks=pytest.mark.verify),
    ],
)
def test_tokens_are_those_of_plain_decoding(kind: Kind, sampling: Sampling, wrong: float) -> None:
    loop = kind.loop(kind.heads(wrong))
    clients = [client(loop, 30 * i + 1, i, sampling=sampling) for i in range(5)]
    run(loop, *clients)
    check_over(loop, *clients)
    if wrong < 1.0:
        assert sources(*clients).count(HEADS) > 60


def test_right_guesses_save_steps(kind: Kind) -> None:
    loop = kind.loop(kind.heads())
    one = client(loop, max_tokens=61)
    run(loop, one)
    check_over(loop, one)
    assert loop.stats.steps < 20  # a tree may have too few candidates for a path through all heads


def test_one_pass_of_the_heads_serves_all_texts(kind: Kind) -> None:
    heads = kind.heads()
    loop = kind.loop(heads)
    clients = [client(loop, 5, i, max_tokens=20) for i in range(6)]
    run(loop, *clients)
    check_over(loop, *clients)
    assert max(heads.texts) == 6


def test_under_rejection_greedy_candidates_are_accepted_if_they_are_the_tokens(kind: Kind) -> None:
    loop = kind.loop(kind.heads(0.3))
    clients = [client(loop, 5, i, rule=Rule.REJECTION, max_tokens=40) for i in range(3)]
    run(loop, *clients)
    check_over(loop, *clients)
    assert sources(*clients).count(HEADS) > 30


def test_under_rejection_a_candidate_does_not_depend_on_the_draw(kind: Kind) -> None:
    """Each place has one candidate, certain to be drawn, and the same for every seed after the same text. How deep a
    tree grows depends on time."""
    places: dict[int, set[tuple[int, ...]]] = {}
    for seed in range(20):
        sampling = Sampling(temperature=1.0, seed=seed, banned_tokens=frozenset({BAD}))
        loop = kind.loop(kind.heads())
        one = client(loop, rule=Rule.REJECTION, sampling=sampling, max_tokens=6)
        loop.turn()  # the prompt, and a first token that differs by seed
        loop._speculation.propose(Phase.AFTER_DELAY, [one.session])
        node, path = one.session.tree.root, list[int]()
        while node.children:
            (child,) = node.children.values()
            assert node.distribution is not None
            assert node.distribution.can_draw(child.token)
            path.append(child.token)
            node = child
        assert path
        places.setdefault(one.tokens[0], set()).add(tuple(path))
    assert len(places) > 1
    for paths in places.values():
        longest = max(paths, key=len)
        assert all(path == longest[: len(path)] for path in paths)


def test_hidden_states_that_cannot_be_had_cost_no_step(kind: Kind) -> None:
    class WithoutStates(HostLogits):
        def hidden(self, rows: Sequence[int]) -> Any:
            raise MemoryError

        def features(self, rows: Sequence[int], others: Sequence[int] = ()) -> Any:
            raise MemoryError

    class Short(StatesEngine):
        def launch(self, batch: PackedBatch) -> Pass:
            raise NotImplementedError

        def launch_hidden(self, batch: PackedBatch) -> Pass:
            logits = self.forward(batch)
            return SimpleNamespace(logits=lambda asked: WithoutStates(logits))

        def launch_features(self, batch: PackedBatch, layers: Sequence[int]) -> Pass:
            return self.launch_hidden(batch)

    loop = kind.loop(kind.heads(), target=Short(60))
    one = client(loop)
    run(loop, one)
    check_over(loop, one)
    assert not proposer_of(loop).works


def test_only_texts_that_permit_heads_get_their_candidates(kind: Kind) -> None:
    heads = kind.heads()
    loop = kind.loop(heads)
    other = client(loop, policy=Policy(OWN_DRAFTERS - {CandidateSource.HEADS}, 8, 0.0))
    plain = client(loop, seed=1, policy=Policy(frozenset(), 8, 0.0))
    run(loop, other, plain)
    check_over(loop, other, plain)
    assert not heads.texts


def test_heads_wait_for_their_mode(kind: Kind) -> None:
    heads = kind.heads()
    loop = kind.loop(heads, controller=Decided(Mode.NGRAM))
    one = client(loop)
    run(loop, one)
    check_over(loop, one)
    assert not heads.texts


def test_heads_that_fail_are_not_used_again(kind: Kind) -> None:
    heads = kind.heads()
    loop = kind.loop(heads)
    one = client(loop, max_tokens=40)
    while len(one.tokens) < 10:
        one.read()
        loop.turn()
    heads.failure = RuntimeError("out of memory")
    other = client(loop, seed=1)
    run(loop, one, other)
    check_over(loop, one, other)
    assert not proposer_of(loop).works


def test_guesses_that_are_not_finite_are_no_candidates(kind: Kind) -> None:
    heads = kind.heads()
    heads.broken = True
    loop = kind.loop(heads)
    clients = [client(loop, 5, i, sampling=sampling) for i, sampling in enumerate((NO_BAD, WARM))]
    run(loop, *clients)
    check_over(loop, *clients)
    assert heads.texts
    assert HEADS not in sources(*clients)


def test_texts_that_end_and_texts_that_fail(kind: Kind) -> None:
    loop = kind.loop(kind.heads(0.3))
    ends = client(loop, end_tokens=frozenset({END}), max_tokens=200)
    broken = client(loop, seed=1, sampling=Sampling())
    broken_text = Client(loop, [2, BAD, 3], 20, policy=BY_HEADS)
    run(loop, ends, broken, broken_text)
    assert ends.tokens == ends.want
    assert broken_text.mail.error is not None
    check_empty(loop)


def test_candidates_that_do_not_pay_are_not_verified(kind: Kind) -> None:
    loop = kind.loop(kind.heads(0.5), latency=FixedLatency(1000.0))  # rows pay above a probability of 0.999
    one = client(loop)
    run(loop, one)
    check_over(loop, one)
    assert HEADS not in sources(one)


def test_a_text_that_loses_its_memory_comes_back(kind: Kind) -> None:
    engine = StatesEngine(9)
    loop = kind.loop(kind.heads(), target=engine)
    clients = [client(loop, BLOCK, i, 3 * BLOCK) for i in range(4)]
    run(loop, *clients)
    check_over(loop, *clients)
    assert engine.faults == []
    assert loop.stats.preemptions > 0
    assert sources(*clients).count(HEADS) > 200


def test_texts_that_are_cancelled_leave_nothing(kind: Kind) -> None:
    loop = kind.loop(kind.heads())
    clients = [client(loop, 10, i, 100) for i in range(3)]
    for _ in range(3):
        loop.turn()
    assert len(proposer_of(loop)._texts) == 3
    for each in clients:
        each.cancel()
    check_empty(loop)
