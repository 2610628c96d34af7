"""Medusa heads change no token, whatever they guess, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.decoding.level_tree import FixedTree
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import OWN_DRAFTERS, CandidateSource
from specdec.decoding.step_logits import HostLogits
from specdec.engine.batch import PackedBatch
from specdec.engine.engine import Pass
from specdec.engine.kv.blocks import BLOCK
from tests.verifier_service.fakes import (
    BAD,
    DEAR,
    END,
    FREE,
    LANGUAGE,
    VOCABULARY,
    Client,
    Decided,
    TextEngine,
    run,
    step_loop,
)
from verifier_service.backend.request import Policy
from verifier_service.backend.result import HEADS
from verifier_service.proposers.medusa import MedusaProposer
from verifier_service.proposers.proposer import Phase
from verifier_service.speculation.controller import Mode
from verifier_service.step_loop import StepLoop

NO_BAD = Sampling(banned_tokens=frozenset({BAD}))
WARM = Sampling(temperature=0.9, seed=5, banned_tokens=frozenset({BAD}))
PENALISED = Sampling(temperature=1.0, seed=3, top_k=4, repetition_penalty=1.3, banned_tokens=frozenset({BAD}))
BY_HEADS = Policy(frozenset({CandidateSource.HEADS}), 32, 0.0)
COUNT = 4


class HiddenTextEngine(TextEngine):
    """A text engine whose hidden states are the numbers of texts."""

    hidden_size = 1

    def forward_hidden(self, batch: PackedBatch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        logits = self.forward(batch)
        return logits, self.memory[batch.slots[batch.wanted]].astype(np.float32)[:, None]

    def output_head(self, hidden: Any) -> Any:
        raise NotImplementedError


class Guessing:
    """Heads that follow the target's likeliest tokens, except where they are `wrong`."""

    shape = SimpleNamespace(heads=COUNT)
    vocabulary = VOCABULARY
    weights = torch.zeros(1)

    def __init__(self, wrong: float = 0.0) -> None:
        self.wrong = wrong
        self.failure: Exception | None = None
        self.rows: list[int] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.failure is not None:
            raise self.failure
        self.rows.append(len(hidden))
        return torch.from_numpy(np.stack([self.guesses(int(number)) for number in hidden[:, 0].tolist()]))

    def guesses(self, number: int) -> NDArray[np.float32]:
        found = []
        random = np.random.default_rng(number)
        for _ in range(COUNT):
            allowed = LANGUAGE.logits(number).copy()
            allowed[BAD] = -np.inf
            number = LANGUAGE.number(number, int(allowed.argmax()))
            logits = LANGUAGE.logits(number)
            found.append(logits[::-1] if random.random() < self.wrong else logits)
        return np.stack(found)


def loop_with(heads: Guessing, tree: FixedTree | None = None, **options: Any) -> StepLoop:
    proposer = MedusaProposer(heads, tree)  # type: ignore[arg-type]
    usual: dict[str, Any] = {"controller": Decided(Mode.HEADS), "latency": FREE}
    return step_loop(options.pop("target", None) or HiddenTextEngine(60), heads=proposer, **usual | options)


def proposer_of(loop: StepLoop) -> MedusaProposer:
    (found,) = (proposer for proposer in loop._speculation.proposers if isinstance(proposer, MedusaProposer))
    return found


def client(loop: StepLoop, length: int = 5, seed: int = 0, max_tokens: int = 60, **fields: Any) -> Client:
    text = [int(token) for token in np.random.default_rng([seed, length]).integers(2, BAD, length)]
    usual: dict[str, Any] = {"sampling": NO_BAD, "policy": BY_HEADS}
    return Client(loop, text, max_tokens, **usual | fields)


def sources(*clients: Client) -> list[int]:
    return [source for client in clients for result in client.mail.results for source in result.sources]


def check_over(loop: StepLoop, *clients: Client) -> None:
    for each in clients:
        assert each.mail.error is None
        assert each.tokens == each.want
    assert loop.pool.held == 0
    assert not proposer_of(loop)._texts


@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("sampling", [NO_BAD, WARM, PENALISED], ids=["greedy", "warm", "penalised"])
def test_tokens_are_those_of_plain_decoding(sampling: Sampling, wrong: float) -> None:
    loop = loop_with(Guessing(wrong))
    clients = [client(loop, 30 * i + 1, i, sampling=sampling) for i in range(5)]
    run(loop, *clients)
    check_over(loop, *clients)
    if wrong < 1.0:
        assert sources(*clients).count(HEADS) > 60


def test_right_guesses_save_steps() -> None:
    loop = loop_with(Guessing())
    one = client(loop, max_tokens=61)
    run(loop, one)
    check_over(loop, one)
    assert 1 + 60 // (COUNT + 1) <= loop.stats.steps < 20  # candidates may be too few for a path of all heads


def test_one_pass_of_the_heads_serves_all_texts() -> None:
    heads = Guessing()
    loop = loop_with(heads)
    clients = [client(loop, 5, i, max_tokens=20) for i in range(6)]
    run(loop, *clients)
    check_over(loop, *clients)
    assert max(heads.rows) == 6
    assert len(heads.rows) <= 20


def test_a_fixed_tree_is_proposed() -> None:
    loop = loop_with(Guessing(), FixedTree([[0], [1], [0, 0]]))
    one = client(loop, max_tokens=30)
    run(loop, one)
    check_over(loop, one)
    runs = [len(list(own)) for source, own in groupby(sources(one)) if source == HEADS]
    assert set(runs) == {2}
    assert loop.stats.drafted <= 3 * loop.stats.steps


