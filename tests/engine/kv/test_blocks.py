"""Examples of block tables: shared and copied prefixes, eviction, contiguous slots, publishing and wiping."""

from __future__ import annotations

import random

import pytest

from specdec.engine.kv.blocks import BLOCK, BlockPool
from specdec.engine.kv.slots import PoolFullError
from tests.engine.kv.block_trees import filled, known, nodes, text


def test_the_last_token_is_always_computed() -> None:
    pool = BlockPool(10)
    tokens = text((1, 2 * BLOCK))
    filled(pool, tokens).close()
    again, source, target = pool.open(tokens)
    assert again.shared == 2 * BLOCK - 1
    assert len(source) == BLOCK - 1
    assert not set(source.tolist()) & set(target.tolist())
    longer, source, target = pool.open([*tokens, 1])
    assert longer.shared == 2 * BLOCK
    assert len(source) == len(target) == 0


@pytest.mark.parametrize("tokens", [[], [5], [5, 6]])
def test_a_short_text(tokens: list[int]) -> None:
    pool = BlockPool(4)
    table, source, target = pool.open(tokens)
    assert (table.shared, len(table.slots), len(source), len(target)) == (0, 0, 0, 0)
    table.publish(tokens, len(tokens))
    table.close()
    assert (pool.free, pool.cached) == (3, 0)


def test_the_copied_tail_is_the_longest_there_is() -> None:
    """Among many continuations, wherever the tokens differ."""
    pool = BlockPool(200)
    chance = random.Random(7)
    texts = [[chance.choice([0, 1, 255, 256, 2**32 - 1]) for _ in range(BLOCK)] for _ in range(100)]
    for tokens in texts:
        filled(pool, tokens).close()
    for _ in range(200):
        wanted = chance.choice(texts)[: chance.randrange(6)] + chance.choices([0, 1, 255, 256, 2**32 - 1], k=60)
        best = max(sum(a == b for a, b in common_beginning(tokens, wanted[:-1])) for tokens in texts)
        table, source, _ = pool.open(wanted)
        assert table.shared == len(source) == best
        table.close()


def common_beginning(left: list[int], right: list[int]) -> list[tuple[int, int]]:
    pairs = list(zip(left, right, strict=False))
    end = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return pairs[:end]


