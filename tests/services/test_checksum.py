"""A verifier session's checksum covers the content of the stream, however it is split, and nothing else."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from specdec.serving import checksum
from specdec.v2 import model_pb2, verifier_pb2

TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12)


@given(TOKENS, st.lists(st.integers(0, 12)), st.integers(0, 5))
def test_it_does_not_matter_how_commits_are_cut(tokens: list[int], cuts: list[int], finish: int) -> None:
    found = 7
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(tokens)), len(tokens)]
    for start, end in pairwise(bounds):
        found = checksum.extended(found, tokens[start:end])
    assert checksum.extended(found, [], finish) == checksum.extended(7, tokens, finish)


@given(TOKENS, st.data())
def test_a_flipped_bit_is_seen(tokens: list[int], data: st.DataObject) -> None:
    """Always: CRC-32 detects all single-bit errors."""
    where = data.draw(st.integers(0, len(tokens) - 1))
    flipped = [*tokens]
    flipped[where] ^= 1 << data.draw(st.integers(0, 31))
    assert checksum.extended(0, flipped) != checksum.extended(0, tokens)
    assert checksum.extended(0, tokens, 1) not in {checksum.extended(0, tokens), checksum.extended(0, tokens, -1)}
    opened, other = (
        verifier_pb2.VerifyOpen(prompt_tokens=each, sampling=model_pb2.Sampling(logit_bias={4: 1.0, 3: 2.0}))
        for each in (tokens, flipped)
    )
    assert checksum.of_opening(opened) != checksum.of_opening(other)


def test_an_opening_is_the_same_once_it_has_travelled() -> None:
    sampling = model_pb2.Sampling(temperature=0.7, seed=5, logit_bias={9: 1.5, 3: -2.0, 700: 0.0}, banned_tokens=[4, 2])
    said = verifier_pb2.VerifyOpen(prompt_tokens=[3, 70000], sampling=sampling, min_tokens=3, tenant="tenant")
    said.checksum = checksum.of_opening(said)
    heard = verifier_pb2.VerifyOpen.FromString(said.SerializeToString())
    assert heard.checksum == checksum.of_opening(heard)
    assert checksum.of_opening(heard) == checksum.of_opening(said)
    heard.sampling.seed ^= 64
    assert checksum.of_opening(heard) != checksum.of_opening(said)
