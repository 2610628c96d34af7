"""Proves that the token tree keeps what it should and drops what it should.

Messages and commits of one text may come in any order, as long as each message's base is committed before it: the live
candidates equal those of inserting everything first. Duplicates, late messages and contradictions do no harm. `best` is
checked against brute force, `size` against a count, and unreachable nodes are dropped. Logprobs are multiples of 1/8,
so that sums are exact and equal path logprobs compare equal.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.tree import MAX_DRAWS, MAX_REFUSED, BaseAheadError, Node, Paths, TokenTree, paths_to
from tests.examples import examples

VOCABULARY = 4
PROMPT = (1, 2)
FAR = 100

Path = tuple[int, ...]


@dataclass(frozen=True)
class Message:
    """An Extend message: `base`, tokens, parents, logprobs."""

    base: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    logprobs: tuple[float, ...]

    def into(self, tree: TokenTree) -> list[Node]:
        return tree.insert(self.base, Paths(self.tokens, self.parents, self.logprobs))


def live(tree: TokenTree) -> dict[Path, float]:
    """Return every live candidate: its tokens below the committed text, and its logprob."""
    return {tuple(node.token for node in below.path()): below.logprob for below in tree.root.walk()}


def sound(tree: TokenTree) -> None:
    """Check the invariants of a tree."""
    nodes = list(tree.root.walk())
    assert tree.size == len(nodes)
    assert tree.root.parent is None
    assert tree.root.position == tree.base - 1
    assert tree.root.token == tree.committed[-1]
    for node in nodes:
        assert node.parent is not None
        assert node.parent.children[node.token] is node
        assert node.position == node.parent.position + 1
        assert node.logprob <= 0


def plant(committed: Sequence[int] = PROMPT, last_position: int = FAR, **settings: int | frozenset[int]) -> TokenTree:
    return TokenTree(committed, vocabulary=VOCABULARY, last_position=last_position, **settings)  # type: ignore[arg-type]


tokens = st.integers(0, VOCABULARY - 1)
logprobs = st.integers(-24, 4).map(lambda eighths: eighths / 8)


@st.composite
def messages(draw: st.DrawFn, base: int, most: int = 8) -> Message:
    count = draw(st.integers(0, most))
    return Message(
        base,
        tuple(draw(tokens) for _ in range(count)),
        tuple(draw(st.integers(0, i)) for i in range(count)),
        tuple(draw(logprobs) for _ in range(count)),
    )


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    tree = plant()
    for message in draw(st.lists(messages(len(PROMPT), most=15), max_size=3)):
        message.into(tree)
    return tree


@dataclass(frozen=True)
class Story:
    """Events of one session: messages and committed tokens, in order of arrival."""

    events: tuple[Message | int, ...]

    @property
    def committed(self) -> list[int]:
        return [*PROMPT, *(event for event in self.events if isinstance(event, int))]


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """A text committed token by token, and messages about it, arriving at any time once their base is committed.

    A message is written when the text ends at its base, and arrives then or later. After further commits it is late,
    and its wrong candidates contradict the text.
    """
    text = draw(st.lists(tokens, max_size=6))
    arrivals: list[list[Message]] = [[] for _ in range(len(text) + 1)]
    for _ in range(draw(st.integers(0, 6))):
        written = draw(st.integers(0, len(text)))
        arrives = draw(st.integers(written, len(text)))
        arrivals[arrives].append(draw(messages(len(PROMPT) + written)))
    events: list[Message | int] = []
    for arrived, token in zip(arrivals, [*text, None], strict=True):
        events += draw(st.permutations(arrived))
        if token is not None:
            events.append(token)
    return Story(tuple(events))


def play(story: Story) -> TokenTree:
    tree = plant()
    for event in story.events:
        if isinstance(event, int):
            tree.commit([event])
        else:
            event.into(tree)
        sound(tree)
    return tree


def everything_first(story: Story) -> TokenTree:
    """Insert all messages into a fresh tree, then commit all tokens in one call.

    Each message is rewritten to start at the prompt: the text between prompt and base becomes a chain of nodes.
    """
    tree = plant()
    for event in story.events:
        if isinstance(event, int):
            continue
        chain = story.committed[len(PROMPT) : event.base]
        links = tuple(range(len(chain)))
        shifted = tuple(len(chain) + parent for parent in event.parents)
        Message(
            len(PROMPT), (*chain, *event.tokens), (*links, *shifted), (*([0.0] * len(chain)), *event.logprobs)
        ).into(tree)
    tree.commit(story.committed[len(PROMPT) :])
    sound(tree)
    return tree


class TestOrder:
    @settings(max_examples=examples(120), deadline=None)
    @given(stories())
    def test_any_interleaving_ends_as_inserting_everything_first(self, story: Story) -> None:
        tree = play(story)
        assert tree.committed == story.committed
        assert live(tree) == live(everything_first(story))

    @settings(max_examples=100, deadline=None)
    @given(stories(), st.data())
    def test_duplicates_and_latecomers_change_nothing(self, story: Story, data: st.DataObject) -> None:
        """Messages are repeated at any time after their arrival, and all of them at the end."""
        events: list[Message | int] = []
        again: list[Message | int] = []
        for event in story.events:
            events.append(event)
            if not isinstance(event, int):
                again.append(event)
            if again:
                events += data.draw(st.lists(st.sampled_from(again), max_size=3))
        assert live(play(Story((*events, *again)))) == live(play(story))

    @settings(max_examples=100, deadline=None)
    @given(trees(), st.data())
    def test_a_contradicting_message_does_no_harm(self, tree: TokenTree, data: st.DataObject) -> None:
        """If all paths of a message leave the committed text, it inserts and drops nothing."""
        tree.commit([3, 0])
        before = live(tree)
        rest = data.draw(messages(len(PROMPT)))
        base = data.draw(st.sampled_from([len(PROMPT), len(PROMPT) + 1]))
        wrong = 2  # neither of the committed tokens
        shifted = tuple(parent + 1 for parent in rest.parents)
        assert Message(base, (wrong, *rest.tokens), (0, *shifted), (0.0, *rest.logprobs)).into(tree) == []
        assert live(tree) == before
        sound(tree)

    @given(trees(), st.lists(tokens, max_size=5))
    def test_committing_at_once_is_committing_one_by_one(self, tree: TokenTree, text: list[int]) -> None:
        other = plant()
        other.insert(other.base, paths_to(list(tree.root.walk())))
        tree.commit(text)
        for token in text:
            other.commit([token])
        assert live(tree) == live(other)
        assert tree.committed == other.committed
        sound(tree)

    @given(trees(), st.lists(tokens, max_size=5))
    def test_a_node_survives_iff_the_text_is_a_prefix_of_its_path(self, tree: TokenTree, text: list[int]) -> None:
        before = live(tree)
        tree.commit(text)
        depth = len(text)
        expected = {path[depth:]: logprob for path, logprob in before.items() if list(path[:depth]) == text}
        expected.pop((), None)
        assert live(tree) == expected

    def test_survivors_keep_their_identity_and_match(self) -> None:
        tree = plant()
        first, second = tree.insert(2, Paths([3, 0], [0, 1], [-1.0, -2.0]))
        second.match = 3
        tree.commit([3])
        assert tree.root is first
        assert tree.root.children[0] is second
        assert second.path_logprob() == -2.0
        assert [node.match for node in tree.best(5)] == [3]


class TestInsert:
    @given(trees(), messages(len(PROMPT)))
    def test_returns_the_nodes_that_were_not_there(self, tree: TokenTree, message: Message) -> None:
        before = {id(node) for node in tree.root.walk()}
        made = message.into(tree)
        after = {id(node) for node in tree.root.walk()}
        assert {id(node) for node in made} == after - before
        assert len(made) == len(after - before)

    def test_a_duplicate_path_keeps_the_larger_logprob(self) -> None:
        tree = plant()
        for logprob in (-2.0, -1.0, -3.0, math.inf, -math.inf, math.nan):
            tree.insert(2, Paths([3], [0], [logprob]))
        assert live(tree) == {(3,): -1.0}

    def test_logprobs_are_at_most_zero(self) -> None:
        tree = plant()
        tree.insert(2, Paths([3], [0], [2.0]))
        tree.insert(2, Paths([3], [0], [5.0]))
        assert live(tree) == {(3,): 0.0}

    def test_a_base_ahead_of_the_text_is_an_error_and_inserts_nothing(self) -> None:
        tree = plant()
        with pytest.raises(BaseAheadError, match=r"start at 3.* 2 tokens"):
            tree.insert(3, Paths([0], [0], [-1.0]))
        assert tree.size == 0

    def test_a_parent_must_precede_its_child(self) -> None:
        with pytest.raises(ValueError, match="parent 2"):
            plant().insert(2, Paths([0, 1], [0, 2], [-1.0, -1.0]))

    def test_lists_of_different_lengths_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"shorter|longer"):
            plant().insert(2, Paths([0, 1], [0], [-1.0, -1.0]))

    def test_the_origin_is_the_first_sender(self) -> None:
        tree = plant()
        (node,) = tree.insert(2, Paths([3], [0], [-1.0]), origin=7)
        tree.insert(2, Paths([3], [0], [-0.5]), origin=8)
        assert (node.origin, node.logprob) == (7, -0.5)


class TestDropped:
    """Unreachable nodes are dropped with all nodes below; their siblings stay."""

    def chain(self, tree: TokenTree, path: Sequence[int], *logprobs: float) -> set[Path]:
        tree.insert(tree.base, Paths(path, range(len(path)), logprobs or [-1.0] * len(path)))
        tree.insert(tree.base, Paths([0], [0], [-1.0]))
        sound(tree)
        return set(live(tree)) - {(0,)}

    def test_below_an_end_token(self) -> None:
        assert self.chain(plant(end_tokens=frozenset({3})), [1, 3, 2, 1]) == {(1,), (1, 3)}

    def test_not_below_an_end_token_that_is_committed(self) -> None:
        """A prompt may contain end tokens, even as its last token."""
        assert self.chain(plant((1, 3), end_tokens=frozenset({3})), [1]) == {(1,)}

    def test_past_the_last_position(self) -> None:
        assert self.chain(plant(last_position=3), [1, 2, 3]) == {(1,), (1, 2)}

    def test_ids_outside_the_vocabulary(self) -> None:
        assert self.chain(plant(), [1, VOCABULARY, 2]) == {(1,)}

    @pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
    def test_logprobs_that_are_not_finite(self, logprob: float) -> None:
        assert self.chain(plant(), [1, 2, 3], -1.0, logprob, -1.0) == {(1,)}

    @given(st.lists(messages(len(PROMPT)), max_size=4), st.integers(0, 6))
    def test_above_max_nodes(self, sent: list[Message], most: int) -> None:
        tree, unlimited = plant(max_nodes=most), plant()
        for message in sent:
            message.into(tree)
            message.into(unlimited)
            sound(tree)
        assert tree.size == min(most, unlimited.size)
        assert live(tree).items() <= live(unlimited).items()

    def test_a_commit_makes_room(self) -> None:
        tree = plant(max_nodes=2)
        tree.insert(2, Paths([0, 1, 2], [0, 0, 0], [-1.0, -1.0, -1.0]))
        tree.commit([0])
        tree.insert(3, Paths([0, 1, 2], [0, 0, 0], [-1.0, -1.0, -1.0]))
        assert set(live(tree)) == {(0,), (1,)}


class TestBest:
    @settings(max_examples=150, deadline=None)
    @given(trees(), st.integers(0, 30))
    def test_is_the_connected_top_by_path_logprob(self, tree: TokenTree, count: int) -> None:
        chosen = tree.best(count)
        assert len({id(node) for node in chosen}) == len(chosen)
        reaches = [node.path_logprob() for node in chosen]
        assert reaches == sorted((node.path_logprob() for node in tree.root.walk()), reverse=True)[:count]
        met = {id(tree.root)}
        for node in chosen:
            assert id(node.parent) in met  # parents first
            met.add(id(node))

    @given(trees())
    def test_by_path_logprob_goes_on_to_the_last_node(self, tree: TokenTree) -> None:
        found = list(tree.by_path_logprob())
        assert [node for _, node in found] == tree.best(tree.size)
        assert [path_logprob for path_logprob, _ in found] == [node.path_logprob() for _, node in found]
        assert len(found) == tree.size

    @given(trees())
    def test_the_best_chain_goes_to_the_likeliest_child(self, tree: TokenTree) -> None:
        node, reached = tree.root, 0.0
        for path_logprob, child in tree.best_chain():
            assert child.parent is node
            assert child.logprob == max(other.logprob for other in node.children.values())
            node, reached = child, reached + child.logprob
            assert path_logprob == reached
        assert not node.children

    def test_the_best_chain_ends_where_nothing_is_usable(self) -> None:
        tree = TokenTree([7], vocabulary=8, last_position=9)
        tree.insert(1, Paths([0, 1, 2], [0, 1, 1], [-0.1, -0.1, -0.2]))
        assert [node.token for _, node in tree.best_chain()] == [0, 1]
        assert [node.token for _, node in tree.best_chain(lambda node: node.token != 1)] == [0, 2]
        assert [node.token for _, node in tree.best_chain(lambda node: node.token != 0)] == []

    @given(trees())
    def test_path_logprob_is_the_sum_along_the_path_and_never_rises(self, tree: TokenTree) -> None:
        for node in tree.root.walk():
            path = node.path()
            assert path[-1] is node
            assert node.path_logprob() == sum(step.logprob for step in path)
            assert node.parent is not None
            assert node.path_logprob() <= node.parent.path_logprob()


class TestSpelling:
    @given(trees(), st.lists(tokens, max_size=2))
    def test_paths_make_the_same_tree_again(self, tree: TokenTree, text: list[int]) -> None:
        tree.commit(text)
        copy = plant(tree.committed)
        made = copy.insert(tree.base, paths_to(list(tree.root.walk())))
        assert live(copy) == live(tree)
        assert len(made) == tree.size  # each node occurs once

    @given(trees(), st.data())
    def test_nodes_come_with_their_ancestors_and_nothing_else(self, tree: TokenTree, data: st.DataObject) -> None:
        nodes = list(tree.root.walk())
        chosen = data.draw(st.lists(st.sampled_from(nodes), max_size=4) if nodes else st.just([]))
        paths = paths_to(chosen)
        copy = plant(tree.committed)
        made = copy.insert(tree.base, paths)
        expected = {
            tuple(node.token for node in path[: i + 1]): step.logprob
            for path in (node.path() for node in chosen)
            for i, step in enumerate(path)
        }
        assert live(copy) == expected
        assert len(made) == len(paths.tokens) == len(expected)


def row(*ids: int) -> DraftDistribution:
    return DraftDistribution(np.asarray(ids), np.ones(len(ids), np.float16))


class TestDistributions:
    def test_they_lie_where_they_belong(self) -> None:
        tree = plant()
        at_root, at_child = row(3, 4), row(5)
        first, second = tree.insert(2, Paths([3, 0], [0, 0], [-1.0, -1.0], [(0, at_root), (2, at_child)]))
        assert (tree.root.distribution, first.distribution, second.distribution) == (at_root, None, at_child)

    def test_the_first_stays(self) -> None:
        tree = plant()
        tree.insert(2, Paths([], [], [], [(0, first := row(3))]))
        tree.insert(2, Paths([], [], [], [(0, row(4))]))
        assert tree.root.distribution is first

    def test_those_of_committed_places_are_dropped(self) -> None:
        tree = plant()
        tree.commit([3])
        tree.insert(2, Paths([0], [0], [-1.0], [(0, row(3)), (1, row(4)), (7, row(5))]))
        assert tree.root.distribution is None

    def test_a_distribution_comes_to_the_root_by_an_old_path(self) -> None:
        tree = plant()
        tree.commit([3])
        tree.insert(2, Paths([3], [0], [-1.0], [(1, mine := row(4))]))
        assert tree.root.distribution is mine

    def test_they_survive_a_commit(self) -> None:
        tree = plant()
        tree.insert(2, Paths([3], [0], [-1.0], [(1, mine := row(4))]))
        tree.commit([3])
        assert tree.root.distribution is mine

    def test_they_are_spelt(self) -> None:
        tree, copy = plant(), plant()
        tree.insert(2, Paths([3, 0, 1], [0, 1, 0], [-1.0, -1.0, -2.0], [(0, row(3)), (2, row(1))]))
        nodes = [tree.root, *tree.root.walk()]
        copy.insert(
            2, paths_to(nodes[1:], [(node, node.distribution) for node in nodes if node.distribution is not None])
        )
        rows = {tuple(n.token for n in node.path()): node.distribution for node in (copy.root, *copy.root.walk())}
        assert {path: found is not None for path, found in rows.items()} == {
            (): True,
            (3,): False,
            (3, 0): True,
            (1,): False,
        }


class TestSampled:
    """Whether a drawn candidate is present must not depend on its value."""

    def grown(self) -> TokenTree:
        return TokenTree([1, 2], vocabulary=9, last_position=9, sampled=True)

    def test_a_candidate_comes_with_its_row_or_not_at_all(self) -> None:
        tree = self.grown()
        assert tree.insert(2, Paths([3], [0], [-1.0])) == []
        assert tree.root.distribution is None
        (node,) = tree.insert(2, Paths([3], [0], [-1.0], [(0, mine := row(3, 4))]))
        assert node.token == 3
        assert tree.root.distribution is mine

    def test_the_first_draw_stays(self) -> None:
        tree = self.grown()
        tree.insert(2, Paths([3], [0], [-1.0], [(0, mine := row(3, 4))]))
        assert tree.insert(2, Paths([4], [0], [-0.1], [(0, row(4))])) == []
        assert list(tree.root.children) == [3]
        assert tree.root.distribution is mine

    def test_siblings_come_in_one_message_or_not_at_all(self) -> None:
        tree = self.grown()
        assert len(tree.insert(2, Paths([5, 3], [0, 0], [-1.0, -2.0], [(0, row(3, 4, 5))]))) == 2
        assert tree.insert(2, Paths([5, 3, 4], [0, 0, 0], [-1.0, -2.0, -3.0], [(0, row(3, 4, 5))])) == []
        assert list(tree.root.children) == [5, 3]

    def test_there_are_at_most_as_many_as_the_contract_permits(self) -> None:
        tree = TokenTree([1, 2], vocabulary=99, last_position=9, sampled=True)
        many = list(range(MAX_DRAWS + 1))
        assert len(tree.insert(2, Paths(many, [0] * len(many), [-1.0] * len(many), [(0, row(*many))]))) == MAX_DRAWS
        assert list(tree.root.children) == many[:MAX_DRAWS]

    def test_again_changes_nothing(self) -> None:
        tree = self.grown()
        message = Paths([3, 4], [0, 1], [-1.0, -1.0], [(0, row(3, 4)), (1, row(4))])
        assert len(tree.insert(2, message)) == 2
        assert tree.insert(2, message._replace(logprobs=[-0.5, -0.5])) == []
        assert [node.logprob for node in tree.root.walk()] == [-1.0, -1.0]

    def test_a_row_alone_is_nothing(self) -> None:
        tree = self.grown()
        tree.insert(2, Paths([], [], [], [(0, row(3))]))
        assert tree.root.distribution is None


def test_dropped_nodes_do_not_wait_for_the_garbage_collector() -> None:
    tree = TokenTree(PROMPT, vocabulary=VOCABULARY, last_position=FAR)
    tree.insert(2, Paths((0, 1, 2, 3, 0, 1), (0, 1, 1, 0, 4, 5), (-1.0,) * 6))
    gc.collect()
    gc.disable()
    try:
        tree.commit([0, 1])
        assert tree.size == 0
        assert gc.collect() == 0
        tree.insert(4, Paths((0, 1, 2), (0, 1, 1), (-1.0,) * 3))
        tree.commit([3])
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_message_asks_a_grammar_about_few_candidates_that_it_refuses() -> None:
    asked: list[int] = []

    def permits(parent: Node, token: int) -> bool:
        asked.append(token)
        return False

    tree = TokenTree([1], vocabulary=9, last_position=99, permits=permits)
    for _ in range(2):
        tree.insert(1, Paths([5] * 1024, [0] * 1024, [-0.1] * 1024))
    assert len(asked) == 2 * MAX_REFUSED
