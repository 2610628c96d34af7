"""The colours of tokens on a terminal: every token source has one."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from specdec.cli.shown import SOURCES, STYLES, coloured, speculation_lines, without_controls
from specdec.client import Speculation
from specdec.client.completion import read_chunk
from specdec.v2 import generation_pb2 as pb
from specdec.v2.model_pb2 import SpeculationDecisions, TokenSource
from specdec.wire.sources import source_name

CHUNK = read_chunk(
    pb.GenerateResponse(
        text="a\tb\x1b[5m\n",
        token_texts=["thought", "a\tb", "\x1b[5m\n"],
        tokens=[1, 2, 3],
        sources=[TokenSource.TOKEN_SOURCE_PLAIN, TokenSource.TOKEN_SOURCE_NGRAM, TokenSource.TOKEN_SOURCE_BONUS],
        reasoning_tokens=1,
    )
)


def test_every_token_source_has_a_colour() -> None:
    sources = {source_name(number) for number in TokenSource.values()}
    assert STYLES.keys() == SOURCES.keys() == sources - {"unspecified"}


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"color_system": "standard"}, "\x1b[33ma\tb\x1b[0m\x1b[36m\ufffd[5m\n\x1b[0m"),
        ({"color_system": "truecolor"}, "\x1b[33ma\tb\x1b[0m\x1b[36m\ufffd[5m\n\x1b[0m"),
        ({"color_system": "standard", "no_color": True}, "a\tb\ufffd[5m\n"),
        ({"color_system": None}, "a\tb\ufffd[5m\n"),
    ],
)
def test_colours_stand_around_the_text_as_it_is(settings: dict[str, object], shown: str) -> None:
    """Tabs are kept, and control sequences in a model's text are not executed."""
    console = Console(file=io.StringIO(), force_terminal=True, **settings)  # type: ignore[arg-type]
    assert coloured(CHUNK, console) == shown


def test_control_characters_are_replaced() -> None:
    controls = [chr(code) for code in (*range(32), *range(127, 160))]
    assert {each for each in controls if without_controls(each) == each} == {"\t", "\n"}
    assert without_controls("d\u00e9j\u00e0 \u6771\u4eac") == "d\u00e9j\u00e0 \u6771\u4eac"


def speculation(**fields: Any) -> Speculation:
    statistics = pb.SpeculationStatistics(sources={"ngram": 3, "bonus": 5, "new": 1}, **fields)
    chunk = read_chunk(pb.GenerateResponse(finish=pb.Finish(speculation=statistics)))
    assert chunk.finish is not None
    return chunk.finish.speculation


def test_the_summary_is_the_legend() -> None:
    decisions = SpeculationDecisions(modes={"ngram": 4}, without={"nothing_proposed": 1})
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    by_source, why = speculation_lines(speculation(decisions=decisions), console, in_colours=True)
    assert "\x1b[33mn-grams 3\x1b[0m" in by_source
    assert "\x1b[36mtarget after candidates 5\x1b[0m" in by_source
    assert "speculation mode n-grams: 3 of 4 steps had candidates; 1 had none: nothing was proposed" in why
    plain = Console(file=io.StringIO(), color_system=None)
    assert speculation_lines(speculation(decisions=decisions), plain, in_colours=False) == [
        "tokens by source: target after candidates 5, n-grams 3, new 1",
        "speculation mode n-grams: 3 of 4 steps had candidates; 1 had none: nothing was proposed",
    ]


def test_an_older_server_says_nothing_of_its_decisions() -> None:
    console = Console(file=io.StringIO(), color_system=None)
    assert len(speculation_lines(speculation(), console, in_colours=False)) == 1
