"""Allocation of a step's rows: properties of the choice of candidates, and of prompt shares."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.tree import BestNodes, Node, Paths, TokenTree
from tests.verifier_service.fakes import FREE, FixedLatency, TextEngine, run, step_loop
from tests.verifier_service.step_loop.helpers import client, turns
from verifier_service.costs.step_latency import StepLatency
from verifier_service.costs.token_budget import WindowCosts, select_candidates
from verifier_service.scheduling.cpu_threads import FixedThreads
from verifier_service.scheduling.shares import Urgent
from verifier_service.scheduling.step_prompts import PrefillSlowdown, StepPrompts
from verifier_service.scheduling.step_shares import StepShares
from verifier_service.settings.tuning import DEFAULTS

TUNING = DEFAULTS.prefill


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Trees of any shape with up to 12 nodes; logprobs often tie."""
    tree = TokenTree([1, 2, 3], vocabulary=100, last_position=1000)
    nodes: list[Node] = [tree.root]
    for token in range(draw(st.integers(0, 12))):
        parent = nodes[draw(st.integers(0, len(nodes) - 1))]
        logprob = draw(st.sampled_from([0.0, -0.1, -0.1, -0.7, -3.0, -50.0, -2000.0]))
        node = tree.add(parent, token, logprob)
        assert node is not None
        nodes.append(node)
    return tree


batches = st.lists(st.tuples(trees(), st.integers(0, 14)), max_size=5)
costs = st.floats(0.0, 20.0).map(FixedLatency)
any_cost = st.one_of(
    costs, st.lists(st.floats(0.001, 1.0), min_size=4, max_size=4).map(lambda s: StepLatency((1, 2, 8, 32), s))
)
rows_before = st.integers(1, 40)
limits = st.integers(0, 60)

Batch = list[tuple[TokenTree, int]]


def chains() -> st.SearchStrategy[list[float]]:
    """Logprobs of the nodes of a chain."""
    return st.lists(st.sampled_from([-1e-6, -0.1, -0.7, -3.0]), max_size=6)


def chain(logprobs: list[float]) -> TokenTree:
    tree = TokenTree([1, 2, 3], vocabulary=100, last_position=1000)
    tree.insert(3, Paths([7] * len(logprobs), range(len(logprobs)), logprobs))
    return tree


def chosen_of(batch: Batch, latency: StepLatency, rows: int, most: int) -> list[list[Node]]:
    """Return the nodes that `select_candidates` takes from trees, each with a limit on its nodes."""
    return select_candidates(
        [BestNodes.of(tree.by_path_logprob(), limit) for tree, limit in batch], latency, rows, most
    ).nodes


