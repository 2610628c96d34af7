"""The local draft changes no token, computes nothing twice, reads no wrong slot and leaves nothing allocated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import NO_DRAFTERS, OWN_DRAFTERS, CandidateSource
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.row_counts import InvariantRowCounts
from tests.verifier_service.fakes import (
    BAD,
    DEAR,
    END,
    FREE,
    VOCABULARY,
    Client,
    Decided,
    FixedLatency,
    TextEngine,
    run,
    step_loop,
)
from verifier_service.backend.request import Policy
from verifier_service.backend.result import CORRECTION, LOCAL_MODEL, LOOKAHEAD, NGRAM, Mode
from verifier_service.proposers.draft_model import DraftModelProposer
from verifier_service.settings.tuning import DEFAULTS
from verifier_service.step_loop import StepLoop

REMOTE = frozenset({CandidateSource.REMOTE})

NO_BAD = Sampling(banned_tokens=frozenset({BAD}))
WARM = Sampling(temperature=0.9, seed=5, banned_tokens=frozenset({BAD}))
PENALISED = Sampling(temperature=1.0, seed=3, top_k=4, repetition_penalty=1.3, banned_tokens=frozenset({BAD}))
GUESSING = Policy(OWN_DRAFTERS, 8, 0.0)
CONTEXT = 10_000


class Narrow(TextEngine):
    """A draft whose vocabulary lacks the last ids."""

    vocabulary = 8

    def forward(self, batch: Any) -> Any:
        assert max(batch.tokens) < self.vocabulary
        return super().forward(batch)[:, : self.vocabulary]


class Unsound(TextEngine):
    """A draft with NaN logits after any text that contains token 7."""

    bad = 7


class Quick(FixedLatency):
    """A hundredth of the target's step latency."""

    def of(self, rows: int) -> float:
        return 0.01


QUICK, SLOW = Quick(0.0), FixedLatency(1000.0)


class OftenWrong(TextEngine):
    """A draft with wrong logits in every third row."""

    def forward(self, batch: Any) -> Any:
        logits = super().forward(batch)
        logits[::3] = logits[::3, ::-1]
        return logits


def local_model(loop: StepLoop) -> DraftModelProposer:
    (found,) = (each for each in loop._speculation.proposers if isinstance(each, DraftModelProposer))
    return found


def loop_with(draft: TextEngine, *, context: int = CONTEXT, target: TextEngine | None = None) -> StepLoop:
    own = DraftModelProposer(draft, context, latency=QUICK)
    return step_loop(target or TextEngine(60), controller=Decided(Mode.LOCAL_DRAFT), draft_model=own)


def text(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng([seed, length]).integers(2, BAD, length)]


def client(loop: StepLoop, length: int = 5, seed: int = 0, max_tokens: int = 60, **fields: Any) -> Client:
    usual: dict[str, Any] = {"sampling": NO_BAD, "policy": GUESSING}
    return Client(loop, text(length, seed), max_tokens, **usual | fields)


def sources(*clients: Client) -> list[int]:
    return [source for each in clients for result in each.mail.results for source in result.sources]


def check_over(loop: StepLoop, draft: TextEngine, *clients: Client) -> None:
    """Check that all clients got their tokens, no wrong slot was read, and nothing is held."""
    for each in clients:
        assert each.mail.error is None
        assert each.tokens == each.want
    assert draft.faults == []
    assert loop.pool.held == 0
    assert local_model(loop).pool.held == 0


@pytest.mark.parametrize("rows", [None, InvariantRowCounts((4, 6, 16, 64, 256))], ids=["any-rows", "row-class"])
@pytest.mark.parametrize("kind", [TextEngine, OftenWrong])
@pytest.mark.parametrize("sampling", [NO_BAD, WARM, PENALISED], ids=["greedy", "warm", "penalised"])
def test_many_get_what_each_would_get_alone(sampling: Sampling, kind: Any, rows: InvariantRowCounts | None) -> None:
    draft = kind(60, rows=rows)
    loop = loop_with(draft)
    clients = [client(loop, 30 * i + 1, i, sampling=sampling) for i in range(5)]
    run(loop, *clients)
    check_over(loop, draft, *clients)
    assert sources(*clients).count(LOCAL_MODEL) > (150 if kind is TextEngine else 60)  # of 300


def test_what_was_proposed_right_is_not_computed_again() -> None:
    """One row per token; only the last token of a step is computed again, since its successor is needed."""
    draft = TextEngine(60)
    loop = loop_with(draft)
    one = client(loop, 5, max_tokens=200)
    run(loop, one)
    check_over(loop, draft, one)
    steps = sum(result.steps for result in one.mail.results)
    assert steps < 100
    assert sum(draft.steps) <= 205 + 2 * steps


