"""Block hashes identify prefixes of texts, as defined in the contract."""

from __future__ import annotations

import struct
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.block_hashes import HASHED_TOKENS, block_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=3 * HASHED_TOKENS + 1)


@given(TOKENS, TOKENS, st.text(max_size=5))
def test_a_longer_text_has_the_same_hashes_first(beginning: list[int], rest: list[int], tenant: str) -> None:
    hashes = block_hashes(beginning, tenant)
    assert len(hashes) == len(beginning) // HASHED_TOKENS
    assert block_hashes(beginning + rest, tenant)[: len(hashes)] == hashes


@given(TOKENS, st.data())
def test_all_blocks_from_a_changed_token_on_have_other_hashes(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, max(0, len(tokens) - 1)))
    changed = [token ^ (index == place) for index, token in enumerate(tokens)]
    same = [a == b for a, b in zip(block_hashes(tokens, ""), block_hashes(changed, ""), strict=True)]
    assert same == [block < place // HASHED_TOKENS for block in range(len(same))]


def test_tenants_share_no_hash() -> None:
    text = [1] * (2 * HASHED_TOKENS)
    assert not set(block_hashes(text, "a")) & set(block_hashes(text, "b"))


def test_hashes_are_as_the_contract_defines_them() -> None:
    tokens = list(range(2 * HASHED_TOKENS + 5))
    before = blake2b(b"tenant", digest_size=8).digest()
    expected = []
    for block in (tokens[:64], tokens[64:128]):
        before = blake2b(before + struct.pack("<64I", *block), digest_size=8).digest()
        expected.append(struct.unpack("<Q", before)[0])
    assert block_hashes(tokens, "tenant") == expected
