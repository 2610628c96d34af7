"""How a draft's session handles commits, rules and policies. (The equality suites show that its candidates are
correct.)"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draft_service import candidate_queue
from draft_service.language_model import PAUSED_LAG_TOKENS, LanguageModelDrafter
from draft_service.request import DrafterSessionRequest, ExpansionPolicy
from draft_service.session import DrafterSession
from specdec.decoding.calibration import DEPTHS, RANKS, Calibration, corrected
from specdec.decoding.contrastive import DraftQuery
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.tree import Paths, TokenTree
from specdec.engine.batch import PackedBatch
from specdec.serving.errors import InvalidRequestError
from tests.cpu_time import taking_less_than
from tests.draft_service.fakes import VOCABULARY, Engine

CONTEXT = 20


class Draft:
    """A session with a prompt of three tokens, and its draft model, stepped by hand."""

    def __init__(
        self,
        rule: Rule = Rule.COUPLED,
        temperature: float = 0.0,
        context: int = CONTEXT,
        calibration: Calibration | None = None,
        engine: Engine | None = None,
        **policy: Any,
    ) -> None:
        sampler = RequestSampler(Sampling(temperature=temperature), rule=rule)
        request = DrafterSessionRequest([1, 2, 3], [], sampler, frozenset(), context, context)
        self.session = DrafterSession(request, ExpansionPolicy(**policy), VOCABULARY, calibration or Calibration())
        self._engine = engine or Engine()
        self._model = LanguageModelDrafter(self._engine)
        self._model.open(self.session)

    @property
    def tree(self) -> TokenTree:
        return self.session.tree

    @property
    def wants_step(self) -> bool:
        return self._model.best_logprob(self.session) > -math.inf

    @property
    def computed_nodes(self) -> int:
        """Return the number of nodes with a KV slot."""
        return len(self._model._sessions[self.session].slots.nodes)

    def step(self, best: float = 5.0) -> None:
        """Compute all pending rows; the model prefers token 7, with logit `best`."""
        self._engine.sureness = best
        assert not self._model.expand([self.session])

    def commit(self, base: int, tokens: list[int]) -> None:
        self._model.commit(self.session, self.session.commit(base, tokens))

    def set_policy(self, **fields: Any) -> None:
        self.session.set_policy(replace(self.session.policy, **fields))

    def sent(self, now: float = 0.0) -> Paths:
        """Return everything unsent."""
        return self.session.outgoing.pop_extension(now).paths


def test_a_paused_draft_expands_nothing() -> None:
    draft = Draft()
    draft.step()
    draft.set_policy(paused=True)
    assert not draft.wants_step
    draft.commit(3, [5, 6])
    assert not draft.wants_step
    draft.set_policy(paused=False)
    draft.step()
    assert draft.tree.size
    assert draft.wants_step


def test_a_paused_draft_keeps_up_with_a_long_text() -> None:
    draft = Draft(context=2 * PAUSED_LAG_TOKENS, paused=True)
    draft.commit(3, [5] * (PAUSED_LAG_TOKENS - 3))
    assert not draft.wants_step
    draft.commit(PAUSED_LAG_TOKENS, [5])
    assert draft.wants_step
    draft.step()
    assert not draft.wants_step
    assert not draft.tree.size


def test_with_one_branch_a_sampled_tree_is_a_chain_and_every_draw_has_its_row() -> None:
    draft = Draft(Rule.REJECTION, temperature=1.0, max_branches=1)
    for _ in range(4):
        draft.step()
    paths = draft.sent()
    assert list(paths.parents) == [0, 1, 2, 3]
    assert [parent for parent, _ in paths.distributions] == [0, 1, 2, 3]
    assert all(row.fits(Rule.REJECTION, VOCABULARY) for _, row in paths.distributions)


def test_draws_of_one_place_are_sent_together_in_their_order() -> None:
    """Whether a draw is sent must not depend on the draw. The verifier tests siblings in the order of its tree."""
    draft = Draft(Rule.REJECTION, temperature=1.0, max_branches=3, min_path_probability=0.02)
    known = TokenTree([1, 2, 3], vocabulary=VOCABULARY, last_position=CONTEXT, sampled=True)
    while draft.wants_step:
        draft.step(best=1.5)
        known.insert(3, draft.sent())
        drawn = _children(draft.tree)
        assert all(children in ([], drawn[path]) for path, children in _children(known).items())
    assert len(known.root.children) == 3


def test_a_high_minimum_probability_leaves_more_than_the_next_token() -> None:
    draft = Draft(min_path_probability=0.4)
    for _ in range(4):
        draft.step()
    assert len(draft.sent().tokens) == 4


@pytest.mark.parametrize("least", [0.002, 0.1])
def test_sent_nodes_are_thrice_as_probable_as_expanded_ones(least: float) -> None:
    policy = ExpansionPolicy(min_path_probability=least)
    assert policy.min_sent_logprob == pytest.approx(math.log(3 * least))


def test_releasing_many_draws_takes_linear_time() -> None:
    nodes = 4000
    tree = TokenTree([1], vocabulary=VOCABULARY, last_position=nodes + 1, sampled=True)
    sampler = RequestSampler(Sampling(temperature=1.0), rule=Rule.REJECTION)
    queue = candidate_queue.CandidateQueue(tree, sampler, ExpansionPolicy(max_nodes=2 * nodes, paused=True))
    node = tree.root
    for depth in range(1, nodes + 1):
        drawn = [tree.add(node, token, -0.0001) for token in (7, 8)]
        assert drawn[0] is not None
        node = drawn[0]
        queue.add(-0.0001 * depth, node)
    assert queue.offered == 2  # the next token, and its sibling
    with taking_less_than(0.3):
        queue.set_policy(ExpansionPolicy(max_nodes=2 * nodes))
    assert queue.offered == 2 * nodes


def _children(tree: TokenTree) -> dict[tuple[int, ...], list[int]]:
    """Return the children of every node, by its path."""
    nodes = (tree.root, *tree.root.walk())
    return {tuple(step.token for step in node.path()): list(node.children) for node in nodes}


def test_fixed_widths_hold_for_draws() -> None:
    draft = Draft(Rule.REJECTION, temperature=1.0, expansion=(3, 1, 2))
    while draft.wants_step:
        draft.step()
    widths = {len(node.path()): len(node.children) for node in (draft.tree.root, *draft.tree.root.walk())}
    assert widths == {0: 3, 1: 1, 2: 2, 3: 0}


def test_a_calibration_learns_the_rank_of_the_draw_that_was_taken() -> None:
    calibration = Calibration()
    draft = Draft(Rule.REJECTION, temperature=1.0, max_branches=3, calibration=calibration)
    draft.step(best=1.5)
    before = list(calibration.shifts(0))
    second = list(draft.tree.root.children)[1]
    draft.commit(3, [second])
    after = calibration.shifts(0)
    assert after[0] < before[0]
    assert after[1] > before[1]


def test_a_draw_does_not_depend_on_how_often_the_draft_starts() -> None:
    first, second = Draft(Rule.REJECTION, temperature=1.0), Draft(Rule.REJECTION, temperature=1.0)
    for draft in (first, second):
        draft.step()
    assert first.sent().tokens == second.sent().tokens


@pytest.mark.parametrize(("rule", "temperature"), [(Rule.COUPLED, 0.0), (Rule.REJECTION, 1.0), (Rule.CONTRASTIVE, 0.0)])
def test_what_is_grown_ahead_of_need_is_sent_when_the_text_comes_near(rule: Rule, temperature: float) -> None:
    """In the end, all nodes and their distributions are sent, each once."""
    draft = Draft(rule, temperature, min_path_probability=0.05)
    while draft.wants_step:
        draft.step(best=1.5)
    near = [
        node
        for path_logprob, node in draft.tree.by_path_logprob()
        if path_logprob >= draft.session.policy.min_sent_logprob
    ]
    first = draft.sent()
    assert len(near) <= len(first.tokens) < draft.tree.size  # including ancestors
    (child, *_) = draft.tree.root.children.values()
    draft.commit(3, [child.token])
    draft.set_policy(min_path_probability=1e-9)
    rest = draft.sent()
    known = TokenTree(
        [1, 2, 3, child.token], vocabulary=VOCABULARY, last_position=CONTEXT, sampled=rule is Rule.REJECTION
    )
    known.insert(3, first)
    known.insert(4, rest)
    assert known.size == draft.tree.size
    assert _described(known) == _described(draft.tree)
    assert not draft.session.outgoing.has_unsent


class Untaught(Calibration):
    """A calibration that does not learn."""

    def learn(self, depth: int, taken: int | None, logprobs: Iterable[float]) -> None:
        pass


class Told(Calibration):
    """Corrects differently at each depth, and checks that learning gets the same depth's logprobs."""

    def __init__(self, best: float) -> None:
        super().__init__()
        self._shifts = [[0.3 * depth] * RANKS for depth in range(DEPTHS)]
        self.learned: list[int] = []  # depths at which it learned
        untaught = Draft(calibration=Untaught())
        untaught.step(best)
        self._first = np.array([[node.logprob for node in untaught.tree.root.children.values()]])

    def learn(self, depth: int, taken: int | None, logprobs: Iterable[float]) -> None:
        siblings = list(logprobs)
        (said,) = corrected([self.shifts(depth)], self._first).tolist()
        assert siblings == pytest.approx(said[: len(siblings)], rel=1e-9)
        self.learned.append(depth)