class TestCandidates:
    @given(batches, any_cost, rows_before, limits)
    def test_every_tree_gets_the_best_of_its_own(
        self, batch: Batch, latency: StepLatency, rows: int, most: int
    ) -> None:
        """The nodes are connected, within the tree's limit, and of no other tree."""
        chosen = chosen_of(batch, latency, rows, most)
        assert len(chosen) == len(batch)
        assert sum(map(len, chosen)) <= most
        for (tree, limit), nodes in zip(batch, chosen, strict=True):
            assert len(nodes) <= limit
            assert nodes == tree.best(len(nodes))
            known = {id(tree.root)}
            for node in nodes:
                assert id(node.parent) in known
                known.add(id(node))

    @given(batches, any_cost, rows_before, limits)
    def test_no_candidate_is_passed_over_for_a_worse_one(
        self, batch: Batch, latency: StepLatency, rows: int, most: int
    ) -> None:
        chosen = chosen_of(batch, latency, rows, most)
        taken = [node.path_logprob() for nodes in chosen for node in nodes]
        for (tree, limit), nodes in zip(batch, chosen, strict=True):
            left = tree.best(limit)[len(nodes) :]
            assert all(node.path_logprob() <= min(taken, default=0.0) + 1e-9 for node in left)

    @given(batches, any_cost, rows_before, limits)
    def test_the_break_even_probability_is_that_of_a_further_candidate(
        self, batch: Batch, latency: StepLatency, rows: int, most: int
    ) -> None:
        offers = [BestNodes.of(tree.by_path_logprob(), limit) for tree, limit in batch]
        chosen, price, break_even, _ = select_candidates(offers, latency, rows, most)
        assert price.break_even == break_even  # without exploration
        left = [
            math.exp(node.path_logprob())
            for (tree, limit), nodes in zip(batch, chosen, strict=True)
            for node in tree.best(limit)[len(nodes) :]
        ]
        if sum(map(len, chosen)) < most:
            assert all(path_logprob < break_even * (1 + 1e-9) for path_logprob in left)

    @given(batches, st.floats(0.0, 20.0), st.floats(0.0, 20.0), rows_before, limits)
    def test_dearer_rows_are_fewer(self, batch: Batch, one: float, other: float, rows: int, most: int) -> None:
        cheap, dear = (chosen_of(batch, FixedLatency(slope), rows, most) for slope in sorted((one, other)))
        for few, many in zip(dear, cheap, strict=True):
            assert many[: len(few)] == few

    @given(batches, rows_before, limits)
    def test_free_rows_are_all_taken(self, batch: Batch, rows: int, most: int) -> None:
        chosen = chosen_of(batch, FREE, rows, most)
        assert sum(map(len, chosen)) == min(most, sum(min(tree.size, limit) for tree, limit in batch))

    @given(batches, any_cost, rows_before, limits, chains(), chains(), chains(), st.booleans())
    def test_no_candidate_depends_on_those_below_its_child_if_none_may_be_left_out(
        self,
        batch: Batch,
        latency: StepLatency,
        rows: int,
        most: int,
        above: list[float],
        one: list[float],
        other: list[float],
        explore: bool,
    ) -> None:
        """The end of a block must not depend on the draws beyond it, which decide their own probabilities."""
        before = [BestNodes.of(tree.by_path_logprob(), limit) for tree, limit in batch]
        taken = []
        for below in (one, other):
            offer = BestNodes.of(chain([*above, -0.3, *below]).by_path_logprob(), 99)
            found = select_candidates([*before, offer], latency, rows, most, explore=explore, leave_out=False)
            taken.append([len(found.nodes[-1]) > depth for depth in range(len(above))])
        assert taken[0] == taken[1]

    @given(batches.filter(bool), costs, rows_before)
    def test_it_pays(self, batch: Batch, latency: StepLatency, rows: int) -> None:
        """The last candidate taken increases goodput (tokens per second), and the next one would not."""
        chosen = chosen_of(batch, latency, rows, 1000)
        gains = [math.exp(node.path_logprob()) for nodes in chosen for node in nodes]
        expected, count = rows + sum(gains), rows + len(gains)
        rate = expected / latency.of(count)
        if gains:
            assert rate >= (expected - min(gains)) / latency.of(count - 1) * (1 - 1e-9)
        rest = [tree.best(limit)[len(nodes) :][:1] for (tree, limit), nodes in zip(batch, chosen, strict=True)]
        for (node,) in filter(None, rest):
            assert (expected + math.exp(node.path_logprob())) / latency.of(count + 1) <= rate * (1 + 1e-9)

    def test_the_likely_ones_of_one_tree_go_before_the_unlikely_ones_of_another(self) -> None:
        """Two sessions, and rows for two candidates."""
        sure, unsure = (TokenTree([1], vocabulary=9, last_position=99) for _ in range(2))
        sure.insert(1, Paths([2, 3], [0, 1], [-0.1, -0.1]))
        unsure.insert(1, Paths([2, 3], [0, 0], [-1.0, -1.1]))
        assert list(map(len, chosen_of([(unsure, 8), (sure, 8)], FREE, 2, 2))) == [0, 2]
        assert list(map(len, chosen_of([(unsure, 8), (sure, 1)], FREE, 2, 2))) == [1, 1]

    def test_nobody_decodes(self) -> None:
        assert select_candidates([], FREE, 1, 10).nodes == []


remaining = st.lists(st.integers(1, 200), min_size=1, max_size=8)
budgets = st.integers(1, 600)
decoders = st.integers(0, 20)


def chunks_of(
    prompts: list[int],
    decoding: int,
    latency: StepLatency,
    rows: int,
    most: int,
    slowdown: float = 1.0,
    urgent_rows: int = 0,
) -> list[int]:
    """Return how many tokens of each prompt a step with `rows` rows takes, with limits of `most` rows, after
    `urgent_rows` rows of an urgent prompt."""
    step = StepPrompts(FixedThreads(latency), StepShares(most), most, most, TUNING)
    step.slowdown.factor = slowdown
    waiting = [_prompt(count) for count in prompts]
    ahead = [_prompt(urgent_rows, tenant="urgent")] if urgent_rows else []
    urgent = Urgent({"urgent"}, set())
    found = step.chunks([*ahead, *waiting], urgent, decoding, rows, 0, None, goes_first=False)
    assert [entry for entry, _ in found] == [*ahead, *waiting]
    return [chunk for _, chunk in found[len(ahead) :]]


