"""Methods by name: requests that a server accepts, and names that are refused."""

from __future__ import annotations

import pytest

from bench.papers.methods import JACOBI_WINDOW, SPELT, USUAL, Method, MethodError, methods_named
from specdec.client import build_request
from specdec.decoding.lookahead import Lookahead
from specdec.serving.validation import drafter_violations, speculation_limit_violations
from specdec.wire.speculation import DRAFTERS

EXAMPLES = [name.replace("[", "").replace("]", "") for name in SPELT]
EXAMPLES = [
    name.replace("WIDTHS", "4,2,1").replace("W,N,G", "7,4,7").replace("N", "3").replace(":W", ":5") for name in EXAMPLES
]


def only(name: str) -> Method:
    """Return the method of this name; `methods_named` puts plain decoding before it."""
    return methods_named([name], 0.1)[-1]


@pytest.mark.parametrize("name", sorted({*USUAL, *EXAMPLES}))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_server_takes_its_requests(name: str, temperature: float) -> None:
    method = only(name)
    assert method.name == name
    request = build_request("text", **method.asked(temperature))
    assert speculation_limit_violations("speculation", request.speculation) == []
    assert drafter_violations("speculation.drafters", request.speculation.drafters) == []
    assert request.sampling.HasField("temperature") == (name != "contrastive")


def test_every_drafter_is_a_method() -> None:
    kinds = {name.partition(":")[0].partition("[")[0] for name in SPELT}
    assert set(DRAFTERS) <= kinds


def test_chains_may_be_a_range() -> None:
    methods = methods_named(["rejection:1-3", "coupled:2", "plain"], 0.1)
    assert [method.name for method in methods] == ["plain", "rejection:1", "rejection:2", "rejection:3", "coupled:2"]
    assert [method.drafted for method in methods] == [None, 1, 2, 3, 2]
    options = methods[2].asked(1.0)
    assert (options["rule"], options["max_candidates"], options["max_branches"]) == ("rejection", 2, 1)


def test_rules_are_methods_of_their_own_above_temperature_0() -> None:
    at_zero = {name: only(name).fits(0.0) for name in ("assisted", "coupled", "rejection", "remote", "contrastive")}
    assert at_zero == {"assisted": True, "coupled": False, "rejection": False, "remote": True, "contrastive": True}
    assert [only(name).fits(0.8) for name in at_zero] == [False, True, True, True, True]


def test_only_tokens_that_must_be_plain_decodings_are_compared() -> None:
    assert [name for name in USUAL if not only(name).exact] == ["rejection", "contrastive"]


def test_windows_add_their_rows() -> None:
    assert only("lookahead:7,4,7").window == Lookahead(7, 4, 7)
    assert only("lookahead:7,4,7").window_rows == 20
    assert only("jacobi").window == Lookahead(JACOBI_WINDOW, 2, 1)
    assert only("ngram").window_rows == only("branches:4").window_rows == 0
    assert only("auto").window_rows is only("lookahead").window_rows is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("speculative", "speculative: is none of plain, auto, "),
        ("", ": is none of plain"),
        ("plain:1", "plain:1: plain has no value"),
        ("branches", "branches: '' is not a whole number"),
        ("branches:0", "branches:0: N is 0, must be 1 to 16"),
        ("branches:17", "branches:17: N is 17, must be 1 to 16"),
        ("rejection:0-3", "rejection:0-3: N is 0, must be 1 to 128"),
        ("rejection:3-1", "rejection:3-1: the range 3-1 is empty"),
        ("coupled:1-200", "coupled:1-200: N is 129, must be 1 to 128"),
        ("assisted:two", "assisted:two: 'two' is not a whole number"),
        ("assisted:9999999999", "'9999999999' is not a whole number"),
        ("lookahead:7,4", "lookahead:7,4: W,N,G are three numbers"),
        ("lookahead:7,1,7", "lookahead:7,1,7: size.ngram is 1, must be at least 2"),
        ("lookahead:99,9,9", "adds 840 tokens to a step, must add at most 128"),
        ("lookahead:a,b,c", "lookahead:a,b,c: 'a' is not a whole number"),
        ("jacobi:1", "jacobi:1: size.window is 1, must be at least 2"),
        ("jacobi:2,2", "jacobi:2,2: W is one number"),
        ("expansion", "expansion: '' is not a whole number"),
        ("expansion:20", "expansion:20: WIDTHS[0] is 20, must be 1 to 16"),
        ("expansion:16,16,16", "makes a tree of 4368 nodes, must make at most 256"),
    ],
)
def test_a_wrong_name_is_refused_with_the_reason(name: str, said: str) -> None:
    with pytest.raises(MethodError) as error:
        methods_named(["auto", name], 0.1)
    assert said in str(error.value)