def test_candidates_are_ranked_with_the_noise_of_their_positions() -> None:
    """The first head has the target's own logits here, so its best guess is the target's choice whatever the noise."""

    class Knowing(Guessing):
        def __init__(self) -> None:
            super().__init__()
            self.chosen: dict[int, int] = {}  # the next token, by the number of a text

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
    assert sources(one).count(HEADS) == 100  # every step but the first has its candidate accepted


def test_under_rejection_greedy_candidates_are_accepted_if_they_are_the_tokens() -> None:
    loop = loop_with(Guessing(0.3))
    clients = [client(loop, 5, i, rule=Rule.REJECTION, max_tokens=40) for i in range(3)]
    run(loop, *clients)
    check_over(loop, *clients)
    assert sources(*clients).count(HEADS) > 30


def test_under_rejection_a_candidate_does_not_depend_on_the_draw() -> None:
    """One at each place, the same for every seed, and certain to be drawn."""
    places: set[tuple[int, ...]] = set()
    for seed in range(20):
        sampling = Sampling(temperature=1.0, seed=seed, banned_tokens=frozenset({BAD}))
        loop = loop_with(Guessing())
        one = client(loop, rule=Rule.REJECTION, sampling=sampling, max_tokens=2 + COUNT)
        loop.turn()  # the prompt, and a first token that differs by seed
        first = one.tokens[0]
        entry = one.session
        loop._speculation.propose(Phase.AFTER_DELAY, [entry])
        node, path = entry.tree.root, list[int]()
        while node.children:
            (child,) = node.children.values()
            assert node.distribution is not None
            assert node.distribution.can_draw(child.token)
            path.append(child.token)
            node = child
        assert len(path) >= COUNT - 1  # none for the last position
        places.add((first, *path))
    assert len({first for first, *_ in places}) > 1
    assert len({tuple(path) for _, *path in places}) == 1  # from the same hidden state


def test_a_head_that_is_always_wrong_loses_probability() -> None:
    loop = loop_with(Guessing(1.0), FixedTree([[0]]))
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


def test_hidden_states_that_cannot_be_had_cost_no_step() -> None:
    class WithoutHidden(HostLogits):
        def hidden(self, rows: Sequence[int]) -> NDArray[np.float32]:
            raise MemoryError

    class Short(HiddenTextEngine):
        def launch(self, batch: PackedBatch) -> Pass:
            raise NotImplementedError

        def launch_hidden(self, batch: PackedBatch) -> Pass:
            logits, _ = self.forward_hidden(batch)
            return SimpleNamespace(logits=lambda asked: WithoutHidden(logits))

    loop = loop_with(Guessing(), target=Short(60))
    one = client(loop)
    run(loop, one)
    check_over(loop, one)
    assert not proposer_of(loop).works


def test_only_texts_that_permit_heads_get_their_candidates() -> None:
    heads = Guessing()
    loop = loop_with(heads)
    other = client(loop, policy=Policy(OWN_DRAFTERS - {CandidateSource.HEADS}, 8, 0.0))
    plain = client(loop, seed=1, policy=Policy(frozenset(), 8, 0.0))
    run(loop, other, plain)
    check_over(loop, other, plain)
    assert not heads.rows


def test_heads_wait_for_their_mode() -> None:
    heads = Guessing()
    loop = loop_with(heads, controller=Decided(Mode.NGRAM))
    one = client(loop)
    run(loop, one)
    check_over(loop, one)
    assert not heads.rows


def test_heads_that_fail_are_not_used_again() -> None:
    heads = Guessing()
    loop = loop_with(heads)
    one = client(loop, max_tokens=40)
    while len(one.tokens) < 10:
        one.read()
        loop.turn()
    heads.failure = RuntimeError("out of memory")
    other = client(loop, seed=1)
    run(loop, one, other)
    check_over(loop, one, other)
    assert not proposer_of(loop).works


def test_guesses_that_are_not_finite_are_no_candidates() -> None:
    class Broken(Guessing):
        def guesses(self, number: int) -> NDArray[np.float32]:
            return np.full((COUNT, VOCABULARY), np.nan, dtype=np.float32)

    loop = loop_with(Broken())
    clients = [client(loop, 5, i, sampling=sampling) for i, sampling in enumerate((NO_BAD, WARM))]
    run(loop, *clients)
    check_over(loop, *clients)
    assert HEADS not in sources(*clients)


def test_texts_that_end_and_texts_that_fail() -> None:
    loop = loop_with(Guessing(0.3))
    ends = client(loop, end_tokens=frozenset({END}), max_tokens=200)
    broken = client(loop, seed=1, sampling=Sampling())
    broken_text = Client(loop, [2, BAD, 3], 20, policy=BY_HEADS)
    run(loop, ends, broken, broken_text)
    assert ends.tokens == ends.want
    assert broken_text.mail.error is not None
    assert not proposer_of(loop)._texts


def test_candidates_that_do_not_pay_are_not_verified() -> None:
    loop = loop_with(Guessing(), latency=DEAR)
    one = client(loop)
    run(loop, one)
    check_over(loop, one)
    assert HEADS not in sources(one)


def test_a_text_that_loses_its_memory_comes_back() -> None:
    engine = HiddenTextEngine(9)
    loop = loop_with(Guessing(), target=engine)
    clients = [client(loop, BLOCK, i, 3 * BLOCK) for i in range(4)]
    run(loop, *clients)
    check_over(loop, *clients)
    assert engine.faults == []
    assert loop.stats.preemptions > 0
    assert sources(*clients).count(HEADS) > 200


def test_texts_that_are_cancelled_leave_nothing() -> None:
    loop = loop_with(Guessing())
    clients = [client(loop, 10, i, 100) for i in range(3)]
    for _ in range(3):
        loop.turn()
    assert len(proposer_of(loop)._texts) == 3
    for each in clients:
        each.cancel()
    assert not proposer_of(loop)._texts