@given(st.lists(st.integers(1, 6) | st.lists(st.sampled_from([7, 0, 5]), min_size=1, max_size=3), max_size=12))
def test_a_calibration_learns_at_the_depth_at_which_it_was_asked(turns: list[int | list[int]]) -> None:
    """However far that was ahead of the text."""
    calibration = Told(best=1.5)
    draft = Draft(context=60, calibration=calibration, min_path_probability=0.01)
    for turn in turns:
        if isinstance(turn, list):
            draft.commit(draft.tree.base, turn)
        else:
            for _ in range(turn):
                if draft.wants_step:
                    draft.step(best=1.5)


def test_what_was_made_ahead_is_learned_as_such() -> None:
    calibration = Told(best=5.0)
    draft = Draft(calibration=calibration)
    for _ in range(4):
        draft.step()
    for base in range(3, 6):
        draft.commit(base, [7])
    assert calibration.learned == [0, 1, 2]


def test_what_is_near_does_not_depend_on_when_its_parent_was_read() -> None:
    """A node computed far ahead keeps children below the limit, since it is not computed again."""
    early, late = (Draft(context=60, calibration=Untaught(), min_path_probability=0.02) for _ in range(2))
    while early.wants_step:
        early.step(best=1.5)
    parents = [(path_logprob, node) for path_logprob, node in early.tree.by_path_logprob() if node.children]
    _, farthest = min(parents, key=lambda each: each[0])
    assert any(child.path_logprob() < early.session.policy.min_logprob for child in farthest.children.values())
    tokens = [node.token for node in farthest.path()]
    for draft in (early, late):
        draft.commit(3, tokens)
        while draft.wants_step:
            draft.step(best=1.5)
    near = [
        {
            tuple(n.token for n in node.path())
            for path_logprob, node in draft.tree.by_path_logprob()
            if path_logprob >= math.log(0.02)
        }
        for draft in (early, late)
    ]
    assert near[0] == near[1]
    assert len(near[0]) > 3


