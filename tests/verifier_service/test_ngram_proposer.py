"""A session's own proposers follow the papers and change no token."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import ALL_DRAFTERS, NO_DRAFTERS, OWN_DRAFTERS, CandidateSource
from specdec.decoding.tree import TokenTree
from specdec.engine.batch import PackedBatch
from specdec.engine.cpu.layout import RaggedBatch
from tests.choices import choose_token
from tests.verifier_service.fakes import (
    BAD,
    DEAR,
    LANGUAGE,
    Client,
    Decided,
    DeviceTextEngine,
    FixedLatency,
    TextEngine,
    run,
    step_loop,
)
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.backend.result import LOOKAHEAD, NGRAM, PLAIN, Mode
from verifier_service.sessions.ngram import Confidence, SessionNgrams
from verifier_service.sessions.session import VerifierSession
from verifier_service.settings.tuning import DEFAULTS

SOUND = frozenset({BAD})  # BAD alone has NaN logits
SAMPLINGS = [Sampling(banned_tokens=SOUND), Sampling(temperature=0.8, seed=3, banned_tokens=SOUND)]
REPETITIVE = [3, 4, 5, 6, 7] * 4


def guessing(lookahead: Lookahead | None = None, candidates: int = 192) -> Policy:
    return Policy(OWN_DRAFTERS, candidates, 0.0, lookahead=lookahead)


class Model:
    """The choice of the fakes' target after any text."""

    def __init__(self, client: Client) -> None:
        self._sampler = client.session.request.sampler

    def __call__(self, text: list[int]) -> int:
        return choose_token(self._sampler, LANGUAGE.logits(LANGUAGE.number_of(text)), len(text))


class LookaheadDecoding:
    """Fu et al. 2024, algorithm 2, following their code, one sequence and one token at a time; shares no code with the
    tested implementation. The text is an argument, since other candidates than this algorithm's may be verified too."""

    def __init__(self, model: Model, size: Lookahead, prompt: list[int]) -> None:
        self.model = model
        self.window, self.level, self.guesses = size.window, size.ngram, size.guesses
        tail = prompt[-(self.window + self.level - 3) :]
        count = self.window + self.level - 3
        self.past: list[list[int]] = [[tail[i % len(tail)] for i in range(count)]]
        self.pool: dict[int, list[tuple[int, ...]]] = defaultdict(list)

    def accepted(self, text: list[int]) -> int:
        """Return the number of tokens that this algorithm's own step would commit."""
        best = 1
        first = self.model(text)
        for guess in self.pool[text[-1]]:
            so_far, token = list(text), first
            for guessed in guess:
                if guessed != token:
                    break
                so_far.append(token)
                token = self.model(so_far)
            best = max(best, len(so_far) - len(text) + 1)
        return best

    def step(self, text: list[int]) -> None:
        past, model = self.past, self.model
        if self.level > 2 and len(past) == 1:
            first_level = [model(text + past[0][: i + 1]) for i in range(len(past[0]))]
            self.past = [past[0][1:], first_level]
        elif len(past) < self.level - 1:
            made = [
                model(text + past[0][:i] + [past[level][i] for level in range(1, len(past))])
                for i in range(len(past[-1]))
            ]
            self.past = [level[1:] for level in past] + [made[1:]]
        else:
            made = [
                model(text + past[0][:i] + [past[level][i] for level in range(1, len(past))])
                for i in range(self.window)
            ]
            for i in range(self.window):
                key = text[-1] if i == 0 else past[0][i - 1]
                self._insert(key, (*(past[level][i] for level in range(1, len(past))), made[i]))
            self.past = [past[1][1:], *past[2:], made]

    def _insert(self, key: int, ngram: tuple[int, ...]) -> None:
        known = self.pool[key]
        if ngram in known:
            known.remove(ngram)
        elif len(known) == self.guesses:
            known.pop(0)
        known.append(ngram)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm"])
