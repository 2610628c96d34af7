"""What a draft's session does with commits, rules and policies. (That its guesses are right: the equality suites.)"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draft_service.session import PAUSED_LAG_TOKENS, ExpansionPolicy, Session, SessionRequest
from specdec.decoding.calibration import Calibration
from specdec.decoding.choice import RequestSampler
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.tree import TokenTree
from specdec.engine.cpu.layout import RaggedPacker

VOCABULARY = 16
CONTEXT = 20


def made(
    rule: Rule = Rule.COUPLED,
    temperature: float = 0.0,
    context: int = CONTEXT,
    calibration: Calibration | None = None,
    **policy: Any,
) -> Session:
    """A session with memory and a prompt of three tokens."""
    sampler = RequestSampler(Sampling(temperature=temperature), rule=rule)
    request = SessionRequest([1, 2, 3], [], sampler, frozenset(), context, context)
    session = Session(request, ExpansionPolicy(**policy), VOCABULARY, calibration or Calibration())
    session.allocate(np.arange(1, 1 + session.end + session.policy.max_nodes))
    return session


def step(session: Session, best: float = 5.0) -> None:
    """Read what there is to read; the model prefers the tokens in order, 7 most, of which it is as sure as said."""
    packer = RaggedPacker()
    if session.pending_text:
        session.plan_text(packer, 1000)
    else:
        session.plan_nodes(packer, 4)
    logits = np.linspace(0.0, -8.0, VOCABULARY, dtype=np.float32)
    logits[7] = best
    session.expand(np.tile(logits, (len(packer.wanted), 1)))


def test_a_paused_draft_expands_nothing() -> None:
    session = made()
    step(session)
    session.set_policy(replace(session.policy, paused=True))
    assert session.best_logprob() == -math.inf
    session.commit(3, [5, 6])
    assert session.best_logprob() == -math.inf
    session.set_policy(replace(session.policy, paused=False))
    step(session)
    assert not session.pending_text
    assert session.best_logprob() > -math.inf


def test_a_paused_draft_keeps_up_with_a_long_text() -> None:
    session = made(context=2 * PAUSED_LAG_TOKENS, paused=True)
    session.commit(3, [5] * (PAUSED_LAG_TOKENS - 3))
    assert session.best_logprob() == -math.inf
    session.commit(PAUSED_LAG_TOKENS, [5])
    assert session.best_logprob() > -math.inf
    step(session)
    assert session.best_logprob() == -math.inf


def test_a_sampled_tree_is_a_chain_and_every_draw_has_its_row() -> None:
    session = made(Rule.REJECTION, temperature=1.0)
    for _ in range(4):
        step(session)
    paths = session.take_unsent(0.0).paths
    assert list(paths.parents) == [0, 1, 2, 3]
    assert [parent for parent, _ in paths.distributions] == [0, 1, 2, 3]
    assert all(row.fits(Rule.REJECTION, VOCABULARY) for _, row in paths.distributions)


def test_a_draw_does_not_depend_on_how_often_the_draft_starts() -> None:
    first, second = made(Rule.REJECTION, temperature=1.0), made(Rule.REJECTION, temperature=1.0)
    for session in (first, second):
        step(session)
    assert first.take_unsent(0.0).paths.tokens == second.take_unsent(0.0).paths.tokens


@pytest.mark.parametrize(("rule", "temperature"), [(Rule.COUPLED, 0.0), (Rule.REJECTION, 1.0), (Rule.CONTRASTIVE, 0.0)])
def test_what_is_grown_ahead_of_need_is_sent_when_the_text_comes_near(rule: Rule, temperature: float) -> None:
    """Nodes and their distributions, all of it in the end and each once."""
    session = made(rule, temperature, min_path_probability=0.05)
    while session.best_logprob() > -math.inf:
        step(session, best=1.5)
    near = [
        node for path_logprob, node in session.tree.by_path_logprob() if path_logprob >= session.policy.min_sent_logprob
    ]
    first = session.take_unsent(0.0).paths
    assert len(near) <= len(first.tokens) < session.tree.size  # ancestors go along
    (child, *_) = session.tree.root.children.values()
    session.commit(3, [child.token])
    session.set_policy(replace(session.policy, min_path_probability=1e-9))
    rest = session.take_unsent(0.0).paths
    known = TokenTree(
        [1, 2, 3, child.token], vocabulary=VOCABULARY, last_position=CONTEXT, sampled=rule is Rule.REJECTION
    )
    known.insert(3, first)
    known.insert(4, rest)
    assert known.size == session.tree.size
    assert _described(known) == _described(session.tree)
    assert not session.has_unsent


class Untaught(Calibration):
    """Whom no commit makes believe otherwise."""

    def learn(self, depth: int, taken: int | None, logprobs: Iterable[float]) -> None:
        pass


def test_what_is_near_does_not_depend_on_when_its_parent_was_read() -> None:
    """Read far ahead of the text, a node keeps children that are worth nothing yet: it is not read again."""
    early, late = (made(context=60, calibration=Untaught(), min_path_probability=0.02) for _ in range(2))
    while early.best_logprob() > -math.inf:
        step(early, best=1.5)
    parents = [(path_logprob, node) for path_logprob, node in early.tree.by_path_logprob() if node.children]
    _, farthest = min(parents, key=lambda each: each[0])
    assert any(child.path_logprob() < early.policy.min_logprob for child in farthest.children.values())
    tokens = [node.token for node in farthest.path()]
    for session in (early, late):
        session.commit(3, tokens)
        while session.best_logprob() > -math.inf:
            step(session, best=1.5)
    near = [
        {
            tuple(n.token for n in node.path())
            for path_logprob, node in session.tree.by_path_logprob()
            if path_logprob >= math.log(0.02)
        }
        for session in (early, late)
    ]
    assert near[0] == near[1]
    assert len(near[0]) > 3


@pytest.mark.parametrize(("rule", "temperature"), [(Rule.COUPLED, 0.0), (Rule.REJECTION, 1.0), (Rule.CONTRASTIVE, 0.0)])
@pytest.mark.parametrize("most", [1, 4, 10])
def test_no_more_nodes_are_sent_or_read_than_were_granted(rule: Rule, temperature: float, most: int) -> None:
    """Nor does it run out of memory for its text."""
    session = made(rule, temperature, context=40, min_path_probability=0.01, max_nodes=most)
    verifier = TokenTree(
        session.tree.committed, vocabulary=VOCABULARY, last_position=39, sampled=rule is Rule.REJECTION
    )
    for tokens in ([7, 7, 5], [7], [3], [7, 7, 7, 7], [7, 6], [7, 7]):
        while session.best_logprob() > -math.inf:
            step(session, best=1.5)
        verifier.insert(session.tree.base, session.take_unsent(0.0).paths)
        assert 1 <= verifier.size <= most
        assert sum(node.state is not None for node in session.tree.root.walk()) <= most
        session.commit(session.tree.base, tokens)
        verifier.commit(tokens)
        session.set_policy(replace(session.policy, min_path_probability=0.3 - session.policy.min_path_probability))


def _described(tree: TokenTree) -> set[tuple[tuple[int, ...], bool]]:
    """Paths, and whether each has a distribution below it."""
    nodes = (tree.root, *tree.root.walk())
    return {(tuple(n.token for n in node.path()), node.distribution is not None) for node in nodes}


def test_the_likeliest_next_token_is_sent_however_unlikely() -> None:
    session = made(min_path_probability=0.3, max_branches=1)
    packer = RaggedPacker()
    session.plan_text(packer, 1000)
    session.expand(np.zeros((1, VOCABULARY), dtype=np.float32))
    (child,) = session.tree.root.children.values()
    assert child.path_logprob() < session.policy.min_logprob
    assert session.take_unsent(0.0).paths.tokens == [child.token]


def test_the_draw_of_the_next_token_is_sent_at_once_and_those_after_it_just_in_time() -> None:
    session = made(Rule.REJECTION, temperature=1.0, extend_interval=0.03)
    for number in range(20):
        session.committed_at(0.03 * number)
    step(session)
    assert session.send_at(0.001) == -np.inf
    session.take_unsent(0.571)
    step(session)
    assert 0.58 < session.send_at(0.001) < 0.60


def test_where_tokens_are_contrasted_the_root_always_has_a_row() -> None:
    session = made(Rule.CONTRASTIVE, max_nodes=2)
    step(session)
    step(session)
    assert session.tree.size == 2
    session.commit(3, [9])
    assert session.tree.root.distribution is None
    assert session.best_logprob() > -math.inf
    step(session)
    assert session.tree.root.distribution is not None
    assert session.send_at(0.0) < 0.0
    assert session.take_unsent(0.0).paths.distributions[0][0] == 0


def test_a_text_beyond_the_drafts_context() -> None:
    """Costs speed; but where no token can be chosen without a draft, it has to say so."""
    made().commit(3, [5] * CONTEXT)
    with pytest.raises(ValueError, match=f"the draft's context is {CONTEXT}"):
        made(Rule.CONTRASTIVE).commit(3, [5] * CONTEXT)


@pytest.mark.parametrize(
    ("base", "tokens", "what"), [(4, [1], "has 3 tokens"), (1, [9], "contradicts"), (3, [VOCABULARY], "vocabulary")]
)
def test_a_commit_that_cannot_be(base: int, tokens: list[int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        made().commit(base, tokens)
