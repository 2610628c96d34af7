"""One step of a session, with logits made up: what is taken, where it came from, what is copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.decoding.choice import Chooser
from specdec.decoding.sampling import Sampling
from specdec.engine.batch import Packer
from verifier_service.session import (
    BONUS,
    CONTEXT,
    CORRECTION,
    DRAFT,
    LENGTH,
    PLAIN,
    STOP,
    Policy,
    Session,
    SessionRequest,
    Verdict,
)

VOCABULARY = 10
PROMPT = [1, 2, 3]


def session(max_tokens: int = 20, context: int = 64, end: frozenset[int] = frozenset({9}), **policy: int) -> Session:
    request = SessionRequest(PROMPT, [], Chooser(Sampling(), end), end, max_tokens, 0, context)
    made = Session(request, Policy(True, policy.get("max_candidates", 8), 0.0), 64, VOCABULARY)
    made.slots = np.arange(100, 100 + made.end)
    return made


class Script:
    """The target: after each text, one token it chooses."""

    def __init__(self, choices: dict[tuple[int, ...], int], default: int = 0) -> None:
        self.choices = choices
        self.default = default

    def logits(self, packer: Packer) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """Each wanted row's logits, from the text its lane shows it: the token at every key."""
        batch = packer.pack()
        token_at = dict(zip(batch.slots.tolist(), batch.tokens.tolist(), strict=True))
        token_at |= {100 + i: token for i, token in enumerate(PROMPT)}
        result = np.zeros((len(packer.wanted), VOCABULARY), dtype=np.float32)
        for i, row in enumerate(packer.wanted):
            (lane,) = (lane for lane in packer.lanes if row in lane.rows)
            text = tuple(token_at[slot] for slot in lane.keys.tolist()[: packer.positions[row] + 1])
            result[i, self.choices.get(text, self.default)] = 1.0
        return result


def step(made: Session, script: Script, scratch: list[int] | None = None) -> tuple[Verdict, list[tuple[int, int]]]:
    packer = Packer()
    made.plan(packer, [50, 51, 52, 53] if scratch is None else scratch, 64)
    verdict, moves = made.settle(script.logits(packer))
    assert verdict is not None
    return verdict, moves


def test_a_plain_step_takes_the_targets_choice() -> None:
    made = session()
    verdict, moves = step(made, Script({(1, 2, 3): 7}))
    assert (verdict.base, verdict.tokens, verdict.sources) == (3, [7], [PLAIN])
    assert (verdict.offered, verdict.accepted, moves) == (0, 0, [])
    assert made.computed == 3
    assert made.tree.committed == [1, 2, 3, 7]


def test_the_walk_follows_equal_tokens_and_ends_in_a_bonus() -> None:
    made = session()
    made.tree.insert(3, [4, 5], [0, 1], [-0.1, -0.1], DRAFT)
    verdict, moves = step(made, Script({(1, 2, 3): 4, (1, 2, 3, 4): 5, (1, 2, 3, 4, 5): 6}))
    assert verdict.tokens == [4, 5, 6]
    assert verdict.sources == [DRAFT, DRAFT, BONUS]
    assert (verdict.offered, verdict.accepted, moves) == (2, 2, [])
    assert made.computed == 5


def test_a_wrong_candidate_is_corrected_and_dropped() -> None:
    made = session()
    made.tree.insert(3, [4, 5], [0, 1], [-0.1, -0.1], DRAFT)
    verdict, _ = step(made, Script({(1, 2, 3): 4, (1, 2, 3, 4): 8}))
    assert verdict.tokens == [4, 8]
    assert verdict.sources == [DRAFT, CORRECTION]
    assert made.tree.size == 0
    assert made.computed == 4


def test_a_side_branch_that_wins_is_copied_to_its_place() -> None:
    made = session()
    made.tree.insert(3, [4, 5, 6, 7], [0, 0, 2, 3], [-0.1, -0.5, -0.1, -0.1], DRAFT)
    scratch = [50, 51, 52, 53]
    verdict, moves = step(made, Script({(1, 2, 3): 5, (1, 2, 3, 5): 6, (1, 2, 3, 5, 6): 7}), scratch)
    assert verdict.tokens[:3] == [5, 6, 7]
    assert verdict.sources[:3] == [DRAFT] * 3
    assert moves == [(53, 103), (52, 104), (51, 105)]
    assert scratch == [50]


def test_what_arrives_during_the_step_waits_for_the_next() -> None:
    made = session()
    packer = Packer()
    made.plan(packer, [], 64)
    made.tree.insert(3, [4, 5], [0, 1], [-0.1, -0.1], DRAFT)
    verdict, _ = made.settle(Script({(1, 2, 3): 4}).logits(packer))
    assert (verdict.tokens, verdict.sources) == ([4], [PLAIN])  # type: ignore[union-attr]
    assert [node.token for node in made.tree.best(9)] == [5]


@pytest.mark.parametrize(
    ("fields", "choices", "tokens", "finish"),
    [
        ({}, {(1, 2, 3): 4, (1, 2, 3, 4): 9}, [4, 9], STOP),
        ({"max_tokens": 2}, {(1, 2, 3): 4, (1, 2, 3, 4): 5}, [4, 5], LENGTH),
        ({"context": 5}, {(1, 2, 3): 4, (1, 2, 3, 4): 5}, [4, 5], CONTEXT),
    ],
)
def test_it_ends_inside_an_accepted_block(
    fields: dict[str, Any], choices: dict[tuple[int, ...], int], tokens: list[int], finish: int
) -> None:
    made = session(**fields)
    made.tree.insert(3, [4, tokens[-1], 6, 7], [0, 1, 2, 3], [-0.1] * 4, DRAFT)
    verdict, _ = step(made, Script(choices, default=6))
    assert verdict.tokens == tokens
    assert verdict.finish == finish


def test_a_prompt_in_chunks_commits_nothing_until_its_tip() -> None:
    made = session()
    for expected in (1, 2):
        packer = Packer()
        assert made.plan(packer, [], 1) == 1
        assert made.settle(np.zeros((0, VOCABULARY), dtype=np.float32)) == (None, [])
        assert made.computed == expected
    verdict, _ = step(made, Script({(1, 2, 3): 7}))
    assert verdict.tokens == [7]


def test_no_more_candidates_than_allowed() -> None:
    made = session(max_candidates=2)
    made.tree.insert(3, [4, 5, 6], [0, 1, 2], [-0.1] * 3, DRAFT)
    verdict, _ = step(made, Script({(1, 2, 3): 4, (1, 2, 3, 4): 5, (1, 2, 3, 4, 5): 6}))
    assert verdict.offered == 2
    assert verdict.tokens == [4, 5, 6]
    assert verdict.sources == [DRAFT, DRAFT, BONUS]


def test_logits_that_are_not_numbers_end_the_session() -> None:
    made = session()
    packer = Packer()
    made.plan(packer, [], 64)
    with pytest.raises(FloatingPointError):
        made.settle(np.full((1, VOCABULARY), np.nan, dtype=np.float32))