@pytest.mark.parametrize("size", [(2, 3, 1), (3, 3, 2), (5, 4, 3), (4, 5, 4), (7, 6, 2)], ids=str)
def test_window_and_pool_are_the_papers_step_by_step(size: tuple[int, int, int], sampling: Sampling) -> None:
    lookahead = Lookahead(*size)
    engine = TextEngine(8)
    loop = step_loop(engine)
    client = Client(loop, [2, 3, 4, 5], 60, sampling=sampling, policy=guessing(lookahead))
    loop.turn()  # the prompt; no window yet
    paper = LookaheadDecoding(Model(client), lookahead, list(client.session.tree.committed))
    ngrams = client.session.ngrams
    steps = 0
    while client.session.tree.base + size[0] + size[1] - 3 <= client.session.end:
        steps += 1
        text = list(client.session.tree.committed)
        loop.turn()
        assert ngrams.window is not None
        assert client.session.tree.base - len(text) >= min(paper.accepted(text), client.session.end - len(text))
        paper.step(text)
        assert ngrams.window.levels == paper.past
        assert ngrams.pool is not None
        for key in range(12):
            assert ngrams.pool.after(key) == paper.pool[key][::-1]
    assert steps > 2 * lookahead.ngram
    assert any(paper.pool.values())
    run(loop, client)
    assert client.tokens == client.want
    assert engine.faults == []


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm"])
@pytest.mark.parametrize("width", [2, 5, 12])
def test_bigrams_are_jacobi_decoding(width: int, sampling: Sampling) -> None:
    """Santilli et al. 2023, algorithm 1, on a moving block: the whole block is recomputed until it is a fixed point."""
    engine = TextEngine(8)
    loop = step_loop(engine)
    client = Client(loop, [2, 3, 4, 5], 60, sampling=sampling, policy=guessing(Lookahead(width, 2, 1)))
    model = Model(client)
    loop.turn()  # the prompt; no window yet
    tail = list(client.session.tree.committed)[-(width - 1) :]
    block = [tail[i % len(tail)] for i in range(width - 1)]
    while client.session.tree.base + width - 1 <= client.session.end:
        text = list(client.session.tree.committed)
        loop.turn()
        window = client.session.ngrams.window
        assert window is not None
        again = [model(text + block[:i]) for i in range(width)]
        standing = next((i for i, (old, new) in enumerate(zip(block, again, strict=False)) if old != new), width - 1)
        committed = client.session.tree.base - len(text)
        assert committed >= standing + 1  # n-grams of the text may add more
        left = again[committed:]
        block = left + [again[-1]] * (width - 1 - len(left))
        assert window.levels == [block]
    run(loop, client)
    assert client.tokens == client.want
    assert engine.faults == []