def test_long_texts_are_read_in_pieces() -> None:
    draft = TextEngine(80)
    loop = loop_with(draft, target=TextEngine(80))
    short, long = client(loop, 3, 1, 200), client(loop, 900, 2, 100)
    run(loop, short, long)
    check_over(loop, draft, short, long)
    assert max(draft.steps) <= DEFAULTS.draft_model.max_prefill_rows + 4
    assert sources(long).count(LOCAL_MODEL) > 20


def test_guesses_that_do_not_pay_are_not_made() -> None:
    """If an additional row costs ten steps, or a draft's pass a thousand, chains stay at one token."""
    for latency, own_cost in ((DEAR, QUICK), (FREE, SLOW)):
        draft = TextEngine(60)
        loop = step_loop(
            TextEngine(60),
            latency,
            controller=Decided(Mode.LOCAL_DRAFT),
            draft_model=DraftModelProposer(draft, CONTEXT, own_cost),
        )
        one = client(loop)
        run(loop, one)
        check_over(loop, draft, one)
        assert len(draft.steps) <= sum(result.steps for result in one.mail.results)
        assert (LOCAL_MODEL in sources(one)) is (latency is FREE)  # the candidate from the tip's own row is free


def test_the_last_token_is_not_guessed() -> None:
    """No token follows it: proposing it saves no step."""
    draft = TextEngine(60)
    loop = loop_with(draft)
    one, other = client(loop, 600, max_tokens=1), client(loop, 5, max_tokens=2)
    run(loop, one, other)
    check_over(loop, draft, one, other)
    assert sum(draft.steps) <= 6
    assert len(sources(other)) == 2


def test_end_tokens_end_a_chain() -> None:
    draft = TextEngine(60)
    loop = loop_with(draft)
    clients = [client(loop, 5, i, 200, end_tokens=frozenset({END})) for i in range(6)]
    run(loop, *clients)
    check_over(loop, draft, *clients)
    assert any(each.tokens[-1] == END for each in clients)


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.NGRAM, Mode.REMOTE_DRAFT])
def test_it_is_asked_in_its_own_mode_only(mode: Mode) -> None:
    draft = TextEngine(60)
    loop = step_loop(
        TextEngine(60), controller=Decided(mode), draft_model=DraftModelProposer(draft, CONTEXT, latency=QUICK)
    )
    one, other = client(loop), client(loop, policy=Policy(REMOTE, 8, 0.0))
    run(loop, one, other)
    check_over(loop, draft, one, other)
    assert draft.steps == []


def test_who_wants_no_guesses_gets_none() -> None:
    draft = TextEngine(60)
    loop = loop_with(draft)
    one, other = client(loop, policy=Policy(NO_DRAFTERS, 8, 0.0)), client(loop, seed=1)
    run(loop, one, other)
    check_over(loop, draft, one, other)
    assert LOCAL_MODEL not in sources(one)
    assert LOCAL_MODEL in sources(other)


def test_a_text_beyond_its_context_goes_on_without() -> None:
    draft = TextEngine(60)
    loop = loop_with(draft, context=40)
    one = client(loop, 10, max_tokens=80)
    run(loop, one)
    check_over(loop, draft, one)
    assert 10 < sources(one).count(LOCAL_MODEL) <= 30


def test_a_token_that_it_does_not_know() -> None:
    """The draft's vocabulary is narrower; request options that name tokens outside it are harmless."""
    draft = Narrow(60)
    loop = loop_with(draft)
    few = Sampling(banned_tokens=frozenset(range(8, VOCABULARY)), logit_bias={11: -5.0, 2: 0.5})
    one, other = client(loop, 1, 4), client(loop, 1, 4, sampling=few)
    run(loop, one, other)
    check_over(loop, draft, one, other)
    assert max(one.tokens) >= Narrow.vocabulary
    assert LOCAL_MODEL in sources(other)
    assert local_model(loop).works


def test_memory_that_is_full_costs_no_token() -> None:
    draft = TextEngine(12, tree_slots=0)
    loop = loop_with(draft)
    clients = [client(loop, BLOCK, i) for i in range(6)]
    run(loop, *clients)
    check_over(loop, draft, *clients)
    assert LOCAL_MODEL in sources(*clients)


