"""One step of a session with made-up logits: the tokens, their sources, and the slots they are copied to. Also the
session's memory: allocated, shared, freed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.contrastive import DraftQuery
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import NO_DRAFTERS, CandidateSource
from specdec.decoding.step_logits import HostLogits
from specdec.decoding.tree import Node, Paths
from specdec.engine.cpu.layout import RaggedPacker
from specdec.engine.kv.blocks import BLOCK, BlockPool
from specdec.engine.kv.slots import PoolFullError
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.backend.result import (
    BONUS,
    CONTEXT,
    CORRECTION,
    LENGTH,
    NGRAM,
    PLAIN,
    REMOTE_DRAFT,
    STOP,
    VerifyResult,
)
from verifier_service.sessions.session import VerifierSession
from verifier_service.sessions.step_rows import ScheduledRows
from verifier_service.verification.tree_verification import TreeVerification, verify_trees

REMOTE = frozenset({CandidateSource.REMOTE})

VOCABULARY = 10
PROMPT = [1, 2, 3]
TREE_SLOTS = [50, 51, 52, 53]

StepLogits = np.ndarray[tuple[int, int], np.dtype[np.float32]]


def made(
    prompt: list[int] = PROMPT,
    *,
    generated: tuple[int, ...] = (),
    max_tokens: int = 20,
    context: int = 256,
    end: frozenset[int] = frozenset({9}),
    sampling: Sampling | None = None,
    tenant: str = "",
    speculate: bool = True,
    max_candidates: int = 8,
    rule: Rule = Rule.COUPLED,
) -> VerifierSession:
    """Return a session without memory."""
    sampler = RequestSampler(sampling or Sampling(), end, rule=rule)
    request = VerifierSessionRequest(prompt, list(generated), sampler, end, max_tokens, None, context, tenant)
    return VerifierSession(request, Policy(REMOTE if speculate else NO_DRAFTERS, max_candidates, 0.0), 64, VOCABULARY)


def decoding(pool: BlockPool | None = None, **fields: Any) -> VerifierSession:
    """Return a session with memory, and all tokens except the tip computed."""
    session = made(**fields)
    session.allocate(pool or BlockPool(4))
    session.computed = session.tree.base - 1
    return session


class Script:
    """A target with a scripted token after each text."""

    def __init__(self, choices: dict[tuple[int, ...], int], default: int = 0) -> None:
        self.choices = choices
        self.default = default

    def logits(self, packer: RaggedPacker, *sessions: VerifierSession) -> StepLogits:
        """Return logits for each wanted row, from the text that the tokens in its path's slots spell."""
        batch = packer.pack()
        token_at: dict[int, int] = {}
        for session in sessions:
            done = session.computed
            token_at |= zip(session.slots[:done].tolist(), session.tree.committed[:done], strict=True)
        token_at |= zip(batch.slots.tolist(), batch.tokens.tolist(), strict=True)
        result = np.zeros((len(batch.wanted), VOCABULARY), dtype=np.float32)
        for i, row in enumerate(batch.wanted):
            path = batch.keys[batch.first[row] :][: batch.positions[row] + 1]
            text = tuple(token_at[slot] for slot in path.tolist())
            result[i, self.choices.get(text, self.default)] = 1.0
        return result


def planned(session: VerifierSession, packer: RaggedPacker, tree_slots: list[int] | None = None) -> ScheduledRows:
    """Plan a step with the session's best candidates, up to its limit."""
    nodes = session.candidates().nodes
    return session.plan(packer, 1, nodes, list(TREE_SLOTS) if tree_slots is None else tree_slots)


def step(
    session: VerifierSession, script: Script, tree_slots: list[int] | None = None
) -> tuple[VerifyResult, TreeVerification]:
    packer = RaggedPacker()
    verification = TreeVerification(session, planned(session, packer, tree_slots))
    verify_trees([verification], HostLogits(script.logits(packer, session)))
    assert verification.error is None
    return verification.commit_result(0.0), verification