@pytest.mark.parametrize(("rule", "temperature"), [(Rule.COUPLED, 0.0), (Rule.REJECTION, 1.0), (Rule.CONTRASTIVE, 0.0)])
@pytest.mark.parametrize("most", [1, 4, 10])
def test_no_more_nodes_are_sent_or_read_than_were_granted(rule: Rule, temperature: float, most: int) -> None:
    """The limit holds at the draft and at the verifier, and memory suffices for the text."""
    draft = Draft(rule, temperature, context=40, min_path_probability=0.01, max_nodes=most)
    verifier = TokenTree(draft.tree.committed, vocabulary=VOCABULARY, last_position=39, sampled=rule is Rule.REJECTION)
    for tokens in ([7, 7, 5], [7], [3], [7, 7, 7, 7], [7, 6], [7, 7]):
        while draft.wants_step:
            draft.step(best=1.5)
        verifier.insert(draft.tree.base, draft.sent())
        assert 1 <= verifier.size <= most
        assert draft.computed_nodes <= most
        draft.commit(draft.tree.base, tokens)
        verifier.commit(tokens)
        draft.set_policy(min_path_probability=0.3 - draft.session.policy.min_path_probability)


def _described(tree: TokenTree) -> set[tuple[tuple[int, ...], bool]]:
    """Return all paths, each with whether its last node has a distribution."""
    nodes = (tree.root, *tree.root.walk())
    return {(tuple(n.token for n in node.path()), node.distribution is not None) for node in nodes}


class Undecided(Engine):
    """An engine with uniform logits."""

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        return np.zeros((len(batch.wanted), VOCABULARY), dtype=np.float32)


def test_the_likeliest_next_token_is_sent_however_unlikely() -> None:
    draft = Draft(min_path_probability=0.3, max_branches=1, engine=Undecided())
    draft.step()
    (child,) = draft.tree.root.children.values()
    assert child.path_logprob() < draft.session.policy.min_logprob
    assert draft.sent().tokens == [child.token]


