"""transformers' `generate` as a system under test, in a separate process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.systems.system import Load, NotServingError, Setup
from bench.systems.transformers_generate import launches
from tests.models import make


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("models")
    return Setup(make("llama", folder / "target"), make("llama", folder / "draft"), "float32", streams=2, context=64)


def test_every_mode_gives_the_same_text_in_its_own_steps(setup: Setup) -> None:
    load = Load([[5, 6, 7, 8, 5, 6, 7, 8], [9, 8, 7]], 12, 0.0)
    (launch,) = launches(setup)
    with launch.start() as program:
        plain = program.run(load, "plain")
        assisted = program.run(load, "assisted of 3")
        looked_up = program.run(load, "prompt lookup")
        own = program.run(load, "assisted")
        with pytest.raises(NotServingError, match="nonsense: generate has no such mode"):
            program.run(load, "nonsense")
    assert plain.steps == plain.tokens == 24
    assert assisted.steps is not None
    assert assisted.steps < 24  # the target is its own draft
    assert looked_up.tokens == own.tokens == 24
    for answer in (plain, assisted, looked_up, own):
        times = [when for stream in answer.arrivals for when, _ in stream]
        assert times == sorted(times)
        assert 0 < times[0] < times[-1] <= answer.seconds


def test_every_configuration_is_a_mode_and_takes_one_stream(setup: Setup) -> None:
    (drafted,), (alone,) = launches(setup), launches(replace(setup, draft=None))
    assert [each.mode for each in drafted.configurations] == ["plain", "assisted", "assisted of 5", "prompt lookup"]
    assert [each.mode for each in alone.configurations] == ["plain", "prompt lookup"]
    assert all(each.one_stream for each in drafted.configurations)