ALONE = [
    (Policy(frozenset({CandidateSource.NGRAM}), 64, 0.0), {NGRAM}),
    (Policy(frozenset({CandidateSource.LOOKAHEAD}), 64, 0.0), {LOOKAHEAD}),
    (Policy(frozenset({CandidateSource.LOOKAHEAD}), 64, 0.0, jacobi=True), {LOOKAHEAD}),
    (Policy(frozenset({CandidateSource.LOOKAHEAD}), 64, 0.0, lookahead=Lookahead(8, 2, 1)), {LOOKAHEAD}),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm"])
@pytest.mark.parametrize(("policy", "proposers"), ALONE, ids=["n-grams", "lookahead", "jacobi", "jacobi of 8"])
def test_a_drafter_alone_proposes_alone(policy: Policy, proposers: set[int], sampling: Sampling) -> None:
    loop = step_loop(TextEngine(30), controller=Decided(Mode.NGRAM))
    client = Client(loop, REPETITIVE, 400, sampling=sampling, policy=policy, rejected_candidates=True)
    sizes = set()
    while not client.over:
        client.read()
        loop.turn()
        if (window := client.session.ngrams.window) is not None:
            sizes.add(window.jacobi)
    assert client.tokens == client.want
    proposed = {candidate.source for result in client.mail.results for candidate in result.rejected}
    assert proposed == proposers
    assert sizes == ({policy.jacobi or policy.lookahead is not None} if policy.windows else set())


def plainly(*prompts: list[int], sampling: Sampling) -> list[Client]:
    loop = step_loop(TextEngine(30))
    clients = [Client(loop, prompt, 60, sampling=sampling, policy=Policy(NO_DRAFTERS, 8, 0.0)) for prompt in prompts]
    run(loop, *clients)
    return clients


def sources(client: Client) -> list[int]:
    return [source for result in client.mail.results for source in result.sources]


def steps(client: Client) -> int:
    return sum(result.steps for result in client.mail.results)


class Parrot(TextEngine):
    """A target that ignores the text and repeats a cycle of seven tokens."""

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        logits = super().forward(batch)
        assert isinstance(batch, RaggedBatch)
        for index, row in enumerate(batch.wanted.tolist()):
            path = batch.keys[batch.first[row] : batch.first[row] + batch.positions[row] + 1]
            logits[index] = 0
            logits[index, 2 + len(path) % 7] = 9  # a period of seven, by position
        return logits


def test_a_text_that_repeats_itself_takes_few_steps() -> None:
    loop = step_loop(Parrot(8))
    client = Client(loop, [2 + (i + 1) % 7 for i in range(15)], 60, policy=guessing())
    for _ in range(60):
        loop.turn()
    assert client.mail.finish
    assert client.tokens == [2 + i % 7 for i in range(15, 75)]
    assert sources(client).count(NGRAM) > 50
    assert steps(client) < 60 / 10


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION])
def test_guesses_join_what_a_draft_offers_only_where_nothing_is_drawn(rule: Rule) -> None:
    """An n-gram in the place of a draw would displace the better candidate."""
    loop = step_loop(TextEngine(8))
    sampling = Sampling(temperature=1.0, seed=5)
    policy = Policy(ALL_DRAFTERS, 64, 0.0)
    drafted = Client(loop, REPETITIVE, 60, sampling=sampling, rule=rule, policy=policy)
    loop.turn()
    assert drafted.session.takes_own_candidates is (rule is Rule.COUPLED)
    drafted.session.policy = Policy(OWN_DRAFTERS, 64, 0.0)
    assert drafted.session.takes_own_candidates


def test_what_a_session_proposes_itself_is_not_counted_as_its_drafts() -> None:
    loop = step_loop(Parrot(8))
    policy = Policy(ALL_DRAFTERS, 64, 0.0)
    client = Client(loop, [2 + (i + 1) % 7 for i in range(15)], 60, policy=policy)
    for _ in range(60):
        loop.turn()
    assert NGRAM in sources(client)
    assert loop.stats.drafted_steps > 0
    assert loop.stats.draft_ready_steps == 0


def test_without_a_draft_guesses_are_put_to_the_test_of_rejection() -> None:
    loop = step_loop(TextEngine(8))
    sampling = Sampling(temperature=1.0, seed=5, banned_tokens=SOUND)
    client = Client(loop, REPETITIVE, 200, sampling=sampling, rule=Rule.REJECTION, policy=guessing(Lookahead(4, 3, 4)))
    while not client.over:
        client.read()
        loop.turn()
        for node in client.session.tree.root.walk():  # a node and its distribution arrive together
            assert node.parent is not None
            assert node.parent.distribution is not None
            assert list(node.parent.children) == [node.token]
    assert NGRAM in sources(client)