class TestStep:
    def test_a_plain_step_takes_the_targets_choice(self) -> None:
        session = decoding()
        result, verification = step(session, Script({(1, 2, 3): 7}))
        assert (result.base, result.tokens, result.sources) == (3, [7], [PLAIN])
        assert (result.offered, result.accepted, verification.kv_copies) == (0, 0, [])
        assert session.computed == 3
        assert session.tree.committed == [1, 2, 3, 7]

    def test_the_verification_follows_equal_tokens_and_ends_in_a_bonus(self) -> None:
        session = decoding()
        session.extend(3, Paths([4, 5], [0, 1], [-0.1, -0.1]), 0.0)
        result, verification = step(session, Script({(1, 2, 3): 4, (1, 2, 3, 4): 5, (1, 2, 3, 4, 5): 6}))
        assert result.tokens == [4, 5, 6]
        assert result.sources == [REMOTE_DRAFT, REMOTE_DRAFT, BONUS]
        assert (result.offered, result.accepted, verification.kv_copies) == (2, 2, [])
        assert verification.rows == [0, 1, 2]
        assert session.computed == 5

    def test_a_wrong_candidate_is_corrected_and_dropped(self) -> None:
        session = decoding()
        session.extend(3, Paths([4, 5], [0, 1], [-0.1, -0.1]), 0.0)
        result, verification = step(session, Script({(1, 2, 3): 4, (1, 2, 3, 4): 8}))
        assert result.tokens == [4, 8]
        assert result.sources == [REMOTE_DRAFT, CORRECTION]
        assert verification.rows == [0, 1]
        assert session.tree.size == 0
        assert session.computed == 4

    def test_a_side_branch_that_wins_is_copied_to_its_place(self) -> None:
        session = decoding()
        session.extend(3, Paths([4, 5, 6, 7], [0, 0, 2, 3], [-0.1, -0.5, -0.1, -0.1]), 0.0)
        tree_slots = list(TREE_SLOTS)
        result, verification = step(session, Script({(1, 2, 3): 5, (1, 2, 3, 5): 6, (1, 2, 3, 5, 6): 7}), tree_slots)
        assert result.tokens[:3] == [5, 6, 7]
        assert result.sources[:3] == [REMOTE_DRAFT] * 3
        own = session.slots.tolist()
        assert verification.kv_copies == [(53, own[3]), (52, own[4]), (51, own[5])]
        assert tree_slots == [50]

    def test_what_arrives_during_the_step_waits_for_the_next(self) -> None:
        session = decoding()
        packer = RaggedPacker()
        plan = planned(session, packer)
        session.extend(3, Paths([4, 5], [0, 1], [-0.1, -0.1]), 0.0)
        verification = TreeVerification(session, plan)
        verify_trees([verification], HostLogits(Script({(1, 2, 3): 4}).logits(packer, session)))
        result = verification.commit_result(0.0)
        assert (result.tokens, result.sources) == ([4], [PLAIN])
        assert [node.token for node in session.tree.best(9)] == [5]

    def test_a_better_sibling_that_was_not_in_the_step_is_none_of_its_corrections(self) -> None:
        """The chosen candidate came too late for the step, in which its parent had no children."""
        session = decoding()
        session.extend(3, Paths([4], [0], [-0.1]), 0.0)
        packer = RaggedPacker()
        plan = planned(session, packer)
        session.extend(3, Paths([4, 5], [0, 1], [-0.1, -0.1]), 0.0)
        verification = TreeVerification(session, plan)
        verify_trees([verification], HostLogits(Script({(1, 2, 3): 4, (1, 2, 3, 4): 5}).logits(packer, session)))
        assert verification.commit_result(0.0).sources == [REMOTE_DRAFT, BONUS]

    @pytest.mark.parametrize(
        ("fields", "choices", "tokens", "finish"),
        [
            ({}, {(1, 2, 3): 4, (1, 2, 3, 4): 9}, [4, 9], STOP),
            ({"max_tokens": 2}, {(1, 2, 3): 4, (1, 2, 3, 4): 5}, [4, 5], LENGTH),
            ({"context": 5}, {(1, 2, 3): 4, (1, 2, 3, 4): 5}, [4, 5], CONTEXT),
        ],
    )
    def test_it_ends_inside_an_accepted_block(
        self, fields: dict[str, Any], choices: dict[tuple[int, ...], int], tokens: list[int], finish: int
    ) -> None:
        session = decoding(**fields)
        session.extend(3, Paths([4, tokens[-1], 6, 7], [0, 1, 2, 3], [-0.1] * 4), 0.0)
        result, _ = step(session, Script(choices, default=6))
        assert result.tokens == tokens
        assert result.finish == finish

    def test_resumed_tokens_count_as_generated(self) -> None:
        session = decoding(generated=(4, 5), max_tokens=3)
        result, _ = step(session, Script({(1, 2, 3, 4, 5): 6}))
        assert (result.base, result.tokens, result.finish) == (5, [6], LENGTH)

    def test_logits_that_are_not_numbers_are_an_error(self) -> None:
        session = decoding()
        packer = RaggedPacker()
        verification = TreeVerification(session, planned(session, packer))
        verify_trees([verification], HostLogits(np.full((1, VOCABULARY), np.nan, dtype=np.float32)))
        assert isinstance(verification.error, FloatingPointError)

    def test_penalties_see_the_candidates_before(self) -> None:
        """A token 4 penalizes the next one, in the same step and across steps."""
        session = decoding(sampling=Sampling(presence_penalty=0.5, repetition_penalty=4.0))
        session.extend(3, Paths([4, 4], [0, 1], [-0.1, -0.1]), 0.0)
        script = Script({}, default=4)
        result, _ = step(session, script)
        assert result.tokens[0] == 4
        assert result.tokens[1] != 4
        assert (result.accepted, result.sources[-1]) == (1, CORRECTION)
        result, _ = step(session, script)
        assert result.tokens[0] != 4

    def test_sessions_of_one_step_do_not_meet(self) -> None:
        pool = BlockPool(4)
        one, other = decoding(pool), decoding(pool, prompt=[3, 2, 1])
        one.extend(3, Paths([4, 5, 7], [0, 1, 0], [-0.1, -0.1, -0.3]), 0.0)
        other.extend(3, Paths([6, 6], [0, 1], [-0.1, -0.1]), 0.0)
        packer, tree_slots = RaggedPacker(), list(TREE_SLOTS)
        verifications = [TreeVerification(session, planned(session, packer, tree_slots)) for session in (one, other)]
        script = Script({(1, 2, 3): 7, (1, 2, 3, 7): 8, (3, 2, 1): 6, (3, 2, 1, 6): 6, (3, 2, 1, 6, 6): 2})
        verify_trees(verifications, HostLogits(script.logits(packer, one, other)))
        assert [verification.commit_result(0.0).tokens for verification in verifications] == [
            [7, 8],
            [6, 6, 2],
        ]
        assert verifications[0].kv_copies == [(53, int(one.slots[3]))]
        assert verifications[1].kv_copies == []


