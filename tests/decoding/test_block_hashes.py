"""Block hashes identify prefixes of texts, as defined in the contract."""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.block_hashes import HASHED_TOKENS, block_hashes, cache_scope

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=3 * HASHED_TOKENS + 1)


@given(TOKENS, TOKENS, st.binary(max_size=5))
def test_a_longer_text_has_the_same_hashes_first(beginning: list[int], rest: list[int], scope: bytes) -> None:
    hashes = block_hashes(beginning, scope)
    assert len(hashes) == len(beginning) // HASHED_TOKENS
    whole = block_hashes(beginning + rest, scope)
    assert whole[: len(hashes)] == hashes
    assert block_hashes((beginning + rest)[HASHED_TOKENS * len(hashes) :], scope, hashes) == whole


@given(TOKENS, st.data())
def test_all_blocks_from_a_changed_token_on_have_other_hashes(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, max(0, len(tokens) - 1)))
    changed = [token ^ (index == place) for index, token in enumerate(tokens)]
    same = [a == b for a, b in zip(block_hashes(tokens, b""), block_hashes(changed, b""), strict=True)]
    assert same == [block < place // HASHED_TOKENS for block in range(len(same))]


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)


@given(NAMES, NAMES, NAMES, NAMES)
def test_scopes_are_of_one_tenant_and_one_salt(tenant: str, salt: str, other: str, other_salt: str) -> None:
    same = cache_scope(tenant, salt) == cache_scope(other, other_salt)
    assert same == ((tenant, salt) == (other, other_salt))


def test_scopes_share_no_hash() -> None:
    text = [1] * (2 * HASHED_TOKENS)
    scopes = [cache_scope(*names) for names in (("a",), ("b",), ("a", "b"), ("ab",), ("", "a"))]
    hashes = [block_hash for scope in scopes for block_hash in block_hashes(text, scope)]
    assert len(set(hashes)) == len(hashes) == 10


@pytest.mark.parametrize(("salt", "root"), [("", b"tenant"), ("salt", b"tenant\xffsalt")])
def test_hashes_are_as_the_contract_defines_them(salt: str, root: bytes) -> None:
    tokens = list(range(2 * HASHED_TOKENS + 5))
    before = blake2b(root, digest_size=8).digest()
    expected = []
    for block in (tokens[:64], tokens[64:128]):
        before = blake2b(before + struct.pack("<64I", *block), digest_size=8).digest()
        expected.append(struct.unpack("<Q", before)[0])
    assert block_hashes(tokens, cache_scope("tenant", salt)) == expected
