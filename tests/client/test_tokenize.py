"""Tokenize, with both clients."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.client import AsyncClient, Piece
from tests.client.both import ThreadedClient
from tests.client.fake_server import Act, FakeServer


@pytest.mark.parametrize("kind", [AsyncClient, ThreadedClient])
async def test_tokens_pieces_and_retries(kind: Any) -> None:
    async with FakeServer(Act(then="abort")) as server, kind(server.address) as client:  # the first try fails
        whole = await client.tokenize("é", pieces=True)
        bare = await client.tokenize("é", add_special=False)
        spelt = await client.tokenize(tokens=[0xC3, 0xA9], text=True)
    assert whole.ids == [0, 0xC3, 0xA9]
    assert whole.pieces[1] == Piece("\ufffd", b"\xc3")
    assert (whole.count, whole.context_tokens) == (3, 1024)
    assert (bare.ids, bare.pieces, bare.text) == ([0xC3, 0xA9], [], "")
    assert spelt.text == "é"
    with pytest.raises(ValueError, match="not several"):
        await client.tokenize("a", tokens=[1])