def _prompt(remaining: int, tenant: str = "") -> Any:
    """Return a session with this many tokens of its prompt left to compute."""
    session = SimpleNamespace(computable=remaining, scores_prompt=False)
    return SimpleNamespace(tenant=tenant, weight=1.0, session=session)


class TestPrefillChunks:
    @given(remaining, decoders, any_cost, rows_before, budgets)
    def test_shares_are_fair(
        self, prompts: list[int], decoding: int, latency: StepLatency, others: int, most: int
    ) -> None:
        """Max-min fairness: a session that gets only a part of its prompt has at least as much as any other, up to
        rounding."""
        shares = chunks_of(prompts, decoding, latency, decoding + others, most)
        assert len(shares) == len(prompts)
        for share, wanted in zip(shares, prompts, strict=True):
            assert 1 <= share <= wanted
            if share < wanted:
                assert max(shares) <= share + 1

    @given(remaining, decoders, any_cost, rows_before, budgets)
    def test_the_budget_is_used_up_and_kept(
        self, prompts: list[int], decoding: int, latency: StepLatency, others: int, most: int
    ) -> None:
        """The budget is `most` rows or a multiple. Beside decoding sessions, prompts get only the rows that keep the
        slowdown within its limit, but always at least a few."""
        rows, budget = decoding + others, most
        if decoding:
            readers = max(1.0, len(prompts) / decoding)
            stretched = max(
                (1.0 + TUNING.max_decode_slowdown * readers) * latency.of(rows), TUNING.slice_seconds * readers
            )
            full = next(n for n in range(most, 10_000, most) if n >= rows + TUNING.min_chunk_tokens)
            budget = max(TUNING.min_chunk_tokens, min(full, latency.rows_within(stretched)) - rows)
        total = sum(chunks_of(prompts, decoding, latency, rows, most))
        assert total == min(sum(prompts), max(budget, len(prompts)))
        if decoding and total > max(TUNING.min_chunk_tokens, len(prompts)):
            assert latency.of(rows + total) <= stretched

    @given(remaining, any_cost, budgets)
    def test_everything_goes_when_nobody_decodes(self, prompts: list[int], latency: StepLatency, most: int) -> None:
        """Up to `most` rows, whatever they cost."""
        assert chunks_of(prompts, 0, latency, 0, max(most, sum(prompts))) == prompts
        assert sum(chunks_of(prompts, 0, latency, 0, most)) == min(sum(prompts), max(most, len(prompts)))

    @given(remaining, any_cost, budgets, st.integers(0, 600))
    def test_prompts_share_the_limit_with_urgent_ones_when_nobody_decodes(
        self, prompts: list[int], latency: StepLatency, most: int, urgent_rows: int
    ) -> None:
        total = sum(chunks_of(prompts, 0, latency, 0, most, urgent_rows=urgent_rows))
        assert total == min(sum(prompts), max(most - min(urgent_rows, most), len(prompts)))

    def test_urgent_prompts_leave_less_to_others(self) -> None:
        assert chunks_of([1000, 1000], 1, FixedLatency(0.01), 1, 600) == [70, 71]
        assert chunks_of([1000, 1000], 1, FixedLatency(0.01), 1, 600, urgent_rows=8) == [66, 67]

    @given(remaining, st.floats(0.0, 5.0), st.floats(0.0, 5.0), st.integers(1, 40), budgets)
    def test_dearer_rows_are_fewer(self, prompts: list[int], one: float, other: float, rows: int, most: int) -> None:
        cheap, dear = (sum(chunks_of(prompts, rows, FixedLatency(slope), rows, most)) for slope in sorted((one, other)))
        assert dear <= cheap

    @given(remaining, st.integers(1, 20), st.integers(1, 20), any_cost, budgets)
    def test_few_do_not_hold_up_many(
        self, prompts: list[int], one: int, other: int, latency: StepLatency, most: int
    ) -> None:
        """The more of the rows decode, the fewer rows prompts get."""
        few, many = sorted((one, other))
        held_up = sum(chunks_of(prompts, many, latency, 20, most))
        assert held_up <= sum(chunks_of(prompts, few, latency, 20, most))

    @pytest.mark.parametrize(
        ("prompts", "most", "shares"),
        [
            ([100, 100], 30, [15, 15]),
            ([100, 4], 30, [26, 4]),
            ([4, 100, 7], 30, [4, 19, 7]),
            ([5, 5, 5], 2, [1, 1, 1]),
            ([100, 100, 100], 31, [10, 10, 11]),
        ],
    )
    def test_examples(self, prompts: list[int], most: int, shares: list[int]) -> None:
        assert chunks_of(prompts, 0, FREE, 0, most) == shares
        assert chunks_of(prompts, 20, FREE, 40, 40 + max(most, 8)) == chunks_of(prompts, 0, FREE, 0, max(most, 8))

    @given(remaining, st.integers(1, 20), any_cost, st.floats(1.0, 20.0), budgets)
    def test_rows_that_read_much_are_fewer(
        self, prompts: list[int], decoding: int, latency: StepLatency, slowdown: float, most: int
    ) -> None:
        """Step time stays within the same limit."""
        usual = sum(chunks_of(prompts, decoding, latency, decoding, most))
        total = sum(chunks_of(prompts, decoding, latency, decoding, most, slowdown))
        assert total <= usual
        if total > max(TUNING.min_chunk_tokens, len(prompts)):
            readers = max(1.0, len(prompts) / decoding)
            stretched = max(
                (1.0 + TUNING.max_decode_slowdown * readers) * latency.of(decoding), TUNING.slice_seconds * readers
            )
            assert slowdown * latency.of(decoding + total) <= stretched * (1 + 1e-9)

    def test_prompts_teach_nothing_of_what_a_step_of_short_texts_takes(self) -> None:
        """Rows deep in a long prompt are slower; learning from them would raise the very limit that bounds their
        steps."""
        latency = StepLatency((1, 512), [1.0, 512.0])
        loop = step_loop(TextEngine(20), latency=latency, step_rows=64)
        reader = client(loop, 900, 1, 5)
        while reader.session.remaining_prompt:
            assert latency.of(1) == 1.0
            turns(loop, 1)
        turns(loop, 2)
        assert latency.of(1) < 1.0
        run(loop, reader)

    def test_the_prefill_slowdown_is_learned_and_forgotten(self) -> None:
        slowdown = PrefillSlowdown()
        for _ in range(10):
            slowdown.observe(0.01, 0.04)
        assert slowdown.factor == pytest.approx(4.0, rel=0.01)
        for _ in range(10):
            slowdown.observe(0.01, 0.005)  # no row becomes cheaper than in the latency model
        assert slowdown.factor == pytest.approx(1.0, rel=0.01)

    @pytest.mark.parametrize(("rows", "total"), [(1, 255), (248, 8), (249, 263), (256, 256), (300, 212)])
    def test_many_candidates_leave_room(self, rows: int, total: int) -> None:
        """Prompts fill up a step, or a multiple of one, together with the decode rows that it has anyway."""
        assert sum(chunks_of([1000] * 3, 16, FREE, rows, 256)) == total

    def test_steps_that_hardly_anybody_notices_may_take_that_long(self) -> None:
        """A row takes a millisecond."""
        quick = StepLatency((1, 2), [0.001, 0.002])
        assert chunks_of([100], 2, quick, 2, 512) == [23]
        assert chunks_of([50, 50, 50, 50], 2, quick, 2, 512) == [12] * 4

    def test_a_long_prompt_gets_through(self) -> None:
        """However expensive its rows."""
        left, steps = 1000, 0
        while left:
            (share,) = chunks_of([left], 4, FixedLatency(1e6), 4, 512)
            left -= share
            steps += 1
        assert steps == 1000 / TUNING.min_chunk_tokens