class TestPrompt:
    def test_in_pieces_it_decides_nothing_until_its_tip(self) -> None:
        session = made()
        session.allocate(BlockPool(2))
        for done in (1, 2):
            packer = RaggedPacker()
            piece = session.plan(packer, 1, [], [])
            assert (piece.root_row, piece.count, packer.wanted) == (None, 1, [])
            session.computed += piece.count
            assert session.remaining_prompt == 2 - done
        result, _ = step(session, Script({(1, 2, 3): 7}))
        assert result.tokens == [7]

    def test_at_once_it_decides_the_first_token(self) -> None:
        session = made()
        session.allocate(BlockPool(2))
        packer = RaggedPacker()
        verification = TreeVerification(session, session.plan(packer, 3, [], []))
        verify_trees([verification], HostLogits(Script({(1, 2, 3): 7}).logits(packer, session)))
        assert verification.commit_result(0.0).tokens == [7]
        assert (session.computed, session.remaining_prompt) == (3, 0)


class TestCandidates:
    def test_no_more_than_allowed(self) -> None:
        session = decoding(max_candidates=2)
        session.extend(3, Paths([4, 5, 6], [0, 1, 2], [-0.1] * 3), 0.0)
        result, _ = step(session, Script({(1, 2, 3): 4, (1, 2, 3, 4): 5, (1, 2, 3, 4, 5): 6}))
        assert result.offered == 2
        assert result.tokens == [4, 5, 6]
        assert result.sources == [REMOTE_DRAFT, REMOTE_DRAFT, BONUS]

    def test_depth_counts_from_the_last_committed_token(self) -> None:
        """Deeper candidates wait: a draft goes on while a commit is in flight."""
        session = decoding(max_candidates=9)
        session.policy = replace(session.policy, max_depth=2)
        session.extend(3, Paths([4, 5, 6, 7, 8], [0, 1, 2, 3, 1], [-0.1] * 4 + [-2.0]), 0.0)
        assert [node.token for node in session.candidates().nodes] == [4, 5, 8]
        session.tree.commit([4])
        session.computed += 1
        session.set_policy(session.policy)
        assert [node.token for node in session.candidates().nodes] == [5, 6, 8]

    def test_none_without_speculation_or_in_the_prompt(self) -> None:
        session = made(max_candidates=5)
        session.allocate(BlockPool(2))
        assert session.wait_estimate(0.0, 0.0, drafted=True).expected == 1.0
        session.extend(3, Paths([4, 5], [0, 1], [-0.1] * 2), 0.0)
        assert (session.remaining_prompt, session.candidates().nodes) == (2, [])
        session.computed = 2
        assert len(session.candidates().nodes) == 2
        session.set_policy(Policy(NO_DRAFTERS, 5, 0.0))
        assert session.candidates().nodes == []
        assert session.wait_estimate(0.0, 0.0, drafted=False).expected == 1.0

    def test_those_past_the_memory_are_left_out(self) -> None:
        """A text almost fills its blocks: candidates with room are verified, the others kept."""
        text = [1] * (BLOCK - 2)
        session = decoding(BlockPool(2), prompt=text)
        session.extend(len(text), Paths([4, 5, 6], [0, 1, 2], [-0.1] * 3), 0.0)
        result, _ = step(session, Script({(*text,): 4, (*text, 4): 5}, default=6))
        assert (result.offered, result.tokens) == (2, [4, 5, 6])
        assert session.computed == BLOCK

    def test_what_cannot_be_is_an_error(self) -> None:
        session = decoding()
        with pytest.raises(ValueError, match="candidates start at 4"):
            session.extend(4, Paths([4], [0], [-0.1]), 0.0)

    def test_what_a_session_hopes_for_follows_its_tree(self) -> None:
        session = decoding(max_candidates=2)
        session.draft_timing.committed(3, 0.0)
        assert session.wait_estimate(0.0, 0.0, drafted=True).expected == 1.0
        session.extend(3, Paths([4, 5, 6], [0, 1, 2], [0.0] * 3), 0.0)
        for drafted in (True, False):
            assert session.wait_estimate(0.0, 0.0, drafted=drafted).expected == 3.0  # the tip and two candidates
        step(session, Script({(1, 2, 3): 4}, default=8))
        assert session.wait_estimate(0.0, 0.0, drafted=True).expected == 1.0