def test_a_window_that_looks_below_the_tip_does_not_decide_what_is_drawn_there() -> None:
    """With device sampling, a row takes one query. Here the tip's row is in a step with a window."""
    firsts: list[list[int]] = []
    for kind in (TextEngine, DeviceTextEngine):
        firsts.append([])
        for seed in range(10):
            loop, sampling = step_loop(kind(8)), Sampling(temperature=1.0, seed=seed, banned_tokens=SOUND)
            policy = guessing(Lookahead(3, 3, 2))
            client = Client(loop, REPETITIVE, 8, sampling=sampling, rule=Rule.REJECTION, policy=policy)
            while len(client.tokens) < 2:  # the prompt's last chunk has no window yet
                loop.turn()
            firsts[-1].append(client.tokens[1])
    assert firsts[0] == firsts[1]
    assert len(set(firsts[0])) > 1


def test_what_is_contrasted_is_not_guessed() -> None:
    sampler = RequestSampler(Sampling(), rule=Rule.CONTRASTIVE)
    request = VerifierSessionRequest(REPETITIVE, [], sampler, frozenset(), 60, None, 256)
    assert not VerifierSession(request, Policy(ALL_DRAFTERS, 64, 0.0), 64, 12).takes_own_candidates


def test_who_asks_for_no_guesses_gets_none() -> None:
    (client,) = plainly(REPETITIVE, sampling=Sampling())
    assert set(sources(client)) == {PLAIN}


def test_a_window_that_costs_more_than_it_brings_is_closed_and_tried_again() -> None:
    """Random text is unpredictable. A trial starts once its budget is saved; the next one comes after a pause."""
    loop = step_loop(TextEngine(40), FixedLatency(0.06), controller=Decided(Mode.NGRAM))
    client = Client(loop, [2, 3, 4], 2300, sampling=SAMPLINGS[1], policy=guessing())
    open_at = []
    while not client.over:
        client.read()
        loop.turn()
        open_at.append(client.session.ngrams.window is not None)
    first = open_at.index(True)
    assert first > 100
    closed = open_at.index(False, first)
    assert not any(open_at[closed : closed + DEFAULTS.windows.first_pause])
    assert any(open_at[closed + DEFAULTS.windows.first_pause :])
    assert sum(open_at) < len(open_at) / 10
    assert client.tokens == client.want


def test_a_session_forced_to_use_windows_alone_has_one_at_any_cost() -> None:
    loop = step_loop(TextEngine(8), DEAR)
    windows = frozenset({CandidateSource.LOOKAHEAD})
    client = Client(loop, REPETITIVE, 30, sampling=SAMPLINGS[0], policy=Policy(windows, 64, 0.0, forced=True))
    loop.turn()
    loop.turn()
    assert client.session.ngrams.size == DEFAULTS.windows.sizes[0]
    run(loop, client)
    assert client.tokens == client.want


def test_a_window_that_is_asked_for_is_opened_whatever_it_costs() -> None:
    loop = step_loop(TextEngine(8), DEAR)
    client = Client(loop, REPETITIVE, 30, policy=guessing(Lookahead(3, 3, 3)))
    loop.turn()
    loop.turn()
    assert client.session.ngrams.window is not None
    other = Client(loop, REPETITIVE, 30, policy=guessing())
    loop.turn()
    loop.turn()
    assert other.session.ngrams.window is None


def test_a_jacobi_window_offers_no_more_than_the_policy_allows() -> None:
    windows = frozenset({CandidateSource.LOOKAHEAD})
    policy = Policy(windows, 2, 0.0, forced=True, jacobi=True, lookahead=Lookahead(17, 2, 1), max_depth=1)
    loop = step_loop(TextEngine(30))
    client = Client(loop, REPETITIVE, 40, policy=policy, sampling=SAMPLINGS[0])
    run(loop, client)
    assert client.tokens == client.want
    assert max(result.offered / result.steps for result in client.mail.results) <= 1  # deeper candidates wait
    policy = replace(policy, max_depth=0)
    client = Client(loop, REPETITIVE, 40, policy=policy, sampling=SAMPLINGS[0])
    run(loop, client)
    assert client.tokens == client.want
    assert 1 < max(result.offered / result.steps for result in client.mail.results) <= 2


