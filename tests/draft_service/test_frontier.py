"""Incremental ranking of the frontier equals a scan of the whole tree, after any growth and commits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.frontier import Frontier
from specdec.decoding.tree import Node, TokenTree

TOKENS = 4
SCORES = st.floats(-3.0, 0.0).map(lambda logprob: round(logprob, 6))
ADD = st.tuples(st.integers(0, 30), st.integers(0, TOKENS - 1), SCORES)
COMMIT = st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=3)
TAKE = st.none()


@given(st.lists(ADD | COMMIT | TAKE, max_size=60))
def test_the_best_is_the_one_of_highest_path_logprob(moves: list[tuple[int, int, float] | list[int] | None]) -> None:
    tree = TokenTree([0], vocabulary=TOKENS, last_position=1000)
    ranking, taken = Frontier(), set[Node]()
    for move in moves:
        match move:
            case (place, token, logprob):
                nodes = [tree.root, *tree.root.walk()]
                parent = nodes[place % len(nodes)]
                if token not in parent.children:
                    child = tree.add(parent, token, logprob)
                    assert child is not None
                    ranking.add(child.path_logprob(), child)
            case None if len(ranking):
                taken.add(ranking.pop_best()[1])
            case [*tokens]:
                node, passed = tree.root, 0.0
                for each in tokens:
                    if each not in node.children:
                        break
                    node = node.children[each]
                    passed += node.logprob
                tree.commit(tokens)
                ranking.descend(passed, set(tree.root.walk()))
        left = [(logprob, node) for logprob, node in tree.by_path_logprob() if node not in taken]
        assert set(ranking) == {node for _, node in left}
        if left:
            logprob, node = ranking.best()
            assert logprob == pytest.approx(left[0][0])
            assert node.path_logprob() == pytest.approx(logprob)
        else:
            assert not len(ranking)


def test_equals_come_out_in_the_order_in_which_they_came() -> None:
    tree = TokenTree([0], vocabulary=TOKENS, last_position=10)
    nodes = [node for token in range(TOKENS) if (node := tree.add(tree.root, token, -1.0)) is not None]
    ranking = Frontier()
    for node in nodes:
        ranking.add(-1.0, node)
    assert [ranking.pop_best()[1] for _ in range(len(ranking))] == nodes
    ranking.add(-math.inf, nodes[0])
    ranking.clear()
    assert not len(ranking)