def test_a_root_expanded_again_has_its_children_in_their_new_order() -> None:
    """Heads expand a root again when a newer row has arrived: calibration learns by rank, and the likeliest next token
    is always sent."""
    draft = Draft(calibration=Untaught(), min_path_probability=0.1)
    session, tree = draft.session, draft.tree
    assert session.take_root()
    session.add_calibrated(tree.root, [4, 5, 6], [-0.5, -1.0, -4.0])
    below = session.take_best()
    session.add_calibrated(below, [8], [-0.1])
    assert draft.sent().tokens == [4, 5, 8]
    assert session.take_root()
    session.add_calibrated(tree.root, [7, 5], [-2.0, -2.5])
    assert [(child.token, child.logprob) for child in tree.root.children.values()] == [
        (7, -2.0),
        (5, -2.5),
        (4, -2.5),
        (6, -4.0),
    ]
    assert draft.sent().tokens == [7]  # although it is improbable
    assert session.take_root()
    session.add_calibrated(tree.root, [9], [-4.0])
    assert draft.sent().tokens == [9]  # although 6 was held back before it, and is as probable now
    draft.commit(3, [4])  # brings back what was improbable below 4
    assert session.take_best() is tree.root.children[8]


def test_the_draw_of_the_next_token_is_sent_at_once_and_those_after_it_just_in_time() -> None:
    draft = Draft(Rule.REJECTION, temperature=1.0, extend_interval=0.03)
    for number in range(20):
        draft.session.outgoing.commit_arrived(0.03 * number)
    draft.step()
    assert draft.session.outgoing.send_at(0.571, 0.001) == -np.inf
    draft.sent(0.571)
    draft.step()
    assert 0.58 < draft.session.outgoing.send_at(0.572, 0.001) < 0.60


def test_where_tokens_are_contrasted_the_root_always_has_a_row() -> None:
    draft = Draft(Rule.CONTRASTIVE, max_nodes=2)
    draft.step()
    draft.step()
    assert draft.tree.size == 2
    draft.commit(3, [9])
    assert draft.tree.root.distribution is None
    assert draft.wants_step
    draft.step()
    assert draft.tree.root.distribution is not None
    assert draft.session.outgoing.send_at(1.0, 0.0) < 0.0
    assert draft.sent().distributions[0][0] == 0


def test_a_text_beyond_the_drafts_context() -> None:
    """A draft falls behind silently, except under a rule that requires a draft: then it refuses the text. That is a
    property of the text, not a fault of the pod."""
    Draft().commit(3, [5] * CONTEXT)
    with pytest.raises(InvalidRequestError, match=f"the draft's context is {CONTEXT}"):
        Draft(Rule.CONTRASTIVE).commit(3, [5] * (CONTEXT - 3))