class TestMemory:
    def test_too_little_is_an_error_that_takes_nothing(self) -> None:
        pool = BlockPool(3)
        session = made([1] * (2 * BLOCK + 1))
        with pytest.raises(PoolFullError):
            session.allocate(pool)
        assert (pool.held, session.table, session.computed) == (0, None, 0)

    def test_a_cached_beginning_does_not_stay_held_when_the_rest_has_no_room(self) -> None:
        pool = BlockPool(3)
        self.served(pool, [1] * BLOCK)
        with pytest.raises(PoolFullError):
            made([1] * (2 * BLOCK + 1)).allocate(pool)
        assert (pool.held, pool.cached) == (0, 1)

    @staticmethod
    def served(pool: BlockPool, text: list[int], tenant: str = "") -> None:
        """Prefill a session, cache its prefix, and free it."""
        session = made(text, tenant=tenant)
        session.allocate(pool)
        session.computed = len(text)
        session.cache_prefix()
        assert not len(session.free())

    def test_what_others_have_computed_is_found(self) -> None:
        pool = BlockPool(8)
        text = [1] * BLOCK + [2] * BLOCK
        self.served(pool, text)
        session = made([*text[:-10], 3, 3])
        source, target = session.allocate(pool)
        assert session.computed == 2 * BLOCK - 10
        assert session.remaining_prompt == 1
        assert target.tolist() == session.slots[BLOCK : 2 * BLOCK - 10].tolist()
        assert len(source) == BLOCK - 10
        assert not set(source.tolist()) & set(session.slots.tolist())

    def test_nothing_is_found_of_another_tenant(self) -> None:
        pool = BlockPool(8)
        self.served(pool, [1] * 2 * BLOCK, "a")
        session = made([1] * 2 * BLOCK, tenant="b")
        source, _ = session.allocate(pool)
        assert (session.computed, len(source)) == (0, 0)

    def test_it_leaves_with_its_text(self) -> None:
        pool = BlockPool(4)
        session = decoding(pool)
        step(session, Script({(1, 2, 3): 7}))
        assert not len(session.free())
        assert (pool.held, session.table, session.computed) == (0, None, 0)
        assert not len(session.free(wipe=True))  # nothing left to free
        session.cache_prefix()
        assert pool.cached == 0
        session.allocate(pool)
        assert (session.tree.committed, session.remaining_prompt) == ([1, 2, 3, 7], 3)

    def test_wiping_says_what_to_overwrite(self) -> None:
        pool = BlockPool(4)
        session = decoding(pool)
        slots = session.slots.tolist()
        assert session.free(wipe=True).tolist() == slots
        assert pool.free == pool.usable

    def test_candidates_outlive_the_memory(self) -> None:
        pool = BlockPool(4)
        session = decoding(pool)
        session.free()
        session.extend(3, Paths([4], [0], [-0.1]), 0.0)
        session.allocate(pool)
        session.computed = 2
        result, _ = step(session, Script({(1, 2, 3): 4, (1, 2, 3, 4): 5}))
        assert result.sources == [REMOTE_DRAFT, BONUS]