def test_scopes_share_nothing() -> None:
    pool = BlockPool(10)
    tokens = text((1, 3 * BLOCK))
    filled(pool, tokens, b"a").close()
    assert pool.open(tokens, b"b")[0].shared == 0
    assert pool.open(tokens)[0].shared == 0
    assert pool.open(tokens, b"a")[0].shared == 3 * BLOCK - 1


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    pool = BlockPool(7)
    texts = [text((token, 2 * BLOCK)) for token in (1, 2, 3)]
    for tokens in texts:
        filled(pool, tokens).close()
    touched, _, _ = pool.open([*texts[0], 9])
    touched.close()
    lengths: list[list[int]] = []
    table, _, _ = pool.open([])
    for blocks in range(1, 7):
        table.reserve(blocks * BLOCK)
        lengths.append([known(pool, tokens) // BLOCK for tokens in texts])
    assert lengths == [[2, 1, 2], [2, 0, 2], [2, 0, 1], [2, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_copying_counts_as_use_and_its_source_is_not_evicted_for_it() -> None:
    pool = BlockPool(3)
    filled(pool, text((1, BLOCK))).close()
    filled(pool, text((2, BLOCK))).close()
    table, source, _ = pool.open(text((1, 30)))
    assert (table.shared, len(source)) == (29, 29)
    assert known(pool, text((1, BLOCK))) == BLOCK
    assert known(pool, text((2, BLOCK))) == 0


def test_no_room_for_a_copy_is_no_error() -> None:
    """The only evictable block is the one to copy from."""
    pool = BlockPool(3)
    filled(pool, text((1, BLOCK))).close()
    table = filled(pool, text((2, 10)))
    other, source, target = pool.open(text((1, 30)))
    assert (other.shared, len(source), len(target), len(other.slots)) == (0, 0, 0, 0)
    assert (pool.held, pool.cached, pool.free) == (1, 1, 0)
    table.close()


def test_held_blocks_are_never_evicted() -> None:
    pool = BlockPool(5)
    tokens = text((1, 2 * BLOCK), (2, BLOCK))
    filled(pool, tokens).close()
    holder, _, _ = pool.open(tokens[: 2 * BLOCK + 1])
    assert holder.shared == 2 * BLOCK
    other, _, _ = pool.open([])
    with pytest.raises(PoolFullError, match="192 key/value slots wanted, 128 free"):
        other.reserve(3 * BLOCK)
    assert (pool.free, pool.cached) == (1, 1)
    other.reserve(2 * BLOCK)
    assert not set(other.slots.tolist()) & set(holder.slots.tolist())


def test_slots_are_contiguous_where_they_can_be() -> None:
    pool = BlockPool(10)
    first, _, _ = pool.open([])
    first.reserve(1)
    hole, _, _ = pool.open([])
    hole.reserve(1)
    second, _, _ = pool.open([])
    second.reserve(2 * BLOCK)
    hole.close()
    third, _, _ = pool.open([])
    third.reserve(3 * BLOCK)  # not in the hole
    first.reserve(2 * BLOCK)  # directly after its first block
    third.reserve(5 * BLOCK)
    for table, block in (first, 1), (second, 3), (third, 5):
        assert table.slots.tolist() == list(range(block * BLOCK, block * BLOCK + len(table.slots)))
    assert pool.free == 0
    second.close()
    first.close()
    scattered, _, _ = pool.open([])
    scattered.reserve(4 * BLOCK)
    third.close()
    assert scattered.slots.tolist() == list(range(BLOCK, 5 * BLOCK))


def test_a_table_grows_right_behind_itself_though_there_is_room_before() -> None:
    pool = BlockPool(6)
    hole, table, behind = (pool.open([])[0] for _ in range(3))
    hole.reserve(BLOCK)
    table.reserve(BLOCK)
    behind.reserve(BLOCK)
    hole.close()
    behind.close()
    for blocks in (2, 3):
        table.reserve(blocks * BLOCK)
    assert table.slots.tolist() == list(range(2 * BLOCK, 5 * BLOCK))
    other, _, _ = pool.open([])
    other.reserve(2 * BLOCK)
    assert other.slots.tolist() == [*range(BLOCK, 2 * BLOCK), *range(5 * BLOCK, 6 * BLOCK)]


def test_an_empty_table_does_not_start_in_a_hole() -> None:
    pool = BlockPool(6)
    hole, table, other = (pool.open([])[0] for _ in range(3))
    hole.reserve(BLOCK)
    table.reserve(BLOCK)
    hole.close()
    other.reserve(3 * BLOCK)
    assert other.slots.tolist() == list(range(3 * BLOCK, 6 * BLOCK))


def test_two_sessions_with_the_same_prompt() -> None:
    """Each computes it. While open, the second keeps its own copy; afterwards one copy and both continuations stay."""
    pool = BlockPool(12)
    prompt = text((1, 2 * BLOCK))
    tables = [pool.open(prompt)[0] for _ in range(2)]
    answers = [prompt + text((answer, 2 * BLOCK)) for answer in (5, 6)]
    for table, tokens in zip(tables, answers, strict=True):
        table.reserve(len(tokens))
        before = table.slots.tolist()
        table.publish(tokens, 2 * BLOCK)
        table.publish(tokens, 4 * BLOCK)
        assert table.slots.tolist() == before
    assert (pool.held, nodes(pool)) == (8, 4)
    tables[1].close()
    assert (pool.held, pool.cached, nodes(pool)) == (4, 2, 6)
    tables[0].close()
    assert (pool.held, pool.cached, nodes(pool)) == (0, 6, 6)
    assert [known(pool, tokens) for tokens in answers] == [4 * BLOCK, 4 * BLOCK]


def test_a_copy_takes_the_place_of_the_evicted_original() -> None:
    pool = BlockPool(5)
    prompt = text((1, 2 * BLOCK))
    first, _, _ = pool.open(prompt)
    second, _, _ = pool.open(prompt)
    for table in (first, second):
        table.reserve(len(prompt))
        table.publish(prompt, len(prompt))
    first.close()
    second.reserve(4 * BLOCK)
    assert nodes(pool) == 0
    second.close()
    assert known(pool, prompt) == 2 * BLOCK
    assert (pool.cached, pool.free) == (2, 2)


def test_publishing_touches_no_token_until_a_block_is_filled() -> None:
    class Watched(list[int]):
        reads = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            self.reads += 1
            return super().__getitem__(index)

    pool = BlockPool(10)
    tokens = Watched(text((1, 5 * BLOCK)))
    table, _, _ = pool.open([])
    table.reserve(len(tokens))
    for computed in range(len(tokens) + 1):
        table.publish(tokens, computed)
    assert tokens.reads == 5


def test_misuse_is_refused() -> None:
    pool = BlockPool(4)
    table, _, _ = pool.open([1])
    with pytest.raises(ValueError, match="computed is 64, must be at most 64 tokens and 0 slots"):
        table.publish([1] * BLOCK, BLOCK)
    table.reserve(BLOCK)
    with pytest.raises(ValueError, match="computed is 64, must be at most 63 tokens and 64 slots"):
        table.publish([1] * (BLOCK - 1), BLOCK)
    table.close()
    with pytest.raises(RuntimeError, match="closed"):
        table.reserve(1)


def test_wiping_forgets_the_prefix_and_its_continuations_for_everyone() -> None:
    pool = BlockPool(20)
    prompt = text((1, 2 * BLOCK))
    failing = filled(pool, prompt)
    continuation = prompt + text((2, BLOCK))
    filled(pool, continuation).close()  # cached
    holder = filled(pool, prompt + text((3, BLOCK)))
    copier, source, _ = pool.open(text((1, BLOCK + 30)))
    assert len(source) == 29
    filled(pool, text((9, BLOCK))).close()
    slots = {name: set(table.slots.tolist()) for name, table in [("holder", holder), ("copier", copier)]}

    spoiled = set(failing.close(wipe=True).tolist())
    assert len(spoiled) == BLOCK  # the cached continuation; the prompt has holders
    assert not spoiled & (slots["holder"] | slots["copier"])
    assert known(pool, continuation) == 0
    assert known(pool, text((9, BLOCK))) == BLOCK
    fresh, source, _ = pool.open(continuation)
    assert (fresh.shared, len(source)) == (0, 0)

    holder.reserve(5 * BLOCK)
    tokens = prompt + text((3, 3 * BLOCK))
    holder.publish(tokens, len(tokens))  # its prefix cannot be found
    assert known(pool, tokens) == 0
    spoiled = set(holder.close().tolist())
    assert len(spoiled) == 4 * BLOCK - BLOCK + BLOCK  # all of its own except the block still held by the copier
    assert not spoiled & slots["copier"]
    spoiled = set(copier.close().tolist())
    assert slots["copier"] <= spoiled
    fresh.close()
    assert (pool.held, pool.cached) == (0, 1)


def test_a_table_is_wiped_if_the_rows_it_copied_are_suspect() -> None:
    pool = BlockPool(10)
    failing = filled(pool, text((1, BLOCK)))
    copier, source, _ = pool.open(text((1, 30)))
    assert len(source) == 29
    failing.close(wipe=True)
    copier.publish(text((1, 30), (2, 34)), BLOCK)
    assert nodes(pool) == 0
    own = copier.slots.tolist()
    assert copier.close().tolist() == own
    assert (pool.held, pool.cached) == (0, 0)


@pytest.mark.parametrize("own", [False, True])
def test_wiping_forgets_the_block_that_rows_were_copied_from(own: bool) -> None:
    """With and without a published block of its own, which does not continue the copied one."""
    pool = BlockPool(10)
    origin = text((1, BLOCK))
    filled(pool, origin).close()
    holder, _, _ = pool.open([*origin, 1])
    copier, source, _ = pool.open(text((1, 30)))
    assert len(source) == 29
    if own:
        copier.publish(text((1, 30), (2, 34)), BLOCK)
    copier.close(wipe=True)
    assert pool.open(text((1, 30)))[0].shared == 0
    assert len(holder.close()) == BLOCK
    assert (pool.held, pool.cached) == (0, 0)


def test_after_a_plain_close_there_is_nothing_to_overwrite() -> None:
    pool = BlockPool(10)
    assert len(filled(pool, text((1, 3 * BLOCK + 5))).close()) == 0
    assert (pool.cached, pool.free) == (3, 6)


def test_nothing_grows_over_many_sessions() -> None:
    """Sessions have ever new scopes and texts; some are wiped."""
    pool = BlockPool(9)
    for number in range(10_000):
        tokens = [number] * (BLOCK * (1 + number % 3) + 1)
        filled(pool, tokens, scope=f"tenant {number % 5000}".encode()).close(wipe=number % 100 == 0)
        if number % 500 == 0:
            assert nodes(pool) == pool.cached == len(pool._cached)
            assert len(pool._roots) <= pool.cached
    assert pool.held == 0
    assert pool.free + pool.cached == pool.usable