@pytest.mark.parametrize(("base", "tokens", "what"), [(4, [1], "has 3 tokens"), (1, [9], "contradicts")])
def test_a_commit_that_cannot_be(base: int, tokens: list[int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Draft().commit(base, tokens)


@pytest.mark.parametrize(("rule", "temperature"), [(Rule.CONTRASTIVE, 0.0), (Rule.REJECTION, 1.0)])
def test_a_message_holds_no_more_distributions_than_fit(
    rule: Rule, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a verifier's death all are resent, split over several messages without repetition."""
    draft = Draft(rule, temperature, min_path_probability=1e-9)
    while draft.wants_step:
        draft.step()
    everything = draft.sent()
    rows = [row for _, row in everything.distributions]
    most = 2 * max(_bytes(row) for row in rows)
    monkeypatch.setattr(candidate_queue, "MAX_DISTRIBUTION_BYTES", most)
    known = TokenTree([1, 2, 3], vocabulary=VOCABULARY, last_position=CONTEXT, sampled=rule is Rule.REJECTION)
    draft.session.outgoing.resend()
    messages = 0
    while draft.session.outgoing.has_unsent:
        paths = draft.sent()
        assert sum(_bytes(row) for _, row in paths.distributions) <= most
        known.insert(3, paths)
        messages += 1
    assert messages >= len(rows) / 2 > 1
    assert _described(known) == _described(draft.tree)


def _bytes(row: DraftDistribution) -> int:
    return row.nbytes


def contrasted(**policy: Any) -> Draft:
    """Return a draft that sends the likeliest tokens only, of the 16 in its vocabulary."""
    return Draft(Rule.CONTRASTIVE, partial_distributions=True, **policy)


def sent(draft: Draft) -> DraftDistribution:
    """Return the sent part of the root's row."""
    ((parent, row),) = [each for each in draft.sent().distributions if each[0] == 0]
    assert parent == 0
    return row


def test_the_likeliest_tokens_are_sent_and_the_others_on_request() -> None:
    draft = contrasted()
    draft.step(best=5.0)
    row = sent(draft)
    assert row.ids is not None
    assert 7 in row.ids
    assert len(row.ids) < VOCABULARY / 2
    assert (row.vocabulary, row.answer) == (VOCABULARY, False)
    assert not draft.session.outgoing.has_unsent
    ids = np.array([7, 14, 15])
    draft.session.ask(DraftQuery(3, ids))
    assert draft.session.outgoing.send_at(0.0, 0.0) < 0.0
    answered = sent(draft)
    whole = draft.tree.root.distribution
    assert whole is not None
    assert answered.ids is not None
    assert answered.ids.tolist() == ids.tolist()
    assert answered.answer
    assert answered.values.tolist() == whole.values[ids].tolist()
    draft.session.ask(DraftQuery(3, None))
    assert sent(draft).values.tolist() == whole.values.tolist()


def test_a_query_that_comes_before_the_row_waits_for_it() -> None:
    """For example, after the death of another draft that was asked first."""
    draft = contrasted()
    draft.session.ask(DraftQuery(3, np.array([2, 4])))
    assert not draft.session.outgoing.has_unsent
    draft.step()
    row = sent(draft)
    assert row.ids is not None
    assert row.ids.tolist() == [2, 4]


def test_a_query_about_an_earlier_text_is_skipped() -> None:
    draft = contrasted()
    draft.step()
    draft.commit(3, [9])
    draft.session.ask(DraftQuery(3, np.array([2, 4])))
    draft.step()
    assert not sent(draft).answer


def test_another_verifier_does_not_get_answers_to_the_last_one() -> None:
    draft = contrasted()
    draft.step()
    draft.session.ask(DraftQuery(3, np.array([2, 4])))
    draft.session.outgoing.resend()
    assert not sent(draft).answer
    draft.set_policy(partial_distributions=False)  # a verifier of the previous version
    draft.session.outgoing.resend()
    assert sent(draft).ids is None


def test_a_query_makes_later_rows_longer() -> None:
    before, after = contrasted(), contrasted()
    for draft in (before, after):
        draft.step()
    after.session.ask(DraftQuery(3, np.array([2, 4])))
    for draft in (before, after):
        draft.sent()
        draft.commit(3, [9])
        draft.step()
    shorter, longer = sent(before), sent(after)
    assert shorter.ids is not None
    assert longer.ids is not None
    assert set(longer.ids) > set(shorter.ids)


@pytest.mark.parametrize(
    ("rule", "base", "why"),
    [
        (Rule.COUPLED, 3, "query: the rule is COUPLED, must be CONTRASTIVE"),
        (Rule.CONTRASTIVE, 4, "query.base: is 4, the committed text has 3 tokens"),
    ],
)
def test_a_query_that_cannot_be(rule: Rule, base: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Draft(rule).session.ask(DraftQuery(base, None))


def sent_for_nothing(tokens: int) -> tuple[int, int]:
    """Return the bytes of distributions that a draft sends for a text it never guesses, and an upper limit on those
    that a verifier waits for: of the root and of its first child."""
    draft, sent, needed = contrasted(max_nodes=50, context=200), 0, 0
    for base in range(3, 3 + tokens):
        for _ in range(4):
            if draft.wants_step:
                draft.step(best=1.5)
        sizes = [_bytes(row) for _, row in draft.sent().distributions]
        sent, needed = sent + sum(sizes), needed + 2 * max(sizes)
        draft.commit(base, [11])  # never a candidate
    return sent, needed


def test_a_draft_that_is_always_wrong_sends_little(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited, _ = sent_for_nothing(60)
    monkeypatch.setattr(candidate_queue, "BYTES_A_TOKEN", 50)
    monkeypatch.setattr(candidate_queue, "MAX_SAVED_BYTES", 100)
    monkeypatch.setattr(candidate_queue, "MAX_OWED_BYTES", 10_000)
    sent, needed = sent_for_nothing(60)
    assert sent <= 100 + 50 * 60 + needed
    assert sent < 0.7 * unlimited