def test_a_plan_wants_each_row_once_and_writes_each_slot_once() -> None:
    session = decoding()
    session.extend(3, Paths([4, 5, 6, 7, 8], [0, 1, 1, 0, 4], [-0.1, -0.2, -0.3, -0.4, -0.1]), 0.0)
    packer = RaggedPacker()
    plan = planned(session, packer)
    nodes: list[Node] = session.tree.best(9)
    assert packer.wanted == list(range(6))
    assert len(set(packer.slots)) == 6
    assert plan.root_row == 0
    assert plan.tree is not None
    assert sorted(plan.tree.results.values()) == [1, 2, 3, 4, 5]
    own = session.slots.tolist()
    assert [plan.tree.slots[id(node)] == own[node.position] for node in nodes] == [True, True, False, False, False]


def test_a_draft_that_says_the_same_as_another_proposer_is_there() -> None:
    session = decoding()
    session.tree.insert(3, Paths([4], [0], [-0.1]), origin=NGRAM)
    assert not session.has_draft_candidates
    session.extend(3, Paths([4], [0], [-0.2]), 0.0)
    assert session.has_draft_candidates


def test_rows_that_the_rule_cannot_use_are_dropped() -> None:
    """Their draws are dropped with them: no step relies on a draft's messages being valid."""
    session = decoding(sampling=Sampling(temperature=1.0), rule=Rule.REJECTION)
    misfit = DraftDistribution(None, np.zeros(VOCABULARY, np.float16))
    session.extend(3, Paths([4], [0], [-0.1], [(0, misfit)]), 0.0)
    assert (session.tree.size, session.tree.root.distribution) == (0, None)
    session.extend(3, Paths([4], [0], [-0.1], [(0, DraftDistribution(np.array([4]), np.ones(1, np.float16)))]), 0.0)
    assert session.tree.size == 1