class TestWindowCosts:
    """In a step of 4 rows and 4 tokens, if an additional row costs as much as the average row, a window costs one token
    per row."""

    sizes = (Lookahead(4, 3, 4), Lookahead(3, 2, 1))  # of 7 rows and of 2

    def test_a_window_costs_its_rows(self) -> None:
        costs = WindowCosts(4.0, StepLatency((1, 2), [1.0, 2.0]), 4)
        assert [costs.of(size) for size in self.sizes] == pytest.approx([7.0, 2.0])
        assert costs.of_rows(0) == 0.0
        assert WindowCosts(4.0, FREE, 4).of(self.sizes[0]) == 0.0

    def test_rows_that_others_have_taken_count(self) -> None:
        """In a step that takes twice as long, each row costs half as many tokens."""
        costs = WindowCosts(4.0, StepLatency((1, 2), [1.0, 2.0]), 4)
        assert costs.of(self.sizes[0]) == pytest.approx(7.0)
        costs.add(4)
        assert costs.of(self.sizes[0]) == pytest.approx(3.5)


def test_a_fixed_cost_is_what_it_says() -> None:
    """Checks the fake latency of these tests."""
    latency = FixedLatency(0.5)
    assert [latency.of(n) for n in (1, 2, 3, 2000)] == [1.5, 2.0, 2.5, 1001.0]
    latency.observe(1, 99.0)
    assert all(b - a == 0.5 for a, b in pairwise(latency.of(n) for n in range(1, 10)))