def test_one_that_fails_is_not_asked_again() -> None:
    """The verifier continues as without a local draft; sessions still end cleanly."""
    draft = TextEngine(60)
    loop = loop_with(draft)
    one = client(loop, max_tokens=100)
    gone = client(loop, 9, 1, 100)
    for _ in range(3):
        one.read()
        loop.turn()
    draft.failure = RuntimeError("out of memory")
    passes = len(draft.steps)
    gone.cancel()
    run(loop, one)
    check_over(loop, draft, one)
    assert len(draft.steps) == passes + 1
    assert NGRAM in sources(one)


def test_a_broken_draft_harms_nobody() -> None:
    """Token 7 gives NaN logits, which would spread to later readers of the memory: it is wiped once."""
    draft = Unsound(30)
    loop = loop_with(draft)
    sound = Sampling(banned_tokens=frozenset({7, BAD}))
    for seed in range(4):
        start = [token for token in text(3 * BLOCK, seed) if token != 7]
        broken = Client(loop, [*start, 7, 3], 200, sampling=NO_BAD, policy=GUESSING)
        whole = Client(loop, [*start, 2, 3], 60, sampling=sound, policy=GUESSING)
        run(loop, broken, whole)
        check_over(loop, draft, broken, whole)
        assert LOCAL_MODEL not in sources(broken)
        assert LOCAL_MODEL in sources(whole)
        assert not draft.broken.any()
    assert sum(draft.steps) < 4 * 2 * (3 * BLOCK + 60 * 3)


def test_who_loses_its_memory_to_another_comes_back() -> None:
    draft = TextEngine(60)
    loop = loop_with(draft, target=TextEngine(9))
    clients = [client(loop, BLOCK, i, 3 * BLOCK) for i in range(4)]
    while not all(each.over for each in clients):
        for each in clients:
            each.read()
        assert loop.turn() == 0.0 or all(each.over for each in clients)
        assert local_model(loop)._prefixes.keys() <= {entry.session for entry in loop._queue.running}
    check_over(loop, draft, *clients)
    assert loop.stats.preemptions > 0
    assert sources(*clients).count(LOCAL_MODEL) > 200


def test_those_who_leave_take_their_memory_with_them() -> None:
    draft = TextEngine(60)
    loop = loop_with(draft)
    clients = [client(loop, 10, i, 100) for i in range(4)]
    for _ in range(3):
        for each in clients:
            each.read()
        loop.turn()
    assert local_model(loop).pool.held > 0
    for each in clients:
        each.cancel()
    assert local_model(loop).pool.held == 0
    assert loop.turn() is None


def test_a_common_beginning_is_read_once() -> None:
    draft = TextEngine(60)
    loop = loop_with(draft)
    first = Client(loop, [*text(10 * BLOCK, 1), 2], 50, sampling=NO_BAD, policy=GUESSING)
    run(loop, first)
    before = sum(draft.steps)
    second = Client(loop, [*text(10 * BLOCK, 1), 3], 50, sampling=NO_BAD, policy=GUESSING)
    run(loop, second)
    check_over(loop, draft, first, second)
    assert before > 10 * BLOCK
    assert sum(draft.steps) - before < before - 9 * BLOCK


def test_draws_have_their_places_to_themselves() -> None:
    """Under REJECTION no n-grams take the places of draws, and a draft that samples like the target is always
    accepted."""
    draft = TextEngine(60)
    loop = loop_with(draft)
    clients = [client(loop, 8, i, 60, sampling=WARM, rule=Rule.REJECTION) for i in range(3)]
    run(loop, *clients)
    assert draft.faults == []
    came = sources(*clients)
    assert came.count(LOCAL_MODEL) > 100
    assert NGRAM not in came
    assert CORRECTION not in came


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION])
def test_who_asks_for_a_window_gets_that(rule: Rule) -> None:
    draft = TextEngine(60)
    loop = loop_with(draft)
    window = Policy(OWN_DRAFTERS, 8, 0.0, lookahead=Lookahead(5, 3, 5))
    one = client(loop, rule=rule, policy=window, max_tokens=200)
    run(loop, one)
    assert draft.steps == []
    assert {NGRAM, LOOKAHEAD} & set(sources(one))


def test_vocabularies_may_differ_by_padding() -> None:
    class Padded(TextEngine):
        def forward(self, batch: Any) -> Any:
            return np.pad(super().forward(batch), ((0, 0), (0, 4)), constant_values=50.0)

    draft = Padded(60)
    draft.vocabulary = VOCABULARY + 4
    loop = loop_with(draft)
    one = client(loop)
    run(loop, one)
    check_over(loop, draft, one)
    assert sources(one).count(LOCAL_MODEL) > 20