def test_a_session_that_contrasts_sits_out_until_it_has_a_row() -> None:
    session = made(rule=Rule.CONTRASTIVE)
    session.allocate(BlockPool(4))
    assert (session.remaining_prompt, session.computable) == (2, 2)  # all but the tip
    session.computed = 2
    assert session.computable == 0
    session.extend(3, Paths([4], [0], [-0.1], [(0, DraftDistribution(None, np.zeros(VOCABULARY, np.float16)))]), 0.0)
    assert session.computable == 1
    assert session.candidates().nodes == []  # nothing can be chosen below a candidate without a row


def part(ids: list[int], value: float = -1.0) -> DraftDistribution:
    return DraftDistribution(np.array(ids), np.full(len(ids), value, np.float16), vocabulary=VOCABULARY)


ALL = list(range(VOCABULARY))
FEW = Script({(1, 2, 3): 7, (1, 2, 3, 4): 5}, default=0)
"""A target with every token plausible in every row: the most probable one has e times the others' probability."""


def test_an_undecided_row_is_asked_about_and_decided_by_the_answer() -> None:
    session = decoding(rule=Rule.CONTRASTIVE)
    session.extend(3, Paths([], [], [], [(0, part([6, 7]))]), 0.0)
    query = asked_in(session)
    assert query.base == 3
    assert query.ids is None  # about most tokens, hence about the whole vocabulary
    assert (session.computed, session.computable, session.tree.base) == (2, 0, 3)
    session.extend(3, Paths([], [], [], [(0, part([6, 7, 8]))]), 0.0)  # sent before the query reached the draft
    assert session.computable == 0
    whole = DraftDistribution(None, np.full(VOCABULARY, -3.0, np.float16), answer=True)
    session.extend(3, Paths([], [], [], [(0, whole)]), 0.0)
    assert session.computable == 1
    result, _ = step(session, FEW)
    assert result.tokens == [7]
    session.extend(4, Paths([], [], [], [(0, part([0]))]), 0.0)
    assert session.computable == 1  # the query was about another text


def test_tokens_above_an_undecided_row_are_committed() -> None:
    """The last of them becomes the next root and is computed again."""
    session = decoding(rule=Rule.CONTRASTIVE)
    whole = DraftDistribution(None, np.where(np.array(ALL) == 4, -9.0, -1.0).astype(np.float16))
    session.extend(3, Paths([4], [0], [-0.1], [(0, whole), (1, part([5]))]), 0.0)
    packer = RaggedPacker()
    verification = TreeVerification(session, planned(session, packer))
    verify_trees([verification], HostLogits(FEW.logits(packer, session)))
    result = verification.commit_result(0.0)
    assert (result.tokens, result.sources, result.accepted, result.offered) == ([4], [BONUS], 0, 1)
    assert verification.lacks is not None
    query = session.ask(verification.lacks)
    assert query.base == 4
    assert (session.computed, session.tree.base, session.computable) == (3, 4, 0)


def asked_in(session: VerifierSession) -> DraftQuery:
    """Return the query of a step whose first row is undecided."""
    packer = RaggedPacker()
    verification = TreeVerification(session, planned(session, packer))
    verify_trees([verification], HostLogits(FEW.logits(packer, session)))
    assert verification.lacks is not None
    assert verification.lacks.tolist() == ALL
    assert not verification.result.tokens
    return session.ask(verification.lacks)


@given(st.sets(st.integers(0, VOCABULARY - 1), min_size=1), st.sets(st.integers(0, VOCABULARY - 1), min_size=1))
def test_only_an_answer_ends_the_wait(asked: set[int], sent: set[int]) -> None:
    session = decoding(rule=Rule.CONTRASTIVE)
    session.extend(3, Paths([], [], [], [(0, part([0]))]), 0.0)
    ids = session.ask(np.array(sorted(asked))).ids
    session.extend(3, Paths([], [], [], [(0, part(sorted(sent)))]), 0.0)
    assert bool(session.computable) is (ids is not None and asked <= sent)
