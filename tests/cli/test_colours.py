"""The colours of tokens on a terminal: each source has its own entry, whatever it is called on the wire."""

from __future__ import annotations

from specdec.cli.generate import STYLES
from specdec.client.sources import source_name
from specdec.v2.model_pb2 import TokenSource


def test_every_token_source_has_a_colour() -> None:
    sources = {source_name(number) for number in TokenSource.values()}
    assert STYLES.keys() == sources - {"unspecified"}