def test_windows_share_the_tree_slots_as_far_as_they_go() -> None:
    engine = TextEngine(30, tree_slots=40)
    loop = step_loop(engine)
    clients = [
        Client(loop, REPETITIVE, 40, policy=guessing(Lookahead(5, 4, 3), candidates=1), sampling=SAMPLINGS[0])
        for _ in range(5)
    ]
    run(loop, *clients)
    assert engine.faults == []
    for each in clients:
        assert each.tokens == each.want


@pytest.mark.parametrize("wanted", [None, Lookahead(3, 3, 3)])
def test_plain_decoding_looks_neither_back_nor_ahead_unless_a_window_is_wanted(wanted: Lookahead | None) -> None:
    engine = TextEngine(30)
    loop = step_loop(engine, controller=Decided(Mode.OFF))
    client = Client(loop, REPETITIVE, 30, policy=guessing(wanted), sampling=SAMPLINGS[0])
    run(loop, client)
    assert client.tokens == client.want
    assert (set(engine.steps[1:]) == {1}) is (wanted is None)
    assert (set(sources(client)) == {PLAIN}) is (wanted is None)


NEVER = -1e9


def test_who_finds_nothing_looks_less_often_and_at_once_again_when_it_does() -> None:
    tree = TokenTree([1, 2, 3, 1], vocabulary=12, last_position=500)
    ngrams = SessionNgrams(tree.committed, 500, RequestSampler(Sampling()))
    looks = []
    for _ in range(400):
        looks.append(ngrams.propose(tree, 0.0, None, every=False, sampled=False))
        ngrams.extend([5], [PLAIN])
        tree.commit([5])
    assert all(looks[: DEFAULTS.ngrams.fruitless_steps])
    assert sum(looks[-10 * (DEFAULTS.ngrams.max_skipped + 1) :]) == 10
    ngrams.extend([5], [NGRAM])
    tree.commit([5])
    assert ngrams.propose(tree, 0.0, None, every=False, sampled=False)


class TestConfidence:
    def test_the_longer_the_agreement_the_surer(self) -> None:
        logprobs = Confidence().logprobs(0, 40, NEVER)
        assert logprobs == sorted(logprobs)
        assert len(logprobs) == 40
        assert logprobs[0] < logprobs[5] < logprobs[15] < 0

    @pytest.mark.parametrize("least", [-0.1, -0.5, -2.0])
    def test_a_guess_ends_where_it_is_hardly_reached(self, least: float) -> None:
        all_of_it = Confidence().logprobs(3, 40, NEVER)
        logprobs = Confidence().logprobs(3, 40, least)
        assert logprobs == all_of_it[: len(logprobs)]
        assert sum(logprobs) >= least > sum(all_of_it[: len(logprobs) + 1])

    def test_it_learns_what_was_right(self) -> None:
        confidence = Confidence()
        for i in range(100):
            confidence.learn(3, right=i % 5 == 0)
            confidence.learn(30, right=True)
        assert math.exp(confidence.logprobs(3, 1, NEVER)[0]) == pytest.approx(0.2, abs=0.15)
        assert confidence.logprobs(99, 1, NEVER) == pytest.approx([0], abs=0.01)

    def test_nothing_is_impossible(self) -> None:
        confidence = Confidence()
        for _ in range(1000):
            confidence.learn(2, right=False)
        assert confidence.logprobs(2, 1, NEVER)[0] > math.log(0.005)


def test_what_is_right_is_told_apart_by_how_far_it_agrees() -> None:
    """A session's own verify results adjust the logprobs of its n-grams."""
    loop = step_loop(Parrot(8))
    client = Client(loop, [2 + (i + 1) % 7 for i in range(15)], 60, policy=guessing())
    before = SessionNgrams([2], 9, client.session.request.sampler).lookup_confidence
    for _ in range(60):
        loop.turn()
    assert client.session.ngrams.lookup_confidence.logprobs(12, 1, NEVER) > before.logprobs(12, 1, NEVER)
